"""A primary, a replica and three Sentinels that speak TLS and know users, and what befalls them."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import redis

from lmpool.keys import GROUP
from tests.chaos.load import Load
from tests.support.certificates import certificates
from tests.support.faults import Faults
from tests.support.pools import until_at_rest
from tests.support.ports import free_port
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess

USERS = Path(__file__).parents[2] / "deploy" / "redis" / "users.acl"
OWN_USERS = (
    "user replica on >r +psync +replconf +ping\n"
    "user sentinel on >s allchannels +multi +slaveof +ping +exec +subscribe +config|rewrite +role "
    "+publish +info +client|setname +client|kill +script|kill\n"
    "user test on >t ~* &* +@all\n"
)
LOST = redis.exceptions.RedisError
BACK_WITHIN = 10.0
"""Seconds after the return of a primary within which everybody is served again."""


class Node(RealServer):
    """A server of `deploy/redis`'s users that speaks TLS to all but the test itself."""

    def __init__(self, binary: str, tls: dict[str, str], **options: str) -> None:
        self.tls_port = free_port()
        super().__init__(
            tcp=True,
            binary=binary,
            tls_port=str(self.tls_port),
            tls_replication="yes",
            masteruser="replica",
            masterauth="r",
            **tls,
            **options,
        )
        users = self.folder / "users.acl"
        users.write_text(USERS.read_text() + OWN_USERS)
        self.options["aclfile"] = str(users)

    def client(self) -> redis.Redis:
        """A connection of the test's own, with all rights and without TLS; close it."""
        return redis.Redis(
            port=self.port, username="test", password="t", protocol=2, socket_timeout=5
        )

    @property
    def test_url(self) -> str:
        """The same as a URL."""
        return f"redis://test:t@127.0.0.1:{self.port}/0"

    def is_primary(self) -> bool:
        """Whether it answers, and as the primary."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError), self.client() as client:
            return bool(client.info("replication")["role"] == "master")
        return False


class ReplicatedPool:
    """Workers with the worker's role and a load with the producer's, through the Sentinels."""

    def __init__(
        self, folder: Path, binary: str, *, seed: int, append_only: bool, patience: float = 0.0
    ) -> None:
        self.random = random.Random(seed)
        self.back_within = BACK_WITHIN + patience
        """`patience`: seconds more than is promised, where other tests run beside this one."""
        self.longest_return = 0.0
        """Seconds, at most, from a primary's return until everybody was served."""
        self.done: list[str] = []
        """What befell it."""
        self._seed = seed
        self._tls = certificates(folder)
        saved = {"appendonly": "yes", "appendfsync": "everysec"} if append_only else {}
        self.nodes = [Node(binary, self._tls, **saved) for _ in range(2)]
        self.nodes[1].options["replicaof"] = f"127.0.0.1 {self.nodes[0].tls_port}"
        self._ports = [free_port() for _ in range(3)]
        self._sentinels: list[subprocess.Popen[bytes]] = []
        self.workers: list[WorkerProcess] = []
        # What an append-only file holds is read within seconds when its server starts.
        self._settings = {
            "batch_size": 16,
            "result_ttl": 30,
            **Faults(folder).settings(delay=0.004),
        }
        self._ended = threading.Event()
        self._stack = ExitStack()

    def url(self, user: str) -> str:
        """How a user of `deploy/redis` reaches the primary."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        login = f"{user}:change-this-{user}"
        trusted = self._tls["tls_ca_cert_file"]
        return f"rediss+sentinel://{login}@{hosts}/main/0?ssl_ca_certs={trusted}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            # From now on the Sentinels say whose replica it is, as in a file that they rewrite.
            del self.nodes[1].options["replicaof"]
            stack.callback(self._stop_sentinels)
            for port in self._ports:
                self._start_sentinel(port)
            until(self._knows_each_other, what="the Sentinels to find each other", every=0.1)
            stack.callback(self._stop_workers)
            self.workers = [self._start_worker() for _ in range(2)]
            for worker in self.workers:
                worker.wait_until_alive()
            supervisor = threading.Thread(target=self._supervise)
            supervisor.start()
            stack.callback(supervisor.join)
            stack.callback(self._ended.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    def load(self) -> Load:
        """Callers of this pool."""
        return Load(self.url("producer"), "chaos", seed=self._seed, timeout=90.0)

    def primary(self) -> Node:
        """The node that the Sentinels name, once it is one."""

        def found() -> Node | None:
            port = self._named()
            return next((n for n in self.nodes if n.tls_port == port and n.is_primary()), None)

        node = until(found, 60, what="a primary", every=0.1)
        assert node is not None
        return node

    def befall(self, load: Load) -> None:
        """One fault, at random; return once everybody is served again."""
        fault = self.random.choice(
            [
                self.kill_primary,
                self.kill_primary,
                self.fail_over,
                self.freeze_primary,
                self.restart,
            ]
        )
        if self.random.random() < 0.5:
            self.small_fault()
        self.done.append(fault.__name__)
        try:
            fault()
            self.primary()
            back = time.monotonic()
            until(
                lambda: self._is_served(load, back),
                self.back_within,
                what="the load to be served",
                every=0.05,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter {self.done}\n{self._diagnosis()}") from None
        took = time.monotonic() - back
        self.longest_return = max(self.longest_return, took)
        print(f"{time.strftime('%X')} {fault.__name__}: served after {took:.1f} s", flush=True)

    def kill_primary(self) -> None:
        """It comes back later, to be the other's replica."""
        node = self.primary()
        node.kill()
        time.sleep(self.random.uniform(0.2, 6.0))
        node.start()

    def freeze_primary(self) -> None:
        node = self.primary()
        node.pause()
        time.sleep(self.random.uniform(0.5, 5.0))
        node.resume()

    def fail_over(self) -> None:
        node = self.primary()

        def is_over() -> bool:
            if self._named() != node.tls_port or not node.is_primary():
                return True
            # A replica that is not up in time is not promoted: the Sentinel gives up.
            return "failover_in_progress" not in client.sentinel_master("main")["flags"]

        with self._sentinel(self.random.choice(self._ports)) as client:
            try:
                client.sentinel_failover("main")
            except redis.exceptions.ResponseError:
                return  # one goes on, or there is no replica that is fit
            until(is_over, what="the failover to be over", every=0.1)

    def restart(self) -> None:
        """In order: it saves what it is told to save."""
        node = self.primary()
        node.stop()
        node.start()

    def small_fault(self) -> None:
        """What nobody should notice much."""
        which = self.random.randrange(4)
        if which == 0:
            self.random.choice(self.workers).process.kill()
        elif which == 1:
            port = self.random.choice(self._ports)
            place = self._ports.index(port)
            self._sentinels[place].kill()
            self._sentinels[place].wait(60)
            self._start_sentinel(port, place)
        elif which == 2:
            with (
                contextlib.suppress(redis.exceptions.RedisError),
                self.primary().client() as client,
            ):
                client.client_kill_filter(_type="normal", skipme=True)
        else:
            with (
                contextlib.suppress(redis.exceptions.RedisError),
                self.primary().client() as client,
            ):
                client.script_flush()
        self.done.append(f"small fault {which}")

    def check_nothing_left(self) -> None:
        """No job, flight or reply, and no consumer of a worker that is gone."""
        with self.primary().client() as client:
            until_at_rest(client, "chaos", 40)

    def _is_served(self, load: Load, since: float) -> bool:
        return sum(begin > since and rows > 0 for begin, _, rows in load.outcomes.calls) >= 4

    def _diagnosis(self) -> str:
        """What the servers hold, what the clients' threads are at, and the workers' and theirs."""
        lines = [f"the Sentinels name {self._named()}"]
        for node in self.nodes:
            lines.append(f"--- the server at {node.tls_port}")
            try:
                with node.client() as client:
                    lines += what_it_holds(client)
            except (redis.exceptions.RedisError, OSError) as error:
                lines.append(str(error))
            lines.append(node.log.read_text()[-3000:])
        for port in self._ports:
            said = (self.nodes[0].folder / f"sentinel-{port}.log").read_text()
            lines.append(f"--- the Sentinel at {port}\n{said[-4000:]}")
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread.name.startswith("lmpool"):
                stack = "".join(traceback.format_stack(frames[thread.ident or 0])[-6:])
                lines.append(f"--- {thread.name}\n{stack}")
        for worker in self.workers:
            worker.process.send_signal(signal.SIGABRT)  # it writes down where its threads are
            worker.process.wait(60)
            lines.append(f"--- {worker.pid}: {worker.log[-20_000:]}")
        return "\n".join(lines)

    def _named(self) -> int | None:
        for port in self._ports:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                with self._sentinel(port) as client:
                    found = client.sentinel_get_master_addr_by_name("main")
                if found is not None:
                    return int(found[1])
        return None

    def _sentinel(self, port: int) -> redis.Redis:
        trusted = self._tls["tls_ca_cert_file"]
        return redis.Redis(
            "127.0.0.1", port, ssl=True, ssl_ca_certs=trusted, protocol=2, socket_timeout=2
        )

    def _knows_each_other(self) -> bool:
        for port in self._ports:
            try:
                with self._sentinel(port) as client:
                    found = client.sentinel_master("main")
            except (redis.exceptions.RedisError, OSError):
                return False
            if found["num-other-sentinels"] != 2 or found["num-slaves"] != 1:
                return False
        return True

    def _start_sentinel(self, port: int, place: int | None = None) -> None:
        folder = self.nodes[0].folder
        file = folder / f"sentinel-{port}.conf"
        if place is None:
            tls = "".join(f"{k.replace('_', '-')} {v}\n" for k, v in self._tls.items())
            file.write_text(
                f"port 0\ntls-port {port}\ntls-replication yes\n{tls}bind 127.0.0.1\n"
                f"dir {folder}\nsentinel monitor main 127.0.0.1 {self.nodes[0].tls_port} 2\n"
                "sentinel auth-user main sentinel\nsentinel auth-pass main s\n"
                "sentinel down-after-milliseconds main 1000\n"
                "sentinel failover-timeout main 5000\n"
            )
        with (folder / f"sentinel-{port}.log").open("ab") as log:
            process = subprocess.Popen(
                [self.nodes[0].binary, str(file), "--sentinel"], stdout=log, stderr=log
            )
        if place is None:
            self._sentinels.append(process)
        else:
            self._sentinels[place] = process

    def _stop_sentinels(self) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait(60)

    def _start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self.url("worker"), "chaos", **self._settings)
        worker.url = self.nodes[0].test_url  # where tests look, before anything befalls it
        return worker

    def _supervise(self) -> None:
        while not self._ended.wait(0.1):
            for place, worker in enumerate(self.workers):
                if worker.process.poll() is not None:
                    log = worker.log
                    if worker.process.returncode != -signal.SIGKILL:
                        self.done.append(f"a worker ended:\n{log}")
                    worker.close()
                    self.workers[place] = self._start_worker()

    def _stop_workers(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.terminate()
        for worker in self.workers:
            try:
                worker.wait(40)
            finally:
                worker.close()


def what_it_holds(client: redis.Redis) -> list[str]:
    """Its role, who is connected, and whatever is about jobs."""
    found: Any = client.info("replication")
    lines = [f"{found['role']}, {found.get('master_link_status')}, {client.dbsize()} keys"]
    lines += [f"{c['name']} {c['cmd']} {c['idle']} {c['user']}" for c in client.client_list()]
    for key in sorted(client.scan_iter("*lmpool*", count=10_000)):
        name = key.decode()
        if ":result:" in name:
            continue
        if ":jobs:" in name or ":batch:" in name:
            lines.append(f"{name}: {client.xinfo_groups(key)}")
            lines += map(str, client.xinfo_consumers(key, GROUP))
            lines += [str(entry) for entry, _ in client.xrange(key, count=100)]
            lines += map(str, client.xpending_range(key, GROUP, "-", "+", 100))
        elif ":flight:" in name:
            lines.append(f"{name}: {client.get(key)!r}")
        elif ":alive:" in name or name.endswith(":steady"):
            lines.append(f"{name}: {client.get(key)!r:.60}, ends in {client.pttl(key)} ms")
    return lines
