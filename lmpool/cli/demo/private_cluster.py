"""A Redis Cluster and workers of a demo's own, which end with the demo however that ends."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import redis
import redis.exceptions

from lmpool.address import in_url
from lmpool.errors import LmpoolError
from lmpool.producer.embedded.private_server import find_server, machine_memory
from lmpool.producer.embedded.room import WANTS, last_lines, make_folder, no_folder
from lmpool.slots import SLOTS
from lmpool.variables import as_variables

HOST: Final = "127.0.0.1"
PORTS: Final = range(22_000, 22_700)
"""No connection has one of these, nor of their buses, at its own end."""
BUS: Final = 10_000
"""What a node adds to its port for that of the bus."""
START_WITHIN: Final = 30.0
NODE_TIMEOUT_MS: Final = 1000
"""A demo's: one on many machines takes a pause of a second for no death."""
SMALLEST_MEMORY: Final = 64 << 20
LAST_LINES: Final = 12
_WHAT: Final = "a cluster of a demo's own"


@dataclass(frozen=True, slots=True)
class Process:
    """One that was started: a node, where it listens, or a worker."""

    popen: subprocess.Popen[bytes]
    port: int = 0

    @property
    def address(self) -> str:
        """``host:port``."""
        return in_url((HOST, self.port))


@dataclass(frozen=True, slots=True)
class Range:
    """Slots, the first and the last of them, and who serves them."""

    first: int
    last: int
    primary: Process


class PrivateCluster:
    """Primaries with a replica each, and workers of one pool. For use in a with statement."""

    def __init__(self, primaries: int, pool: str) -> None:
        self._program = find_server()
        self._count = primaries
        self.pool = pool
        self._password = secrets.token_urlsafe(24)
        self.folder = make_folder(_WHAT)
        self.nodes: list[Process] = []
        self.workers: list[Process] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # The leader of a process group that all others join. It ends the group, and removes the
        # folder, when our end of its pipe is closed: also where this process is killed.
        self._guard = subprocess.Popen(
            ["sh", "-c", 'trap "" HUP INT TERM; read -r _; rm -rf "$0"; kill -9 0', self.folder],
            stdin=subprocess.PIPE,
            process_group=0,
        )
        try:
            self._form()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError) and error.errno in WANTS:
                raise no_folder(_WHAT, error) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        for process in (*self.workers, *self.nodes):
            process.popen.wait()
        self._guard.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """Where its clients find it: a few nodes lead to all."""
        seeds = ",".join(node.address for node in self.nodes[: self._count])
        return f"redis+cluster://:{self._password}@{seeds}/"

    @property
    def version(self) -> str:
        """What the nodes are, such as ``Redis 7.2.4``."""
        return self._program.version

    @property
    def group(self) -> int:
        """The process group that ends with the demo."""
        assert self._guard is not None
        return self._guard.pid

    def layout(self) -> list[Range]:
        """Where slots lie, as the first node says that answers."""
        for node in self.nodes:
            if node.popen.poll() is not None:
                continue
            with suppress(redis.exceptions.RedisError, OSError), self._client(node) as client:
                ranges = _cluster(client, "SLOTS")
                by_port = {node.port: node for node in self.nodes}
                return [Range(first, last, by_port[each[1]]) for first, last, each, *_ in ranges]
        raise LmpoolError("no node of the demo's cluster answers")

    def replica_of(self, primary: Process) -> Process | None:
        """Who follows a node that began as a primary."""
        number = self.nodes.index(primary)
        return self.nodes[self._count + number] if number < self._count else None

    def _client(self, node: Process) -> redis.Redis:
        return redis.Redis(HOST, node.port, password=self._password, protocol=2, socket_timeout=2)

    # --- starting ------------------------------------------------------------------------------

    def _form(self) -> None:
        self._start_nodes()
        clients = [self._client(node) for node in self.nodes]
        try:
            for number, client in enumerate(clients):
                _cluster(client, "SET-CONFIG-EPOCH", number + 1)
                if number < self._count:
                    first, end = (SLOTS * n // self._count for n in (number, number + 1))
                    _cluster(client, "ADDSLOTSRANGE", first, end - 1)
                for other in self.nodes[:number]:  # gossip would take longer
                    _cluster(client, "MEET", HOST, other.port)
            names = [_cluster(client, "MYID").decode() for client in clients]
            self._until_all(clients, partial(_knows, names), "the nodes to meet")
            for number, client in enumerate(clients[self._count :]):
                _cluster(client, "REPLICATE", names[number])
            self._until_all(clients, _serves, "the cluster to serve")
        finally:
            for client in clients:
                client.close()

    def _until_all(
        self, clients: Sequence[redis.Redis], reached: Callable[[redis.Redis], bool], what: str
    ) -> None:
        """Wait for each node. Raises `LmpoolError` where one has ended."""
        for node, client in zip(self.nodes, clients, strict=True):
            _until(lambda: node.popen.poll() is not None or reached(client), what)  # noqa: B023
            if node.popen.poll() is not None:
                last = self._last_words(f"{node.port}.log")
                raise LmpoolError(f"a node of the demo's cluster ended:\n{last}")

    def _last_words(self, log: str) -> str:
        return last_lines(self.folder / log, LAST_LINES, self.folder.parent)

    def _start_nodes(self) -> None:
        ports = iter(random.SystemRandom().sample(PORTS, len(PORTS)))
        while len(self.nodes) < 2 * self._count:
            port = next((port for port in ports if _is_free(port)), None)
            if port is None:
                raise LmpoolError(
                    f"the demo's cluster has too few ports: {len(self.nodes)} of "
                    f"{2 * self._count} free from {PORTS.start} to {PORTS.stop - 1} "
                    f"(each with the one {BUS} above it)"
                )
            node = self._start_node(port)
            self.nodes.append(node)
            if not self._listens(node):  # somebody was faster
                self.nodes.remove(node)

    def _listens(self, node: Process) -> bool:
        """Once it does, or has ended as its port was taken meanwhile."""
        with self._client(node) as client:
            _until(lambda: node.popen.poll() is not None or _answers(client), "a node to answer")
        if node.popen.poll() is None:
            return True
        said = self._last_words(f"{node.port}.log")
        if "Address already in use" not in said:
            raise LmpoolError(f"a node of the demo's cluster ended at its start:\n{said}")
        return False

    def _start_node(self, port: int) -> Process:
        folder = self.folder / str(port)
        folder.mkdir(mode=0o700)
        memory = max(SMALLEST_MEMORY, machine_memory() // 4 // (2 * self._count))
        lines = [
            f'dir "{folder}"', f"bind {HOST}", f"port {port}", "daemonize no", 'save ""',
            "appendonly no", f"maxmemory {memory}", "maxmemory-policy noeviction",
            f"requirepass {self._password}", f"masterauth {self._password}",
            "cluster-enabled yes", f"cluster-node-timeout {NODE_TIMEOUT_MS}",
            "cluster-require-full-coverage no", "repl-diskless-sync-delay 0",
        ]  # fmt: skip
        # In a file: command lines are for everybody to read.
        configuration = folder / "node.conf"
        configuration.touch(mode=0o600)
        configuration.write_text("\n".join(lines) + "\n")
        return Process(self._start([self._program.path, str(configuration)], f"{port}.log"), port)

    def start_workers(self, count: int, settings: Mapping[str, Any]) -> None:
        """Start so many workers with these settings."""
        variables = as_variables({**settings, "url": self.url, "pool": self.pool})
        command = [sys.executable, "-P", "-m", "arq", "lmpool.worker.WorkerSettings"]
        for number in range(count):
            self.workers.append(Process(self._start(command, f"worker-{number}.log", variables)))

    def wait_for_workers(self, alive: Callable[[], int], within: float) -> None:
        """Return once all of them serve, as `alive` counts. Raises `LmpoolError` where one ends."""
        deadline = time.monotonic() + within
        while alive() < len(self.workers):
            for number, worker in enumerate(self.workers):
                if worker.popen.poll() is not None:
                    last = self._last_words(f"worker-{number}.log")
                    raise LmpoolError(f"a worker ended before it was ready:\n{last}")
            if time.monotonic() > deadline:
                raise LmpoolError(f"the workers are not ready after {within:g} s")
            time.sleep(0.05)

    def _start(
        self, command: Sequence[str], log: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(variables or {})},
                process_group=self.group,
            )


def _is_free(port: int) -> bool:
    """Whether nobody listens there, nor on its bus's port."""
    with socket.socket() as one, socket.socket() as other, suppress(OSError):
        one.bind((HOST, port))
        other.bind((HOST, port + BUS))
        return True
    return False


def _cluster(client: redis.Redis, *words: str | int) -> Any:
    return client.execute_command("CLUSTER", *words)


def _answers(client: redis.Redis) -> bool:
    return bool(client.ping())


def _knows(names: Sequence[str], client: redis.Redis) -> bool:
    lines = _cluster(client, "NODES").decode().splitlines()
    return {line.split()[0] for line in lines if "handshake" not in line} >= {*names}


def _serves(client: redis.Redis) -> bool:
    info: dict[str, Any] = client.info("replication")  # type: ignore[assignment]
    follows = info["role"] == "master" or info["master_link_status"] == "up"
    said = _cluster(client, "INFO").split()
    # A node that lacks slots may be well: it is to know of all of them first.
    return follows and {b"cluster_state:ok", b"cluster_slots_assigned:%d" % SLOTS} <= {*said}


def _is_reached(reached: Callable[[], bool]) -> bool:
    try:
        return reached()
    except (redis.exceptions.TimeoutError, redis.exceptions.ConnectionError):
        return False  # a busy machine lets a node wait


def _until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_WITHIN
    while not _is_reached(reached):
        if time.monotonic() > deadline:
            raise LmpoolError(
                f"the demo's cluster did not form: waited {START_WITHIN:g} s for {what}"
            )
        time.sleep(0.02)
