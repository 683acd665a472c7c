"""A connection that one thread has for itself."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import hiredis
import pytest
import redis
from redis.sentinel import Sentinel

from lmpool.commands import Server
from lmpool.connections import BEHIND_MOST
from lmpool.replies import BoundedParser, ReplyTooLong
from lmpool.server import is_full, is_lost, open_server
from tests.support.fake import FakeServer
from tests.support.parts import Guarded
from tests.support.waiting import until


class Refuser(FakeServer):
    """Refuses SET, in these words."""

    words = ""

    def _run(self, client: redis.Redis, command: list[bytes], connection: socket.socket) -> Any:
        if command[0] == b"SET":
            return redis.exceptions.ResponseError(self.words)
        return super()._run(client, command, connection)


NO_ANSWER = {
    "BUSY Valkey is busy running a script.": is_lost,
    "CLUSTERDOWN Hash slot not served": is_lost,
    "READONLY You can't write against a read only replica.": is_lost,
    "OOM command not allowed when used memory > 'maxmemory'.": is_full,
}


@pytest.mark.parametrize("how", ["command", "pipeline", "transaction"])
@pytest.mark.parametrize("words", NO_ANSWER)
def test_an_error_is_known_by_the_servers_words(words: str, how: str) -> None:
    """However it was asked; and nothing of what was asked stands in it."""
    with Refuser() as fake:
        fake.words = words
        server = open_server(fake.url)
        pipeline = server.pipeline(transaction=how == "transaction")
        pipeline.execute_command("SET", "key", "tokens of a job")
        ask = pipeline.execute
        if how == "command":
            ask = partial(server.execute_command, "SET", "key", "tokens of a job")
        with pytest.raises(redis.exceptions.RedisError) as raised:
            ask()
        server.close()
    assert NO_ANSWER[words](raised.value)
    assert "tokens of a job" not in str(raised.value)


class Talker(FakeServer):
    """Says `more` behind its next answer."""

    more = b""

    def _reply(self, answer: Any) -> bytes:
        more, self.more = self.more, b""
        return super()._reply(answer) + more


@pytest.fixture
def talker() -> Iterator[Talker]:
    with Talker() as server:
        yield server


@pytest.fixture
def server(any_server: str) -> Iterator[Server]:
    server = open_server(any_server)
    yield server
    server.close()
    server.connection_pool.disconnect()


def id_of(server: Any) -> int:
    """The server's name for the connection."""
    found: int = server.execute_command("CLIENT", "ID")
    return found


def test_one_connection_serves_all(server: Server, pool_name: str) -> None:
    server.set(pool_name, "1")
    connection = server.connection_pool.get_connection()
    with server.pipeline(transaction=True) as pipeline:
        pipeline.pttl(pool_name)
        assert server.get(pool_name) == b"1"  # while the pipeline is open
        assert pipeline.execute() == [-1]
    assert server.connection_pool.get_connection() is connection
    server.delete(pool_name)


def test_commands_are_sent_and_read_as_redis_py_does(server: Any, pool_name: str) -> None:
    """A name of two words, a value that is none, and a reply that is another for nothing asked."""
    server.set(pool_name, 1.5)
    assert server.get(pool_name) == b"1.5"
    assert server.execute_command("CLIENT ID") == id_of(server)
    assert server.mget([]) == []
    with pytest.raises(redis.exceptions.DataError):
        server.set(pool_name, {})
    assert server.delete(pool_name) == 1


def test_a_command_may_be_sent_by_another_thread(server: Any, pool_name: str) -> None:
    """What a socket does not take at once is sent before the reply is read."""
    assert not server.may_go_ahead()  # there is no connection yet
    server.ping()
    assert server.may_go_ahead()
    for value in ("a", "b" * (16 << 20)):
        ahead = server.ahead(["SET", pool_name, value])
        Guarded(ahead.send).end()
        assert ahead.reply() == b"OK"
        assert server.strlen(pool_name) == len(value)
    server.delete(pool_name)


def test_what_came_before_it_is_read_is_counted_until_then(talker: Talker) -> None:
    """However many pieces it came in."""
    server: Any = open_server(talker.url)
    server.ping()
    connection = server.connection_pool.get_connection()
    pong = b"$4\r\nPONG\r\n"
    for _ in range(2):
        for count in (1, 2, 3):
            connection.send_packed_command([hiredis.pack_command(("PING",))])
            until(lambda n=count: connection._parser.comes_within(0.01, n * len(pong)))
        assert connection._parser.comes_within(0.0, 3 * len(pong))
        assert not connection._parser.comes_within(0.0, 3 * len(pong) + 1)
        assert [connection.read_response() for _ in range(3)] == [b"PONG"] * 3
        assert not connection._parser.comes_within(0.0, 1)
    server.close()


def test_nothing_comes_between_the_parts_of_a_command(
    server: Any, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the PING of a health check that is due."""
    server.ping()
    connection = server.connection_pool.get_connection()
    monkeypatch.setattr(connection, "health_check_interval", 1)
    monkeypatch.setattr(connection, "next_health_check", 0)
    value = "b" * (16 << 20)
    ahead = server.ahead(["SET", pool_name, value])
    # However quickly the server reads.
    monkeypatch.setattr(os, "write", lambda end, packed, w=os.write: w(end, packed[: 1 << 20]))
    Guarded(ahead.send).end()
    assert ahead._left
    assert ahead.reply() == b"OK"
    monkeypatch.undo()
    assert server.getrange(pool_name, len(value) - 50, -1) == b"b" * 50
    assert server.strlen(pool_name) == len(value)
    server.delete(pool_name)


def test_a_connection_that_ends_while_it_is_written_to_is_left(server: Any) -> None:
    server.ping()
    ahead = server.ahead(["PING"])
    server.connection_pool.get_connection()._sock.shutdown(socket.SHUT_RDWR)
    ahead.send()
    with pytest.raises(redis.exceptions.ConnectionError):
        ahead.reply()
    assert server.ping()


@pytest.mark.parametrize("more", [b":7\r\n", b":7\r\n$3\r\nab", b"+a\r\n+b\r\n"], ids=range(3))
def test_what_nobody_asked_for_is_no_answer(talker: Talker, more: bytes) -> None:
    server = open_server(talker.url)
    server.set("key", "value")
    talker.more = more
    assert server.ping()
    for _ in range(2):
        assert server.get("key") == b"value"
    server.close()
    server.connection_pool.disconnect()


class Late(FakeServer):
    """Holds back its answer to the value "late" until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def _reply(self, answer: Any) -> bytes:
        if answer == b"late":
            assert self.go.wait(60)
        return super()._reply(answer)


def by_command(server: Server) -> None:
    server.get("a")


def by_pipeline(server: Server) -> None:
    with server.pipeline(transaction=False) as pipeline:
        pipeline.pttl("b")
        cast(Any, pipeline).get("a")
        pipeline.execute()


@pytest.mark.parametrize("kind", ["plain", "by Sentinels"])
@pytest.mark.parametrize("ask", [by_command, by_pipeline])
def test_a_late_answer_is_not_taken_for_the_next_ones(
    kind: str, ask: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given up may be answered while the next command waits for its own answer."""
    with Late() as late:
        address = urlsplit(late.url)
        named = (address.hostname, address.port)
        monkeypatch.setattr(Sentinel, "discover_master", lambda self, name: named)
        url = late.url if kind == "plain" else "redis+sentinel://127.0.0.1:1/main/0"
        server = open_server(url, answers_within=60.0)
        server.set("a", b"late")
        server.set("b", b"in time")
        connection: Any = server.connection_pool.get_connection()
        connection._sock.settimeout(0.5)
        server.connection_pool.release(connection)
        with pytest.raises(redis.exceptions.TimeoutError):
            ask(server)
        # Let go once the next command is on its way, whichever connection it takes.
        threading.Timer(0.05, late.go.set).start()
        assert server.get("b") == b"in time"
        server.close()
        server.connection_pool.disconnect()


@pytest.mark.server
def test_a_connection_that_the_server_ended_while_idle_is_made_again(
    server_url: str, redis_client: redis.Redis
) -> None:
    server = open_server(server_url)
    first = id_of(server)
    redis_client.client_kill_filter(_id=str(first))
    until(lambda: all(int(c["id"]) != first for c in redis_client.client_list()))
    assert server.ping()
    assert id_of(server) != first
    server.close()
    server.connection_pool.disconnect()


def test_a_read_that_blocks_is_ended_from_another_thread(server: Any, pool_name: str) -> None:
    ended: list[BaseException] = []
    waiting = threading.Event()

    def read() -> None:
        waiting.set()
        try:
            server.xread({pool_name: "0-0"}, count=1, block=10_000)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    waiting.wait()
    while thread.is_alive():
        server.connection_pool.disconnect()
        thread.join(0.05)
    assert ended
    assert server.ping()  # the next command makes another


@contextmanager
def blocked_read(server: Any, stream: str) -> Iterator[list[Any]]:
    """A thread that waits for an entry; at the end, what it read or what it met."""
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(server.xread({stream: "0-0"}, count=1, block=60_000))
        except redis.exceptions.RedisError as error:
            found.append(error)

    thread = Guarded(read)
    until(lambda: server._blocked is not None)
    yield found
    thread.end()


def test_values_are_asked_for_behind_a_blocking_read(
    server: Any, any_server: str, pool_name: str
) -> None:
    """They are as they stand once that is answered; one that cannot be read is none."""
    other: Any = open_server(any_server)
    stream, key = f"{{{pool_name}}}:stream", f"{{{pool_name}}}:key"
    keys = [f"{key}:{number}" for number in range(BEHIND_MOST + 1)]
    server.get_behind(keys[0])  # nothing is waited for
    with blocked_read(server, stream) as found:
        for name in keys:
            server.get_behind(name)
        other.set(keys[0], "a")
        other.hset(keys[1], "no", "value")
        other.set(keys[3], "b" * 100_000)
        other.xadd(stream, {"an": "entry"})
    assert [(name, len(entries)) for name, entries in found[0]] == [(stream.encode(), 1)]
    values = [b"a", None, None, b"b" * 100_000]
    assert server.behind == dict(zip(keys[:BEHIND_MOST], values, strict=True))
    assert server.get(keys[0]) == b"a"  # the connection is in step
    assert server.xread({stream: "0-0"}, count=1, block=1000) == found[0]
    assert server.behind == {}
    other.delete(stream, *keys)
    other.close()


def test_nothing_is_asked_for_behind_a_read_whose_connection_is_its_threads(
    server: Any, any_server: str, pool_name: str
) -> None:
    """As with TLS, which `select.poll` says nothing of."""
    other: Any = open_server(any_server)
    other.set(pool_name, "value")
    stream = f"{{{pool_name}}}:stream"
    with blocked_read(server, stream) as found:
        server._blocked._parser._poll = None
        server.get_behind(pool_name)
        other.xadd(stream, {"an": "entry"})
    assert found[0]
    assert server.behind == {}
    other.delete(pool_name, stream)
    other.close()


@pytest.mark.server
def test_behind_a_read_that_is_refused_values_are_read_too(
    server_url: str, redis_client: redis.Redis, pool_name: str
) -> None:
    server: Any = open_server(server_url)
    mine = id_of(server)
    redis_client.set(pool_name, "value")
    with blocked_read(server, f"{pool_name}:stream") as found:
        server.get_behind(pool_name)
        until(lambda: redis_client.execute_command("CLIENT UNBLOCK", mine, "ERROR"))
    assert str(found[0]).startswith("UNBLOCKED")
    assert server.behind == {pool_name: b"value"}
    assert id_of(server) == mine
    redis_client.delete(pool_name)
    server.close()


def test_what_leaves_only_in_part_ends_the_connection(
    server: Any, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could go on behind it."""
    write = os.write
    with blocked_read(server, pool_name) as found:
        monkeypatch.setattr(os, "write", lambda number, data: write(number, data[:5]))
        server.get_behind(pool_name)
        monkeypatch.undo()
    assert isinstance(found[0], redis.exceptions.ConnectionError)
    assert server.ping()


@pytest.mark.server
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_a_connection_of_its_own(server_url: str) -> None:
    server = open_server(server_url)
    mine = id_of(server)
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writing.send(id_of(server)))
    child.start()
    assert reading.poll(30)
    assert reading.recv() != mine
    child.join(60)
    assert id_of(server) == mine
    server.close()
    server.connection_pool.disconnect()


@pytest.mark.parametrize("bounded", [True, False])
def test_only_a_bounded_connection_refuses_a_long_reply(
    server: Server, any_server: str, pool_name: str, bounded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(BoundedParser, "most", 3 << 20)
    reader = open_server(any_server, bounded=bounded)
    for size in (1, 2 << 20, 4 << 20):
        value = os.urandom(size)
        server.set(pool_name, value)
        if bounded and size > BoundedParser.most:
            with pytest.raises(ReplyTooLong, match="more than 3145728 bytes"):
                reader.get(pool_name)
        else:
            assert reader.get(pool_name) == value
    server.set(pool_name, "short")
    assert reader.get(pool_name) == b"short"  # each reply has the bound for itself
    server.delete(pool_name)
    reader.close()
    reader.connection_pool.disconnect()


def test_a_server_that_is_loading_is_told_from_one_that_refuses(talker: Talker) -> None:
    server: Any = open_server(talker.url)
    server.ping()
    first = server.connection_pool.get_connection()._sock
    talker._run = lambda *asked: redis.exceptions.ResponseError("LOADING soon")  # type: ignore[method-assign]
    with pytest.raises(redis.exceptions.BusyLoadingError):
        server.get("key")
    assert first.fileno() == -1
    talker._run = lambda *asked: redis.exceptions.ResponseError("ERR no")  # type: ignore[method-assign]
    with pytest.raises(redis.exceptions.ResponseError, match="no"):
        server.execute_command("GET", "key")
    server.connection_pool.disconnect()
