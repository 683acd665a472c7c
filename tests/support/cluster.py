"""Real clusters for tests, and what operators and accidents do to them.

Their nodes are `RealServer`s. They end with the process that started them, also when that is
killed.
"""

from __future__ import annotations

import binascii
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import redis

from tests.support.ports import node_port
from tests.support.server import RealServer
from tests.support.waiting import until

SLOTS: Final = 16_384
TOGETHER: Final = 128
"""Slots whose few commands travel together."""

MEET_EVERY: Final = 2.0
"""Seconds between two tries of nodes that do not know each other."""

OWN_USERS: Final = (
    "user replica on >r +psync +replconf +ping +cluster\nuser test on >t ~* &* +@all\n"
)
"""Users that nodes and tests need beside those of an operator."""

_LOST = (redis.exceptions.RedisError, OSError)


@dataclass(frozen=True)
class Member:
    """A line of ``CLUSTER NODES``: what one node says of one that it knows."""

    id: str
    port: int
    flags: frozenset[str]
    primary: str
    """Whose replica it is, or ''."""
    slots: tuple[tuple[int, int], ...]
    """The first and the last slot of each range."""

    @classmethod
    def parse(cls, line: str) -> Member:
        """Read such a line."""
        name, address, flags, primary, _, _, _, _, *slots = line.split()
        port = int(re.split("[@,]", address.rpartition(":")[2])[0])
        ranges = [slot.partition("-") for slot in slots if not slot.startswith("[")]
        return cls(
            name,
            port,
            frozenset(flags.split(",")),
            "" if primary == "-" else primary,
            tuple((int(first), int(last or first)) for first, _, last in ranges),
        )

    @property
    def serves(self) -> bool:
        """Whether it is a primary of slots, and nobody takes it for gone."""
        return bool(self.slots) and "master" in self.flags and "fail" not in self.flags


class ClusterNode(RealServer):
    """A node; its address stays the same when it is started again."""

    def __init__(
        self,
        folder: Path,
        *,
        binary: str | None,
        host: str,
        tls: bool,
        group: int,
        users: str,
        announce: Callable[[int], dict[str, str]],
        **options: str,
    ) -> None:
        self.cluster_port = node_port(host)
        """Where clients of the cluster and other nodes find it."""
        folder /= str(self.cluster_port)
        folder.mkdir()
        super().__init__(port=self.cluster_port, binary=binary, folder=folder, bind=host, **options)
        self.host = host
        self.group = group
        self.options.update(announce(self.cluster_port))
        if tls:  # the test itself speaks none
            self.port = node_port(host)
            self.options.update(tls_port=str(self.cluster_port), tls_cluster="yes")
            self.options["tls_replication"] = "yes"
        if users:
            file = self.folder / "users.acl"
            file.write_text(users)
            self.options.update(aclfile=str(file), masteruser="replica", masterauth="r")
        self._login = {"username": "test", "password": "t"} if users else {}
        self.is_paused = False
        self.id = ""

    @property
    def url(self) -> str:
        """Where it listens without TLS, as a URL of one server."""
        login = "test:t@" if self._login else ""
        return f"redis://{login}{in_brackets(self.host)}:{self.port}/0"

    def client(self) -> redis.Redis:
        """A connection of the test's own, with all rights and without TLS; close it."""
        return redis.Redis(
            self.host,
            self.port,
            protocol=2,
            socket_timeout=15.0,
            socket_connect_timeout=15.0,
            **self._login,  # type: ignore[arg-type]
        )

    def command(self, *words: Any) -> Any:
        """Have it do something, and nothing else: redirections are errors."""
        with self.client() as client:
            return client.execute_command(*words)

    def commands(self, lines: Iterable[Sequence[Any]]) -> list[Any]:
        """Have it do many things; errors come as answers."""
        with self.client() as client, client.pipeline(transaction=False) as pipe:
            for words in lines:
                pipe.execute_command(*words)
            return list(pipe.execute(raise_on_error=False))

    def start(self) -> Self:
        """Start it and wait until it answers, which is before it serves."""
        super().start()
        self.is_paused = False
        self.id = str(self.command("CLUSTER", "MYID").decode())
        return self

    @property
    def runs(self) -> bool:
        """Whether it has been started, and neither ended nor paused."""
        return self._process is not None and not self.is_paused

    def pause(self) -> None:
        """Freeze it: connections stay open, nothing is answered."""
        super().pause()
        self.is_paused = True

    def resume(self) -> None:
        """Let it go on."""
        super().resume()
        self.is_paused = False

    def members(self) -> list[Member]:
        """Whom it knows, itself included."""
        return _members(self.command("CLUSTER", "NODES"))

    def __repr__(self) -> str:
        return f"<node {self.cluster_port}>"


class Cluster:
    """`primaries` primaries, each with as many `replicas`, over which the slots lie evenly.

    `node_timeout` is ``cluster-node-timeout`` in seconds. `append_only` nodes come back with what
    they held. With `tls`, its directives (certificates), clients and nodes speak TLS. With `users`,
    the text of an ACL file, every node knows those users, and nobody else gets in. `announce` gives
    further directives of a node, by its port: ``cluster_announce_hostname``, for example. `options`
    are directives of every node.
    """

    def __init__(
        self,
        primaries: int = 3,
        replicas: int = 0,
        *,
        binary: str | None = None,
        node_timeout: float = 2.0,
        append_only: bool = False,
        host: str = "127.0.0.1",
        tls: dict[str, str] | None = None,
        users: str = "",
        announce: Callable[[int], dict[str, str]] | None = None,
        **options: str,
    ) -> None:
        self.node_timeout = node_timeout
        self._counts = primaries, replicas
        self._binary = binary
        self._host = host
        self._tls = tls
        self._users = users
        self._announce = announce or (lambda port: {})
        self._options = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": str(round(node_timeout * 1000)),
            "repl_diskless_sync_delay": "0",
            "rdb_del_sync_files": "yes",  # or who was a replica would not come back empty
            **(tls or {}),
            **options,
        }
        if append_only:
            self._options.update(appendonly="yes", appendfsync="everysec")
        self.folder = Path(tempfile.mkdtemp(prefix="lmpool-cluster-"))
        self._guard: subprocess.Popen[bytes] | None = None
        self.nodes: list[ClusterNode] = []

    # ---- its life

    def __enter__(self) -> Self:
        # The leader of the nodes' process group: when our end of its pipe is closed, also because
        # this process was killed, nothing of them stays. (The kernel hangs up on a group with a
        # paused process whose parent has gone.)
        self._guard = subprocess.Popen(
            ["sh", "-c", 'trap "" HUP; read -r _; rm -rf "$0"; kill -9 0', str(self.folder)],
            stdin=subprocess.PIPE,
            process_group=0,
        )
        try:
            self._form()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _form(self) -> None:
        primaries, replicas = self._counts
        for _ in range(primaries * (1 + replicas)):
            self._start_node()
        chosen = self.nodes[:primaries]
        edges = [round(SLOTS * number / primaries) for number in range(primaries + 1)]
        for number, node in enumerate(self.nodes):
            lines: list[tuple[Any, ...]] = [("CLUSTER", "SET-CONFIG-EPOCH", number + 1)]
            if number < primaries:
                span = edges[number], edges[number + 1] - 1
                lines.append(("CLUSTER", "ADDSLOTSRANGE", *span))
            # Everybody meets everybody: gossip would take longer.
            lines += [_meet(other) for other in self.nodes[:number]]
            _check(node.commands(lines))
        self._wait_until_known()
        for number, node in enumerate(self.nodes[primaries:]):
            node.command("CLUSTER", "REPLICATE", chosen[number % primaries].id)
        self.wait_until_ok()

    def _start_node(self) -> ClusterNode:
        assert self._guard is not None
        node = ClusterNode(
            self.folder,
            binary=self._binary,
            host=self._host,
            tls=self._tls is not None,
            group=self._guard.pid,
            users=self._users and self._users + OWN_USERS,
            announce=self._announce,
            **self._options,
        )
        self.nodes.append(node)
        return node.start()

    # ---- what it is

    @property
    def url(self) -> str:
        """Where it is for clients, with the test's own user, if there are any."""
        return self.url_of("test", "t") if self._users else self.url_of()

    def url_of(self, user: str = "", password: str = "", *, seeds: int = 2) -> str:
        """Where it is for clients with this user: the first `seeds` nodes are named."""
        scheme = "redis+cluster" if self._tls is None else "rediss+cluster"
        login = f"{user}:{password}@" if password else ""
        host = in_brackets(self._host)
        hosts = ",".join(f"{host}:{node.cluster_port}" for node in self.nodes[:seeds])
        query = "" if self._tls is None else f"?ssl_ca_certs={self._tls['tls_ca_cert_file']}"
        return f"{scheme}://{login}{hosts}/{query}"

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        return [node.pid for node in self.nodes]

    @property
    def running(self) -> list[ClusterNode]:
        """The nodes that have neither ended nor are paused."""
        return [node for node in self.nodes if node.runs]

    def members(self) -> list[Member]:
        """Whom the cluster has, as the first running node says that takes part in it."""
        for node in self.running:
            with suppress(*_LOST):
                return node.members()
        raise AssertionError("no node answers")

    def _of(self, id: str) -> ClusterNode | None:
        return next((node for node in self.nodes if node.id == id), None)

    def primaries(self) -> list[ClusterNode]:
        """The nodes that serve slots, by their first slot."""
        serving = sorted((m for m in self.members() if m.serves), key=lambda m: m.slots)
        return [node for member in serving if (node := self._of(member.id)) is not None]

    def replicas(self, primary: ClusterNode | None = None) -> list[ClusterNode]:
        """The replicas of a primary, or all of them."""
        found = [m for m in self.members() if m.primary and primary in (None, self._of(m.primary))]
        return [node for member in found if (node := self._of(member.id)) is not None]

    def slots(self, node: ClusterNode) -> list[int]:
        """The slots that a node serves."""
        member = next((m for m in self.members() if m.id == node.id), None)
        ranges = member.slots if member is not None else ()
        return [slot for first, last in ranges for slot in range(first, last + 1)]

    def owner(self, slot: int) -> ClusterNode:
        """The primary that serves a slot, once there is one: a busy node may just be missed."""
        return until(
            lambda: self._owner(self.members(), slot), what=f"somebody to serve slot {slot}"
        )

    def _owner(self, members: list[Member], slot: int) -> ClusterNode | None:
        for member in members:
            if member.serves and any(first <= slot <= last for first, last in member.slots):
                return self._of(member.id)
        return None

    # ---- waiting

    def wait_until_ok(self, timeout: float = 60.0) -> None:
        """Until every running node serves, all agree on who has which slot and which of them
        follows whom, and replicas follow."""
        with _Asking() as asking:

            def state() -> str | None:
                maps, followers = set(), set()
                running = {node.id for node in self.running}
                for node in self.running:
                    try:
                        info = asking.of(node).execute_command("CLUSTER", "INFO")
                        nodes = asking.of(node).execute_command("CLUSTER", "NODES")
                        role = asking.of(node).info("replication")
                    except _LOST as error:
                        return f"{node}: {error}"
                    if _field(info, "cluster_state") != "ok":
                        return f"{node} says {_field(info, 'cluster_state')}"
                    if role["role"] == "slave" and role["master_link_status"] != "up":
                        return f"{node} follows nobody"
                    members = _members(nodes)
                    maps.add(frozenset((m.id, m.slots) for m in members if m.serves))
                    followers.add(
                        frozenset(
                            (m.id, m.primary) for m in members if m.primary and m.id in running
                        )
                    )
                if len(maps) != 1 or len(followers) != 1:
                    return "they do not agree"
                covered = sum(last - first + 1 for _, s in maps.pop() for first, last in s)
                return None if covered == SLOTS else f"{covered} slots are served"

            _until_none(state, timeout, "the cluster to be ok")

    def wait_for_failover(self, slot: int, former: ClusterNode, timeout: float = 60.0) -> float:
        """Until every running node has another primary for a slot; seconds that it took."""
        began = time.monotonic()
        with _Asking() as asking:

            def state() -> str | None:
                for node in self.running:
                    if node is former:
                        continue
                    try:
                        nodes = asking.of(node).execute_command("CLUSTER", "NODES")
                        info = asking.of(node).execute_command("CLUSTER", "INFO")
                    except _LOST as error:
                        return f"{node}: {error}"
                    owner = self._owner(_members(nodes), slot)
                    if owner is None or owner is former or _field(info, "cluster_state") != "ok":
                        return f"for {node} slot {slot} is at {owner}"
                return None

            _until_none(state, timeout, f"another primary than {former}")
        return time.monotonic() - began

    def _wait_until_known(self, timeout: float = 60.0) -> None:
        """Until every running node knows all of them, each by its own name."""
        named = {node.id: node for node in self.nodes}
        met = time.monotonic()
        with _Asking() as asking:

            def state() -> str | None:
                nonlocal met
                # A node gives up on whom it does not meet within its timeout, and for good.
                again = time.monotonic() - met > MEET_EVERY
                if again:
                    met = time.monotonic()
                lacking = None
                for node in self.running:
                    try:
                        nodes = asking.of(node).execute_command("CLUSTER", "NODES")
                        members = _members(nodes)
                        known = {m.id for m in members if "handshake" not in m.flags}
                        missing = named.keys() - known
                        for name in missing if again else ():
                            asking.of(node).execute_command(*_meet(named[name]))
                    except _LOST as error:
                        return f"{node}: {error}"
                    if missing:
                        lacking = f"{node} does not know {missing}"
                return lacking

            _until_none(state, timeout, "the nodes to know each other")

    # ---- what befalls it

    def lose_writes(
        self, primary: ClusterNode, meanwhile: Callable[[], object] = lambda: time.sleep(1.3)
    ) -> None:
        """Kill a primary whose replicas got nothing of what it was told during `meanwhile`. One of
        them takes its place."""
        replicas = self.replicas(primary)
        assert replicas, f"{primary} has no replica"
        for replica in replicas:
            replica.pause()
        # What a replica's socket holds would be read later: from here on nothing gets there.
        primary.command("CLIENT", "KILL", "TYPE", "replica")
        meanwhile()
        primary.kill()
        for replica in replicas:
            replica.resume()

    def restart(self) -> None:
        """Kill every node, start all of them again, wait until the cluster serves."""
        for node in self.nodes:
            node.kill()
        for node in self.nodes:
            node.start()
        self.wait_until_ok()

    def mend(self) -> None:
        """Start what was ended, let go on what was paused, wait until the cluster serves."""
        for node in self.nodes:
            if node.is_paused:
                node.resume()
            elif not node.runs:
                node.start()
        self.wait_until_ok()

    # ---- moving slots

    @property
    def moves_at_once(self) -> bool:
        """Whether it moves slots at once: Valkey 9."""
        with self.running[0].client() as client:
            version = str(client.info("server").get("valkey_version", "0"))
        return int(version.partition(".")[0]) >= 9

    def move_at_once(
        self, slots: Iterable[int], target: ClusterNode, timeout: float = 60.0
    ) -> None:
        """Move slots by ``CLUSTER MIGRATESLOTS``; nobody finds half of one."""
        by_source: dict[str, list[int]] = {}
        members = self.members()
        for slot in slots:
            owner = self._owner(members, slot)
            assert owner is not None
            if owner is not target:
                by_source.setdefault(owner.id, []).append(slot)
        for name, chosen in by_source.items():
            source = self._of(name)
            assert source is not None
            ranges = [edge for span in _ranges(chosen) for edge in span]
            source.command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", *ranges, "NODE", target.id)

            def has_moved(source: ClusterNode = source, chosen: list[int] = chosen) -> bool:
                jobs = source.command("CLUSTER", "GETSLOTMIGRATIONS")
                job = {bytes(k): v for k, v in zip(jobs[0][::2], jobs[0][1::2], strict=True)}
                state = bytes(job[b"state"]).decode()
                assert state not in ("failed", "cancelled"), job
                return state == "success" and not set(chosen) & set(self.slots(source))

            until(has_moved, timeout, what=f"slots to move from {source}", every=0.02)
        self._wait_until_agreed(list(slots), target)

    def move_slot(
        self,
        slot: int,
        target: ClusterNode,
        *,
        keys: int = 10,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Move a slot the classic way, a few keys at a time; `meanwhile` is called when the first
        few are at the target and the others are not."""
        source = self.owner(slot)
        if source is target:
            return
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        self._migrate_keys(slot, source, target, keys, meanwhile)
        self._assign([slot], source, target)

    def move_slots(self, slots: Sequence[int], source: ClusterNode, target: ClusterNode) -> None:
        """Move many slots of one node the classic way: most of them are empty."""
        for begin in range(0, len(slots), TOGETHER):
            some = slots[begin : begin + TOGETHER]
            lines = [("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id) for slot in some]
            _check(target.commands(lines))
            lines = [("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id) for slot in some]
            _check(source.commands(lines))
            counts = source.commands(("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in some)
            _check(counts)
            for slot, count in zip(some, counts, strict=True):
                if count:
                    self._migrate_keys(slot, source, target, 100)
            self._assign(some, source, target)

    def _migrate_keys(
        self,
        slot: int,
        source: ClusterNode,
        target: ClusterNode,
        count: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        login = ("AUTH2", "test", "t") if self._users else ()
        with source.client() as client:
            while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, count):
                client.execute_command(
                    "MIGRATE", target.host, target.cluster_port, "", 0, 5000, *login, "KEYS", *keys
                )
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None

    def _assign(self, slots: Sequence[int], source: ClusterNode, target: ClusterNode) -> None:
        """Say whose slots they are now: first the new owner, last those who only look on."""
        lines = [("CLUSTER", "SETSLOT", slot, "NODE", target.id) for slot in slots]
        others = [n for n in self.primaries() if n not in (source, target) and n.runs]
        for node in (target, source, *others):
            # A primary that hears from the target that it has no slot left is its replica at once.
            _check(a for a in node.commands(lines) if "only with masters" not in str(a))
        self._wait_until_agreed(slots, target)

    def _wait_until_agreed(self, slots: Sequence[int], target: ClusterNode) -> None:
        """Until every running node knows where they are: the next move is decided by that."""

        def agreed() -> bool:
            for node in self.running:
                members = node.members()
                if any(self._owner(members, slot) is not target for slot in (slots[0], slots[-1])):
                    return False
            return True

        if slots:
            until(agreed, what=f"slots {slots[0]}... at {target}")

    def settle(self) -> None:
        """End moves that were begun and never ended: each slot stays where it is."""
        for node in self.running:
            said = node.command("CLUSTER", "NODES").decode()
            for slot in re.findall(r"\[(\d+)-[<>]-", said):
                node.command("CLUSTER", "SETSLOT", slot, "STABLE")

    def add_node(self, *, replicas: int = 0) -> ClusterNode:
        """A new primary without slots, and its replicas."""
        first = self._join()
        for _ in range(replicas):
            replica = self._join()
            replica.command("CLUSTER", "REPLICATE", first.id)
        self.wait_until_ok()
        return first

    def _join(self) -> ClusterNode:
        members = self.running
        node = self._start_node()
        _check(node.commands(_meet(member) for member in members))
        self._wait_until_known()
        return node

    def rebalance(self, primaries: Sequence[ClusterNode], *, at_once: bool = False) -> None:
        """Move as few slots as it takes until these primaries, and no other, share them evenly."""
        share, more = divmod(SLOTS, len(primaries))
        have = {node: self.slots(node) for node in {*self.primaries(), *primaries}}
        wants = {node: share + (number < more) for number, node in enumerate(primaries)}
        for target in primaries:
            for source, slots in have.items():
                spare = len(slots) - wants.get(source, 0)
                lacks = wants[target] - len(have[target])
                count = min(spare, lacks)
                if source is target or count <= 0:
                    continue
                moved = slots[-count:]
                del slots[-count:]
                if at_once:
                    self.move_at_once(moved, target)
                else:
                    self.move_slots(moved, source, target)
                have[target] += moved
        self.wait_until_ok()

    def remove_node(self, node: ClusterNode, *, at_once: bool = False) -> None:
        """Give a primary's slots to the others, have everybody forget it, end it."""
        others = [other for other in self.primaries() if other is not node]
        orphans = [replica for replica in self.replicas(node) if replica.runs]
        self.rebalance(others, at_once=at_once)
        for number, replica in enumerate(orphans):
            replica.command("CLUSTER", "REPLICATE", others[number % len(others)].id)
        self.nodes.remove(node)

        def forgotten() -> bool:
            lines = [("CLUSTER", "FORGET", node.id)]
            answers = [other.commands(lines)[0] for other in self.running]
            return all("master" not in str(answer) for answer in answers)

        # A replica that has not left it yet forgets it later.
        until(forgotten, what=f"everybody to forget {node}", every=0.05)
        node.kill()
        self.wait_until_ok()


class _Asking:
    """Connections to nodes, each made once."""

    def __init__(self) -> None:
        self._clients: dict[ClusterNode, redis.Redis] = {}

    def of(self, node: ClusterNode) -> redis.Redis:
        if node not in self._clients:
            self._clients[node] = node.client()
        return self._clients[node]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()


def in_brackets(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def slot_of(key: str | bytes) -> int:
    """The slot of a key."""
    data = key.encode() if isinstance(key, str) else key
    begin = data.find(b"{") + 1
    end = data.find(b"}", begin)
    if begin and end > begin:
        data = data[begin:end]
    return binascii.crc_hqx(data, 0) % SLOTS


def _meet(node: ClusterNode) -> tuple[Any, ...]:
    return ("CLUSTER", "MEET", node.host, node.cluster_port)


def _check(answers: Iterable[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer


def _members(said: bytes) -> list[Member]:
    return [Member.parse(line) for line in said.decode().splitlines()]


def _field(info: bytes, name: str) -> str:
    found = re.search(rf"^{name}:(.*?)\r?$", info.decode(), re.MULTILINE)
    return "" if found is None else found[1]


def _until_none(state: Callable[[], str | None], timeout: float, what: str) -> None:
    last: list[str | None] = [None]

    def reached() -> bool:
        last[0] = state()
        return last[0] is None

    try:
        until(reached, timeout, every=0.02)
    except AssertionError:
        raise AssertionError(f"not within {timeout:g} s: {what} ({last[0]})") from None


def _ranges(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = -2
    for slot in sorted(slots):
        if slot != last + 1:
            if first >= 0:
                yield first, last
            first = slot
        last = slot
    if first >= 0:
        yield first, last
