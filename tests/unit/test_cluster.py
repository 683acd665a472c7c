"""The slot map, and what nodes say of slots: a line of each kind."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest
import redis.exceptions
from redis._parsers import _HiredisParser

from lmpool import cluster
from lmpool.address import Address, Cluster
from lmpool.cluster import (
    BoundedClusterParser,
    ClusterParser,
    NodeConnection,
    SlotLost,
    SlotMap,
    SlotMigrating,
    SlotMoved,
    slot_error,
)
from lmpool.cluster_servers import ClusterServers
from lmpool.errors import ServerUnreachable
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.server import explained, is_full, is_lost
from lmpool.slots import SLOTS

A, B, C = ("127.0.0.1", 7001), ("127.0.0.1", 7002), ("::1", 7003)


def node(address: Address, *more: Any) -> list[Any]:
    return [address[0].encode(), address[1], b"id", *more]


def ranges(*owners: Address) -> list[list[Any]]:
    """What ``CLUSTER SLOTS`` answers where these share the slots evenly."""
    ends = [SLOTS * number // len(owners) for number in range(len(owners) + 1)]
    return [
        [first, last - 1, node(owner)]
        for owner, first, last in zip(owners, ends, ends[1:], strict=False)
    ]


class Nodes:
    """What each node answers when it is asked for the map; one that is missing is away."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[Address, Any] = {}
        self.asked: list[Address] = []

    def __call__(self, address: Address, within: float) -> Any:
        self.asked.append(address)
        found = self.answers.get(address)
        if found is None:
            raise redis.exceptions.ConnectionError("refused")
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr(cluster, "REFRESH_EVERY", 0.0)
    return Nodes()


# --- what is said of slots ----------------------------------------------------------------------

REFUSALS = [
    ("MOVED 4748 127.0.0.1:7001", SlotMoved),
    ("MOVED 4748 ::1:7001", SlotMoved),
    ("MOVED 4748 :7001", SlotMoved),
    ("MOVED nonsense", SlotLost),
    ("MOVED 99999 h:1", SlotLost),
    ("ASK 4748 127.0.0.1:7001", SlotMigrating),
    (
        "ERR Script attempted to access a non local key in a cluster node script: 1a2b, on @user",
        SlotMigrating,
    ),
    ("READONLY You can't write against a read only replica.", SlotLost),
    (
        "UNBLOCKED force unblock from blocking operation, instance state changed (master ->...)",
        SlotLost,
    ),
]
PASSING = [
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "CLUSTERDOWN The cluster is down",
    "CLUSTERDOWN Hash slot not served",
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "NOREPLICAS Not enough good replicas to write.",
]
OTHERS = [
    "ERR unknown command 'FOO'",
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    "NOGROUP No such key 'jobs'",
    "UNBLOCKED the stream key no longer exists",
    "CROSSSLOT Keys in request don't hash to the same slot",
    "NOPERM this user has no permissions to run the 'get' command",
]


@pytest.mark.parametrize(("text", "kind"), REFUSALS)
@pytest.mark.parametrize("parser", [ClusterParser, BoundedClusterParser])
def test_a_refusal_about_a_slot_is_a_lost_connection(
    text: str, kind: type[Exception], parser: type[_HiredisParser]
) -> None:
    error = parser.parse_error(text)
    assert type(error) is kind
    assert str(error) == text
    assert is_lost(error)
    assert not is_full(error)


@pytest.mark.parametrize(("text", "kind"), REFUSALS)
def test_who_is_refused_for_a_slot_is_not_told_that_nobody_answers(
    text: str, kind: type[Exception]
) -> None:
    with pytest.raises(ServerUnreachable) as told, explained("redis+cluster://h:1"):
        raise ClusterParser.parse_error(text)
    assert str(told.value).startswith("redis+cluster://h:1 is not ready: a slot is moved, or ")
    assert text in str(told.value)
    assert "no answer" not in str(told.value)


@pytest.mark.parametrize("text", PASSING)
def test_what_passes_is_lost_and_says_nothing_of_a_slot(text: str) -> None:
    assert slot_error(text) is None
    assert is_lost(ClusterParser.parse_error(text))


@pytest.mark.parametrize("text", OTHERS)
def test_other_refusals_are_as_of_one_server(text: str) -> None:
    assert slot_error(text) is None
    error = ClusterParser.parse_error(text)
    assert type(error) is type(_HiredisParser.parse_error(text))
    assert not is_lost(error)


def test_a_move_says_where() -> None:
    found = slot_error("MOVED 4748 ::1:7001")
    assert isinstance(found, SlotMoved)
    assert (found.slot, found.host, found.port) == (4748, "::1", 7001)


# --- the map ------------------------------------------------------------------------------------


def test_the_map_is_read_once_it_is_needed(nodes: Nodes) -> None:
    nodes.answers[A] = ranges(A, B, C)
    found = SlotMap([A], nodes)
    assert nodes.asked == []
    assert [found.owner(slot) for slot in (0, SLOTS // 2, SLOTS - 1)] == [A, B, C]
    assert nodes.asked == [A]
    assert set(found.nodes()) == {A, B, C}


def test_a_node_that_is_suspected_is_asked_last(nodes: Nodes) -> None:
    nodes.answers = {A: ranges(A, B), B: ranges(B, B)}
    found = SlotMap([A], nodes)
    assert found.owner(0) == A
    found.suspect(A)
    assert found.owner(0) == B
    assert nodes.asked == [A, B]
    assert found.nodes()[-1] == B  # A serves nothing


def test_a_move_is_known_without_asking(nodes: Nodes) -> None:
    nodes.answers[A] = ranges(A, B)
    found = SlotMap([A], nodes)
    assert found.owner(7) == A
    found.move(7, C)
    assert (found.owner(7), found.owner(8)) == (C, A)
    assert nodes.asked == [A]


def test_seeds_help_where_all_addresses_changed(nodes: Nodes) -> None:
    nodes.answers[A] = ranges(B, C)
    found = SlotMap([A], nodes)
    assert found.owner(0) == B
    nodes.answers = {A: ranges(A, A)}
    found.suspect(B)
    assert found.owner(0) == A


def test_what_is_known_is_kept_while_nobody_answers(nodes: Nodes) -> None:
    nodes.answers[A] = ranges(A, B)
    found = SlotMap([A, C], nodes)
    assert found.owner(0) == A
    nodes.answers.clear()
    found.suspect(A)
    assert found.owner(0) == A  # whoever asks it finds out
    assert set(nodes.asked[1:]) == {A, B, C}
    nodes.answers[C] = ranges(C, C)
    assert found.owner(0) == C


def test_nothing_known_and_nobody_there_is_an_error(nodes: Nodes) -> None:
    found = SlotMap([A, B], nodes)
    for _ in range(2):
        with pytest.raises(redis.exceptions.ConnectionError, match="refused") as caught:
            found.owner(0)
        assert is_lost(caught.value)
    assert sorted(set(nodes.asked)) == [A, B]


@pytest.mark.parametrize(
    "nonsense", [b"OK", [[0]], [[0, 1, b"x"]], [[b"a", b"b", node(A)]], [[0, 99_999, node(A)]], []]
)
def test_an_answer_that_is_no_map_is_not_believed(nodes: Nodes, nonsense: Any) -> None:
    nodes.answers = {A: nonsense, B: ranges(C, C)}
    found = SlotMap([A, B], nodes)
    assert found.owner(0) == C


def test_a_refused_password_is_no_reason_to_ask_others(nodes: Nodes) -> None:
    nodes.answers = {A: redis.exceptions.AuthenticationError("WRONGPASS"), B: ranges(B, B)}
    with pytest.raises(redis.exceptions.AuthenticationError):
        SlotMap([A, B], nodes).owner(0)


def test_a_slot_that_nobody_serves_is_looked_for_again(nodes: Nodes) -> None:
    nodes.answers[A] = [[0, 99, node(A)]]
    found = SlotMap([A], nodes)
    assert found.owner(5) == A
    with pytest.raises(SlotLost, match="no node serves slot 100"):
        found.owner(100)
    nodes.answers[A] = ranges(A, B)
    assert found.owner(100) == A


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ([b"10.0.0.1", 7000, b"id"], ("10.0.0.1", 7000)),
        ([b"", 7000, b"id"], ("asked", 7000)),
        ([None, 7000, b"id"], ("asked", 7000)),
        ([b"?", 7000, b"id", [b"ip", b"10.0.0.2"]], ("10.0.0.2", 7000)),
        ([b"?", 7000, b"id", []], ("asked", 7000)),
        ([b"a.example", 7000, b"id", [b"ip", b"10.0.0.2"]], ("a.example", 7000)),
        ([b"::1", 7000, b"id"], ("::1", 7000)),
    ],
)
def test_nodes_are_called_as_they_announce(nodes: Nodes, said: list[Any], meant: Address) -> None:
    nodes.answers[("asked", 1)] = [[0, SLOTS - 1, said]]
    assert SlotMap([("asked", 1)], nodes).owner(0) == meant


def test_many_threads_ask_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "REFRESH_EVERY", 60.0)
    nodes.answers[A] = ranges(A, B)
    found = SlotMap([A], nodes)
    barrier, owners = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        owners.append(found.owner(0))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert owners == [A] * 8
    assert nodes.asked == [A]
    found.suspect(A)
    assert found.owner(0) == A  # a moment after the last look: as it was
    assert nodes.asked == [A]


# --- its URL ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("redis+cluster://a", (("a", 6379),)),
        ("redis+cluster://a:1,b:2/", (("a", 1), ("b", 2))),
        ("rediss+cluster://u:p@a:1,[::1]:2/0", (("a", 1), ("::1", 2))),
        ("redis+cluster://:p%40w@a:1?health_check_interval=3", (("a", 1),)),
    ],
)
def test_a_url_names_some_of_its_nodes(url: str, hosts: tuple[Address, ...]) -> None:
    found = Cluster.parse(url)
    assert found.hosts == hosts
    assert found.tls == url.startswith("rediss")
    assert not found.options.keys() & {"host", "port", "db", "connection_class"}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+cluster://a:1/3", "database 0 alone"),
        ("redis+cluster://a:1?db=2", "database 0 alone"),
        ("redis+cluster://", "no host and port"),
        ("redis+cluster://a:1,", "no host and port"),
        ("redis+cluster://a:99999", "no host and port"),
        ("redis+cluster://[zz::1]:1", "zz"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Cluster.parse(url)


# --- connections ----------------------------------------------------------------------------------


class Heard:
    """A map that notes what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def move(self, slot: int, address: Address) -> None:
        self.said.append((slot, address))

    def suspect(self, address: Address) -> None:
        self.said.append(address)


@pytest.mark.parametrize(
    ("error", "said", "silent"),
    [
        (SlotMoved("MOVED 5 h:1", 5, "h", 1), [(5, ("h", 1))], False),
        (SlotMoved("MOVED 5 :1", 5, "", 1), [(5, (A[0], 1))], False),
        (SlotLost("READONLY"), [A], False),
        (SlotMigrating("ASK"), [], False),
        (redis.exceptions.ConnectionError("refused"), [A], False),
        (redis.exceptions.TimeoutError("no answer"), [A], True),
        (redis.exceptions.ResponseError("CLUSTERDOWN The cluster is down"), [A], False),
        (redis.exceptions.ResponseError("MASTERDOWN Link with MASTER is down"), [A], False),
        (redis.exceptions.ResponseError("TRYAGAIN later"), [], False),
        (redis.exceptions.AuthenticationError("WRONGPASS"), [], False),
        (redis.exceptions.NoScriptError("none"), [], False),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else "",
)
def test_the_map_hears_what_a_connection_meets(
    error: Exception, said: list[Any], silent: bool
) -> None:
    heard, silences = Heard(), list[Address]()
    connection = NodeConnection(
        slots=heard,  # type: ignore[arg-type]
        note_silence=silences.append,
        host=A[0],
        port=A[1],
    )
    connection._hear(error)
    assert heard.said == said
    assert silences == ([A] if silent else [])


def test_a_node_that_was_silent_is_asked_for_nothing_until_it_is_back(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.answers = {A: ranges(A, B)}
    url = "redis+cluster://nobody:1"
    monkeypatch.setitem(cluster._MAPS, (os.getpid(), url), SlotMap([A], nodes))
    servers = ClusterServers(url, 0.0, "test", False, 15.0)
    silent, well = shards_at(A, B)
    assert servers.for_shard(silent) is not servers.for_shard(well)
    monkeypatch.setattr("lmpool.cluster_servers.SILENT_FOR", 600.0)
    servers._note_silence(A)
    for _ in range(3):
        with pytest.raises(redis.exceptions.ConnectionError, match="does not answer"):
            servers.for_shard(silent)
        assert servers.is_away(silent)
        assert not servers.is_away(well)
    nodes.answers[B] = ranges(B, B)  # it takes over
    nodes.answers[A] = None
    assert servers.for_shard(silent) is servers.for_shard(well)
    nodes.answers = {A: ranges(A, B), B: ranges(A, B)}  # and gives back
    servers._slots.suspect(B)
    servers._silent[A] -= 600.0
    assert servers.for_shard(silent) is not servers.for_shard(well)


def shards_at(*owners: Address) -> list[ShardKeys]:
    """A shard of each part of the slots."""
    found = PoolKeys("p").shards("01234567", len(owners))
    return list(found)


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_what_is_large_may_take_its_time(size: int) -> None:
    """A reader that takes a megabyte a second, where an answer is due in half a second."""
    ours, theirs = socket.socketpair()
    connection = NodeConnection(
        slots=Heard(),  # type: ignore[arg-type]
        note_silence=lambda address: None,
        socket_timeout=0.5,
    )
    connection._sock = ours
    ours.settimeout(0.5)
    taken = bytearray()

    def read_slowly() -> None:
        while len(taken) < size:
            taken.extend(theirs.recv(100_000))
            time.sleep(0.1 if size > 1000 else 0)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    connection.send_packed_command([b"x" * size], check_health=False)
    reader.join(60)
    assert len(taken) == size
    assert ours.gettimeout() == 0.5
    ours.close()
    theirs.close()
