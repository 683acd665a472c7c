"""Large values received into memory of their own, from servers that are well and that are not."""

from __future__ import annotations

import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
import redis
import redis.exceptions
from redis.connection import Connection

from lmpool import replies, sockets
from lmpool.bulk import Gathered
from lmpool.cluster import ClusterParser, NodeConnection, SlotMap, SlotMoved
from lmpool.commands import Server
from lmpool.connections import OneConnectionClient, OneConnectionPool
from lmpool.rows import PackedRow
from lmpool.server import is_lost, open_server
from tests.support.certificates import certificates
from tests.support.waiting import until

KEYS = ["a", "b", "c"]
SIZES = [300, 1, 70_000]
VALUES = [random.Random(size).randbytes(size) for size in SIZES]


def bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def array(*replies: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(replies), b"".join(replies))


RIGHT = array(*map(bulk, VALUES))


@pytest.fixture(autouse=True, params=["near", "elsewhere"])
def distance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server here the next bytes are waited for in another way than of one elsewhere."""
    if request.param == "elsewhere":
        monkeypatch.setattr(sockets, "is_near", lambda socket: False)


class Scripted:
    """Answers MGET with these pieces, and all else as a server would; PING with +PONG."""

    def __init__(
        self, pieces: Sequence[bytes], then: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self._pieces, self._then, self._tls = pieces, then, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        scheme = "redis" if tls is None else "rediss"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.opened = 0

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                self.opened += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except OSError:
            return

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True)
        with connection:
            while asked := connection.recv(1 << 16):
                if b"MGET" in asked:
                    for piece in self._pieces:
                        connection.sendall(piece)
                    if self._then == "cut":
                        return
                else:
                    # CLIENT SETNAME and the like, each an array.
                    answer = b"+PONG\r\n" if b"PING" in asked else b"+OK\r\n"
                    connection.sendall(answer * asked.count(b"\r\n*") + answer)


def opened(url: str, **options: Any) -> Iterator[Server]:
    server = open_server(url, **options)
    yield server
    server.close()
    server.connection_pool.disconnect()


def cut_at(reply: bytes, *places: int) -> list[bytes]:
    ends = sorted({0, *places, len(reply)})
    return [reply[a:b] for a, b in pairwise(ends)]


HEADS = len(RIGHT) - sum(SIZES)
PIECES = {
    "at once": [RIGHT],
    "byte by byte at first": [RIGHT[i : i + 1] for i in range(330)] + [RIGHT[330:]],
    "byte by byte at last": [RIGHT[:-20], *(RIGHT[i : i + 1] for i in range(-20, -1)), b"\n"],
    "in odd pieces": [RIGHT[i : i + 997] for i in range(0, len(RIGHT), 997)],
    "cut before a head": cut_at(RIGHT, 10 + 300),
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_values_are_received_however_they_come(pieces: list[bytes]) -> None:
    with Scripted(pieces) as scripted:
        for server in opened(scripted.url):
            for _ in range(2):
                found = server.values(KEYS, SIZES)
                assert [type(value) for value in found] == [memoryview] * 3  # none was copied
                assert [*map(bytes, found)] == VALUES  # type: ignore[arg-type]
                assert all(value.readonly for value in found)  # type: ignore[union-attr]
            assert server.ping()
        assert scripted.opened == 1


def rooms_for(*which: int, header: bytes | None = None) -> list[PackedRow | None]:
    """Rooms for some of the values, whose first bytes are taken for a header."""
    long = [min(24, size) for size in SIZES]
    return [
        PackedRow(header or VALUES[n][: long[n]], memoryview(bytearray(SIZES[n] - long[n])))
        if n in which
        else None
        for n in range(3)
    ]


@pytest.mark.parametrize("which", [(0,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_rows_are_received_where_there_is_room_for_them(
    pieces: list[bytes], which: tuple[int, ...]
) -> None:
    with Scripted(pieces) as scripted:
        for server in opened(scripted.url):
            for _ in range(2):
                rooms = rooms_for(*which)
                found = server.values(KEYS, SIZES, rooms)
                for value, room, expected in zip(found, rooms, VALUES, strict=True):
                    if room is None:
                        assert isinstance(value, memoryview)
                        assert bytes(value) == expected
                    else:
                        assert isinstance(value, PackedRow)
                        assert value.joined() == expected
                        assert value.numbers.readonly
                        assert room.joined() == expected  # it is this very memory
            assert [*map(bytes, server.values(KEYS, SIZES))] == VALUES  # type: ignore[arg-type]
            assert server.ping()
        assert scripted.opened == 1


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_a_row_with_another_header_is_read_as_ever(pieces: list[bytes]) -> None:
    """Its numbers may have come to where there was room by then."""
    with Scripted(pieces) as scripted:
        for server in opened(scripted.url):
            found = server.values(KEYS, SIZES, rooms_for(0, 2, header=b"x" * 24))
            assert found == VALUES
            assert server.ping()
        assert scripted.opened == 1


class Slowly(list[bytes]):
    """Pieces with a pause before each but the first, which is `awaited` by then: told how many
    came before."""

    def __init__(self, pieces: Sequence[bytes], awaited: Callable[[int], bool]) -> None:
        super().__init__(pieces)
        self._awaited = awaited

    def __iter__(self) -> Iterator[bytes]:
        for number, piece in enumerate(super().__iter__()):
            if number:
                until(partial(self._awaited, number))
                time.sleep(0.05)
            yield piece


@pytest.mark.parametrize("large", [True, False], ids=["values", "small replies"])
def test_only_what_is_on_its_way_is_waited_for_awake(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[str] = []
    first = ["first"] if large else []

    def noted(socket: Any) -> tuple[sockets.Move, sockets.Move]:
        begin, rest = sockets.reads(socket)

        def asleep(pieces: Sequence[Any]) -> int:
            moves.append("first")
            return begin(pieces)

        def awake(pieces: Sequence[Any]) -> int:
            moves.append("rest")
            return rest(pieces)

        return asleep, awake

    monkeypatch.setattr(replies, "reads", noted)
    pieces = Slowly(cut_at(RIGHT, 1, 200), lambda came: len(moves) >= came + len(first))
    with Scripted(pieces) as scripted:
        for server in opened(scripted.url):
            assert server.ping()
            assert not moves  # redis-py's own way is the shortest
            found = server.values(KEYS, SIZES) if large else server.mget(KEYS)
            assert [*map(bytes, found)] == VALUES  # type: ignore[arg-type]
            assert len(moves) >= 2 + len(first)
            assert moves == first + ["rest"] * (len(moves) - len(first))


OTHERS = {
    "one is gone": array(bulk(VALUES[0]), bulk(None), bulk(VALUES[2])),
    "all are gone": array(*[bulk(None)] * 3),
    "the first is shorter": array(bulk(b"x"), *map(bulk, VALUES[1:])),
    "the last is longer": array(*map(bulk, VALUES[:2]), bulk(bytes(70_001))),
    "one is a number": array(bulk(VALUES[0]), b":7\r\n", bulk(VALUES[2])),
    "fewer": array(bulk(VALUES[0])),
    "more": array(*map(bulk, VALUES), bulk(b"d")),
    "none": b"*-1\r\n",
    "no array": bulk(VALUES[0]),
}


@pytest.mark.parametrize("whole", [True, False], ids=["at once", "in pieces"])
@pytest.mark.parametrize("reply", OTHERS.values(), ids=OTHERS)
def test_another_reply_is_read_as_ever(reply: bytes, whole: bool) -> None:
    pieces = [reply] if whole else cut_at(reply, 1, 3, len(reply) // 2)
    with Scripted(pieces) as scripted:
        for server in opened(scripted.url):
            assert server.values(KEYS, SIZES) == server.mget(KEYS)
            assert server.values(KEYS, SIZES, rooms_for(0, 2)) == server.mget(KEYS)
            assert server.ping()
        assert scripted.opened == 1


def test_a_refusal_is_raised() -> None:
    with Scripted([b"-NOPERM this user", b" may not\r\n"]) as scripted:
        for server in opened(scripted.url):
            with pytest.raises(redis.exceptions.NoPermissionError, match="may not"):
                server.values(KEYS, SIZES)
            assert server.ping()
        assert scripted.opened == 1


def node_pool(url: str, slots: SlotMap) -> OneConnectionPool:
    """To a node of a cluster."""
    address = urlsplit(url)
    return OneConnectionPool(
        connection_class=NodeConnection, host=address.hostname, port=address.port,
        slots=slots, parser_class=ClusterParser, protocol=2,
    )  # fmt: skip


def test_a_node_of_a_cluster_says_who_serves_the_slot() -> None:
    with Scripted([b"-MOVED 7 ", b"127.0.0.1:1\r\n"]) as scripted:
        slots = SlotMap([("127.0.0.1", 1)], lambda address, within: [])
        pool = node_pool(scripted.url, slots)
        node = OneConnectionClient(connection_pool=pool)
        with pytest.raises(SlotMoved):
            node.values(KEYS, SIZES)
        assert slots.known_owner(7) == ("127.0.0.1", 1)
        pool.disconnect()


@pytest.mark.parametrize("end", [0, 1, 8, 200, 312, 400, len(RIGHT) - 2, len(RIGHT) - 1])
@pytest.mark.parametrize("then", ["cut", "silent"])
def test_a_reply_that_ends_early_is_a_lost_connection(end: int, then: str) -> None:
    with Scripted([RIGHT[:end]], then) as scripted:
        for server in opened(scripted.url):
            if then == "silent":
                connection: Any = server.connection_pool.get_connection()
                connection._sock.settimeout(0.2)
            with pytest.raises(redis.exceptions.RedisError) as lost:
                server.values(KEYS, SIZES)
            assert is_lost(lost.value)
            assert server.ping()
        assert scripted.opened == 2  # nothing of the old one answers


def test_a_value_that_is_longer_than_it_was_said_to_be_ends_the_connection() -> None:
    lie = RIGHT.replace(VALUES[1], VALUES[1] + b"y", 1)
    with Scripted([lie]) as scripted:
        for server in opened(scripted.url):
            with pytest.raises(redis.exceptions.RedisError) as lost:
                server.values(KEYS, SIZES)
            assert is_lost(lost.value)
            assert server.ping()
        assert scripted.opened == 2


@pytest.mark.parametrize("more", [b":7\r\n", RIGHT])
def test_what_nobody_asked_for_is_no_answer(more: bytes) -> None:
    with Scripted([RIGHT + more]) as scripted:
        for server in opened(scripted.url):
            assert [*map(bytes, server.values(KEYS, SIZES))] == VALUES  # type: ignore[arg-type]
            assert server.ping() is True
        assert scripted.opened == 2


def test_what_is_expected_of_one_connection_is_not_of_the_next() -> None:
    """The reply was never read: the next command's is another."""
    with Scripted([RIGHT]) as scripted:
        for server in opened(scripted.url):
            connection: Any = server.connection_pool.get_connection()
            connection._parser.expect_values([5])
            connection.disconnect()
            assert server.ping()


# --- several replies ----------------------------------------------------------------------------

QUEUED = b"+OK\r\n" + 3 * b"+QUEUED\r\n"
SEVERAL = QUEUED + array(bulk(b"a\r\n"), b":7\r\n")
REFUSED = QUEUED + b"-NOPERM no\r\n-OOM no\r\n-EXECABORT all\r\n"


def several(server: Server, count: int, within: float | None = None) -> list[Any]:
    """So many replies to one command, each part of which comes `within` so many seconds."""
    connection: Any = server.connection_pool.get_connection()
    if within is not None:
        connection._sock.settimeout(within)
    connection.send_command("MGET", "a")
    connection._parser.expect_several(count)
    found: list[Any] = connection.read_response()
    return found


@pytest.mark.parametrize(
    "pieces",
    [[SEVERAL], [SEVERAL[i : i + 1] for i in range(len(SEVERAL))], cut_at(SEVERAL, 5, 20, 44)],
    ids=["at once", "byte by byte", "in pieces"],
)
def test_several_replies_are_read_as_one_list(pieces: list[bytes]) -> None:
    with Scripted(pieces) as scripted:
        for server in opened(scripted.url):
            for _ in range(2):
                *said, last = several(server, 5)
                assert said == [b"OK", *[b"QUEUED"] * 3]
                assert last == [b"a\r\n", 7]
            assert server.ping() is True
        assert scripted.opened == 1


@pytest.mark.parametrize(
    "pieces",
    [[REFUSED], [REFUSED[i : i + 1] for i in range(len(REFUSED))]],
    ids=["at once", "slow"],
)
def test_several_replies_with_refusals_raise_the_first_and_are_read(pieces: list[bytes]) -> None:
    with Scripted(pieces) as scripted:
        for server in opened(scripted.url):
            for _ in range(2):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    several(server, 7)
            assert server.ping() is True
        assert scripted.opened == 1


def test_a_refusal_among_several_replies_is_heard_by_who_looks_after_the_slots() -> None:
    suspected: list[Any] = []

    class Slots:
        def suspect(self, address: Any) -> None:
            suspected.append(address)

    with Scripted([b"+OK\r\n+QUEUED\r\n-CLUSTERDOWN no\r\n"]) as scripted:
        place = urlsplit(scripted.url)
        connection = NodeConnection(
            slots=Slots(),  # type: ignore[arg-type]
            note_silence=lambda address: None,
            host=place.hostname,
            port=place.port,
            protocol=2,
            parser_class=ClusterParser,
        )
        connection.send_command("MGET", "a")
        connection._parser.expect_several(3)
        with pytest.raises(redis.exceptions.RedisError, match="CLUSTERDOWN"):
            connection.read_response()
        connection.disconnect()
    assert suspected == [(place.hostname, place.port)]


@pytest.mark.parametrize(
    "refusal",
    ["CLUSTERDOWN Hash slot not served", "MASTERDOWN Link with MASTER is down", "TRYAGAIN later"],
)
def test_a_refusal_that_ends_by_itself_is_a_reason_to_try_again(refusal: str) -> None:
    # By its words: redis-py has classes of such, without the first of them, in some releases.
    with Scripted([f"-{refusal}\r\n".encode()]) as scripted:
        for server in opened(scripted.url):
            with pytest.raises(redis.exceptions.ResponseError, match=refusal) as refused:
                server.mget(KEYS)
            assert is_lost(refused.value)
            assert server.ping() is True
        assert scripted.opened == 1


@pytest.mark.parametrize("end", [0, 3, 5, 30, len(SEVERAL) - 1])
@pytest.mark.parametrize("then", ["cut", "silent"])
def test_several_replies_that_end_early_are_a_lost_connection(end: int, then: str) -> None:
    with Scripted([SEVERAL[:end]], then) as scripted:
        for server in opened(scripted.url):
            with pytest.raises(redis.exceptions.RedisError) as lost:
                several(server, 5, 0.2 if then == "silent" else None)
            assert is_lost(lost.value)
            assert server.ping() is True
        assert scripted.opened == 2


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_server_that_is_not_ready_ends_several_replies(place: int) -> None:
    replies = [b"+OK\r\n"] * 4
    replies[place] = b"-LOADING the dataset\r\n"
    with Scripted([b"".join(replies)]) as scripted:
        for server in opened(scripted.url):
            with pytest.raises(redis.exceptions.BusyLoadingError):
                several(server, 4)
            assert server.ping() is True
        assert scripted.opened == 2


def test_a_slot_that_moved_ends_several_replies() -> None:
    with Scripted([b"+OK\r\n-MOVED 7 127.0.0.1:1\r\n-EXECABORT all\r\n"]) as scripted:
        slots = SlotMap([("127.0.0.1", 1)], lambda address, within: [])
        pool = node_pool(scripted.url, slots)
        with pytest.raises(SlotMoved):
            several(OneConnectionClient(connection_pool=pool), 3)  # type: ignore[arg-type]
        assert slots.known_owner(7) == ("127.0.0.1", 1)
        pool.disconnect()


def test_several_replies_of_one_connection_are_not_expected_of_the_next() -> None:
    with Scripted([SEVERAL]) as scripted:
        for server in opened(scripted.url):
            connection: Any = server.connection_pool.get_connection()
            connection._parser.expect_several(2)
            connection.disconnect()
            assert server.ping() is True


# --- over TLS ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [len(RIGHT), 30_000], ids=["whole", "cut"])
def test_tls(end: int, tmp_path: Path) -> None:
    """Whose sockets give records of 16 KiB, into one place at a time."""
    made = certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made["tls_cert_file"], made["tls_key_file"])
    whole = end == len(RIGHT)
    with Scripted([RIGHT[:end]], "" if whole else "cut", context) as scripted:
        for server in opened(f"{scripted.url}?ssl_ca_certs={made['tls_ca_cert_file']}"):
            for _ in range(2):
                if whole:
                    assert [*map(bytes, server.values(KEYS, SIZES))] == VALUES  # type: ignore[arg-type]
                else:
                    with pytest.raises(redis.exceptions.ConnectionError):
                        server.values(KEYS, SIZES)
        assert scripted.opened == (1 if whole else 2)


def test_a_real_servers_values(any_server: str, redis_client: redis.Redis, pool_name: str) -> None:
    keys = [f"{{{pool_name}}}:{i}" for i in range(12)]
    values = [os.urandom(1 << 18) for _ in keys]
    for server in opened(any_server):
        for key, value in zip(keys, values, strict=True):
            redis_client.set(key, value)
        found = server.values(keys, [1 << 18] * 12)
        assert [*map(bytes, found)] == values  # type: ignore[arg-type]
        redis_client.delete(keys[7])
        assert server.values(keys, [1 << 18] * 12) == [*values[:7], None, *values[8:]]
    redis_client.delete(*keys)


# --- sending -----------------------------------------------------------------------------------


class Ends:
    """A connection to nobody but the test, as redis-py has one, and what came at its other end."""

    def __init__(self) -> None:
        near, self._far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)
        near.settimeout(0.5)
        self.connection: Any = Connection()
        self.connection._sock = near
        self.came = bytearray()

    def read(self, most: int) -> Self:
        """Read so much of what comes, slowly."""

        def read() -> None:
            while len(self.came) < most:
                self.came += self._far.recv(random.Random(len(self.came)).randrange(1, 9000))

        self.thread = threading.Thread(target=read, daemon=True)
        self.thread.start()
        return self

    def close(self) -> None:
        self.connection.disconnect()
        self._far.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(sockets, "SEND_BYTES", 0)  # it is to hold little
    found = Ends()
    yield found
    found.close()


PARTS = [random.Random(n).randbytes(n) for n in (0, 10, 70_000, 1, 1, 0, 30_000, *range(60))]


def test_pieces_leave_together_and_in_their_order(ends: Ends) -> None:
    ends.connection._sock.settimeout(60)  # who reads may stand still
    whole = b"".join(PARTS)
    gathered = Gathered(ends.connection, [*map(memoryview, PARTS)])
    assert len(gathered) == len(whole)
    ends.read(len(whole))
    ends.connection.send_packed_command(gathered)
    ends.thread.join(60)
    assert bytes(ends.came) == whole


def test_who_takes_nothing_any_more_is_given_up(ends: Ends) -> None:
    ends.read(20_000)
    with pytest.raises(redis.exceptions.TimeoutError):
        ends.connection.send_packed_command(Gathered(ends.connection, PARTS * 10))
    assert ends.connection._sock is None


def test_who_is_gone_is_a_lost_connection(ends: Ends) -> None:
    ends._far.close()
    with pytest.raises(redis.exceptions.ConnectionError):
        ends.connection.send_packed_command(Gathered(ends.connection, PARTS))
    assert ends.connection._sock is None


def test_tls_is_sent_piece_by_piece(tmp_path: Path) -> None:
    """Whose sockets have no ``sendmsg`` that works."""
    made = certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made["tls_cert_file"], made["tls_key_file"])
    ends, whole = Ends(), b"".join(PARTS)
    wrapped: list[ssl.SSLSocket] = []
    far = threading.Thread(
        target=lambda: wrapped.append(context.wrap_socket(ends._far, server_side=True))
    )
    far.start()
    trusting = ssl.create_default_context(cafile=made["tls_ca_cert_file"])
    near: Any = ends.connection._sock
    near.settimeout(60)  # the other end may stand still
    ends.connection._sock = trusting.wrap_socket(near, server_hostname="localhost")
    far.join(60)
    ends._far = wrapped[0]
    ends.read(len(whole))
    ends.connection.send_packed_command(Gathered(ends.connection, PARTS))
    ends.thread.join(60)
    assert bytes(ends.came) == whole
    ends.close()


def test_who_takes_a_trickle_is_given_up(ends: Ends) -> None:
    """A write of several pieces is over as soon as one byte has left."""
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            ends.came += ends._far.recv(2_000)

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    with pytest.raises(redis.exceptions.TimeoutError):
        ends.connection.send_packed_command(Gathered(ends.connection, PARTS * 3))
    stop.set()
    thread.join(60)
    assert ends.connection._sock is None
