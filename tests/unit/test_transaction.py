"""The worker's transaction, on fakeredis and on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lmpool.commands import Server
from lmpool.keys import PoolKeys
from lmpool.rows import LARGE, PackedRow
from lmpool.scripts import script
from lmpool.server import open_server
from lmpool.worker.transaction import Call, Transaction
from tests.support.server import RealServer
from tests.support.waiting import until


@pytest.fixture
def server(any_server: str) -> Iterator[Server]:
    server = open_server(any_server)
    yield server
    server.close()
    server.connection_pool.disconnect()


def rows(pool_name: str) -> list[tuple[str, bytes | PackedRow]]:
    """Small and large, in turn, with everything in them that could be taken for protocol."""
    awkward = b"\r\n$3\r\n*1\r\n\x00"
    sizes = (0, 1, 100, LARGE - 1, LARGE, 5 * LARGE)
    values: list[bytes | PackedRow] = [(awkward * (n // len(awkward) + 1))[:n] for n in sizes]
    pieces = [(b"", b""), (b"*2\r\n", b"$"), (awkward, awkward * LARGE)]
    values[2:2] = [PackedRow(header, memoryview(numbers)) for header, numbers in pieces]
    return [(f"{{{pool_name}}}:row:{i}", value) for i, value in enumerate(values)]


def written(server: Server, found: Any, *calls: Call) -> tuple[Any, Any]:
    """What was answered to a transaction of these rows and calls."""
    return Transaction(server, found, 60_000, *calls).answers()


def stored(value: bytes | PackedRow) -> bytes:
    return value.joined() if isinstance(value, PackedRow) else value


@pytest.mark.parametrize("known", [True, False], ids=["script known", "script forgotten"])
def test_rows_and_script_are_done(
    server: Server, redis_client: redis.Redis, pool_name: str, known: bool
) -> None:
    replace, key = script("replace"), PoolKeys(pool_name).info
    if known:
        server.script_load(replace.source)
    else:
        redis_client.script_flush()
    for _ in range(2):  # the connection is fit for the next one
        written(server, rows(pool_name), Call(replace, [key], ["", "v"]))
    for name, value in rows(pool_name):
        assert redis_client.get(name) == stored(value)
        assert 0 < redis_client.pttl(name) <= 60_000
    assert redis_client.get(key) == b"v"
    assert server.ping()
    redis_client.delete(key, *(name for name, _ in rows(pool_name)))


def test_nothing_is_done_where_something_is_refused(server_binary: str, pool_name: str) -> None:
    with RealServer(maxmemory="3mb", maxmemory_policy="noeviction") as full:
        server = open_server(full.url)
        key = PoolKeys(pool_name).info
        try:
            with full.client() as admin:
                while True:
                    try:
                        admin.rpush("filler", b"x" * 50_000)
                    except redis.exceptions.OutOfMemoryError:
                        break
                with pytest.raises(redis.exceptions.OutOfMemoryError) as refused:
                    written(server, rows(pool_name), Call(script("replace"), [key], ["", "v"]))
                assert len(str(refused.value)) < 200  # no rows in it
                assert admin.exists(key, *(name for name, _ in rows(pool_name))) == 0
                admin.config_set("maxmemory", 0)
            # Every answer was read: the next command gets its own.
            assert server.ping() is True
            written(server, rows(pool_name), Call(script("replace"), [key], ["", "v"]))
            assert server.get(key) == b"v"
        finally:
            server.close()
            server.connection_pool.disconnect()


def test_a_connection_cut_in_between_is_not_used_again(
    server: Server, redis_client: redis.Redis, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = server.connection_pool.get_connection()
    server.connection_pool.release(connection)

    def cut(*arguments: object, **options: object) -> object:
        raise redis.exceptions.ConnectionError("cut")  # what was answered is there, unread

    monkeypatch.setattr(connection, "read_response", cut)
    key = PoolKeys(pool_name).info
    with pytest.raises(redis.exceptions.ConnectionError):
        written(server, rows(pool_name), Call(script("replace"), [key], ["", "v"]))
    monkeypatch.undo()
    assert server.ping() is True
    redis_client.delete(key, *(name for name, _ in rows(pool_name)))


def test_what_is_there_already_stays_unless_it_is_no_value(
    server: Server, redis_client: redis.Redis, pool_name: str
) -> None:
    found = rows(pool_name)
    redis_client.set(found[0][0], b"first", px=30_000)
    redis_client.set(found[5][0], b"")
    for number in (4, 8):
        redis_client.hset(found[number][0], "no", "value")
    replace, key = script("replace"), PoolKeys(pool_name).info
    written(server, found, Call(replace, [key], ["", "v"]))
    assert redis_client.get(found[0][0]) == b"first"
    assert 0 < redis_client.pttl(found[0][0]) <= 30_000  # type: ignore[operator]
    for name, value in found[1:]:
        assert redis_client.get(name) == stored(value)
        assert 30_000 < redis_client.pttl(name) <= 60_000  # type: ignore[operator]
    redis_client.delete(key, *(name for name, _ in found))


def test_the_replies_say_whether_all_was_done_as_sent(
    server: Server, redis_client: redis.Redis, pool_name: str
) -> None:
    key = PoolKeys(pool_name).info
    redis_client.script_flush()
    for is_done in (False, True):
        server.delete(key, *(name for name, _ in rows(pool_name)))
        call = Call(script("replace"), [key], ["", "v"])
        transaction = Transaction(server, rows(pool_name), 60_000, call)
        until(lambda t=transaction: t.is_answered_within(60))  # what is queued is told before
        assert transaction.read() is is_done
        assert transaction.answers() == (None, 1)  # which knows what was read
    again = Transaction(server, rows(pool_name), 60_000, call)
    assert not again.read()  # the rows are there
    assert server.ping() is True
    redis_client.delete(key, *(name for name, _ in rows(pool_name)))


@pytest.mark.parametrize("known", [True, False], ids=["scripts known", "scripts forgotten"])
def test_what_makes_room_is_called_before(
    server: Server, redis_client: redis.Redis, pool_name: str, known: bool
) -> None:
    replace, key = script("replace"), PoolKeys(pool_name).info
    redis_client.script_flush()
    if known:
        server.script_load(replace.source)
    first, second = Call(replace, [key], ["", "one"]), Call(replace, [key], ["one", "two"])
    assert written(server, rows(pool_name), second, first) == (1, 1)
    assert redis_client.get(key) == b"two"
    for name, value in rows(pool_name):
        assert redis_client.get(name) == stored(value)
    redis_client.delete(key, *(name for name, _ in rows(pool_name)))
