"""The roles of `deploy/redis`: each cell of SECURITY.md's table, done with that role's user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.pool_view import PoolViewer
from lmpool.scripts import script
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import worker_process

ROOT = Path(__file__).parents[2]
ROLES = ("producer", "worker", "operator")
LAST = "18446744073709551615-18446744073709551615"

Command = tuple[Any, ...]

KEYS = PoolKeys("roles")
SHARD = KEYS.shard("0123abcd", 0)
JOBS, FLIGHT, RESULT = SHARD.stream().key, SHARD.flight(bytes(16)), SHARD.result(bytes(16))
PIECES, MINE = SHARD.pieces(bytes(16)), SHARD.reply("producer-1")
THEIRS = SHARD.reply("somebody-0123")


def deeds(shard: ShardKeys) -> dict[str, list[Command]]:
    """What each row of the table means: all of it where it says yes, none where it says no."""
    check = ("EVALSHA", script("check").sha, 1, JOBS, shard.prefix, "producer-1", 1000, 1000)
    return {
        "read model info, vocabulary, rows, pieces, adapters' names, counters": [
            ("GET", KEYS.info), ("GET", KEYS.serving), ("GET", KEYS.vocabulary("0123abcd")),
            ("MGET", RESULT), ("XREAD", "STREAMS", PIECES, MINE, "0", "0"),
            ("HGETALL", shard.adapters), ("HGETALL", shard.counters),
            ("HMGET", shard.bounds, "backlog"),
        ],
        "read the job streams: everybody's prompts": [("XRANGE", JOBS, "-", "+")],
        "push jobs, join flights": [
            ("XADD", JOBS, "*", "job", "x"), ("SET", FLIGHT, "1-1 0  producer-1 ", "PX", 1000),
        ],
        "run lmpool's scripts": [check],
        "run scripts of its own": [("EVAL", "return 1", 0), ("SCRIPT", "LOAD", "return 1")],
        "delete a row, a flight, a job, of others too": [
            ("DEL", RESULT), ("DEL", FLIGHT), ("XDEL", JOBS, "1-1"),
        ],
        "write what is no flight in a flight's place": [("SET", FLIGHT, "abc")],
        "use up the ids of a job stream": [("XADD", shard.stream("batch").key, LAST, "job", "x")],
        "delete a job stream, or put something else in its place": [
            ("DEL", JOBS), ("SET", JOBS, "x"), ("RENAME", JOBS, JOBS), ("COPY", JOBS, JOBS + "0"),
            ("DEL", JOBS),
        ],
        "write a row, the model info, a heartbeat, a counter, the backlog's bound, "
        "the account of what is stored": [
            ("SET", RESULT, "x"), ("APPEND", RESULT, "x"), ("XADD", PIECES, "*", "piece", "x"),
            ("SET", KEYS.info, "x"), ("SET", KEYS.serving, "x"), ("SET", shard.alive("me"), "x"),
            ("HINCRBY", shard.counters, "computed", 1), ("HSET", shard.bounds, "backlog", 1),
            ("XADD", shard.account, "*", "held", "1"), ("SET", shard.held, 1),
        ],
        "read or write notices of another Redis user's clients": [
            ("XADD", THEIRS, "*", "ok", "0" * 32), ("XRANGE", THEIRS, "-", "+"),
            ("XREAD", "STREAMS", THEIRS, "0"), ("DEL", THEIRS),
        ],
        "register adapters, keep prefixes, drain workers": [
            ("HSET", shard.adapters, "a", "b"), ("ZADD", KEYS.control_queue("me"), 1, "x"),
        ],
        "see dead letters": [("XRANGE", shard.dead, "-", "+"), ("XLEN", shard.dead)],
        "take the jobs of a stream as a worker does": [
            ("XGROUP", "CREATE", shard.stream(lane=0).key + "7", GROUP, "0", "MKSTREAM"),
            ("XREADGROUP", "GROUP", GROUP, "me", "STREAMS", shard.stream(lane=0).key + "7", ">"),
            ("XGROUP", "DESTROY", shard.stream(lane=0).key + "7", GROUP),
        ],
        "list keys": [("KEYS", "nothing"), ("SCAN", "0", "MATCH", "nothing")],
        "keys of other programs on this server": [("GET", "theirs"), ("SET", "theirs", "x")],
        "empty the database (`FLUSHALL`)": [("FLUSHALL",)],
        "change the server's settings and users": [
            ("CONFIG", "SET", "maxmemory", "0"), ("ACL", "SETUSER", "nobody"), ("ACL", "LIST"),
        ],
        "stop the server": [("SHUTDOWN", "ABORT")],
    }  # fmt: skip


def cells() -> list[tuple[str, str, str]]:
    """The table: row, role, what it says."""
    text = (ROOT / "SECURITY.md").read_text()
    (table,) = re.findall(r"^\| \| producer \| worker \| operator \|\n((?:\|.*\n)+)", text, re.M)
    found = []
    for line in table.splitlines()[1:]:
        deed, *answers = (cell.strip() for cell in line.strip("|").split("|"))
        found += [(deed, role, answer) for role, answer in zip(ROLES, answers, strict=True)]
    return found


@pytest.fixture(scope="module")
def users(server_binary: str) -> Iterator[dict[str, redis.Redis]]:
    """A connection for each role to a server with the users of `deploy/redis`."""
    acl = ROOT / "deploy" / "redis" / "users.acl"
    with RealServer(binary=server_binary, aclfile=str(acl), tcp=True) as server:
        address = server.url.rpartition("/")[0].removeprefix("redis://")
        found = {
            role: redis.Redis.from_url(f"redis://{role}:change-this-{role}@{address}/0", protocol=2)
            for role in (*ROLES, "exporter")
        }
        try:
            yield found
        finally:
            for client in found.values():
                client.close()


def test_the_table_is_whole() -> None:
    assert [deed for deed, role, _ in cells() if role == "worker"] == list(deeds(SHARD))
    assert {answer for _, _, answer in cells()} == {"yes", "no"}


@pytest.mark.parametrize(("deed", "role", "answer"), cells())
def test_a_role_can_do_what_the_table_says(
    deed: str, role: str, answer: str, users: dict[str, redis.Redis]
) -> None:
    operator, server = users["operator"], users[role]
    script("check").load(operator)  # type: ignore[arg-type]
    for stream in SHARD.streams:
        operator.delete(stream.key)
        operator.xadd(stream.key, {"job": "x"}, id="1-1")
    for command in deeds(SHARD)[deed]:
        refused = None
        try:
            server.execute_command(*command)
        except redis.exceptions.NoPermissionError as error:
            refused = error
        except redis.exceptions.ResponseError:
            pass  # it was allowed, and came to nothing
        assert (refused is None) == (answer == "yes"), f"{role}: {command}: {refused}"


def test_an_exporter_sees_a_pool_and_touches_nothing(
    server_binary: str, users: dict[str, redis.Redis]
) -> None:
    exporter, operator = users["exporter"], users["operator"]
    given = exporter.connection_pool.connection_kwargs
    url = f"redis://exporter:{given['password']}@{given['host']}:{given['port']}/0"
    theirs = url.replace("exporter", "worker")
    with (
        worker_process(theirs, "seen", adapter_dirs=["/nowhere"]),
        PoolViewer(url, "seen") as viewer,
        connected(url.replace("exporter", "producer"), "seen") as lm,
    ):
        lm.sync.next_token_logprobs([1, 2])
        (shard,) = lm.shards
        operator.xadd(shard.dead, {"job": "x", "reason": "by hand"})
        operator.hset(shard.adapters, "a", "b")
        view = viewer.read()
        # What waits, and since when, without reading it.
        for client in (exporter, users["producer"]):
            assert client.xinfo_groups(shard.stream().key)
            assert client.xpending(shard.stream().key, GROUP)["pending"] == 0  # type: ignore[index]
        assert len(view.workers) == 1
        assert (view.statistics["computed"], view.dead_letters, view.adapters) == (1, 1, ["a"])
        assert view.statistics["held_bytes"] > 0
        assert view.memory_max_bytes >= 0 < view.memory_bytes
        operator.hdel(shard.adapters, "a")
    seen = {"read model info, vocabulary, rows, pieces, adapters' names, counters",
            "read the job streams: everybody's prompts", "see dead letters"}  # fmt: skip
    for deed, commands in deeds(SHARD).items():
        for command in (
            commands if deed not in seen else [("GET", RESULT), ("XRANGE", THEIRS, "-", "+")]
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                exporter.execute_command(*command)


def test_an_append_only_file_brings_back_what_scripts_wrote(server_binary: str) -> None:
    """Redis 7.0 replays transactions as the user `default`, which nobody can be all the same."""
    acl = ROOT / "deploy" / "redis" / "users.acl"
    with RealServer(
        binary=server_binary, aclfile=str(acl), tcp=True, appendonly="yes", appendfsync="always"
    ) as server:
        address = server.url.rpartition("/")[0].removeprefix("redis://")
        worker = f"redis://worker:change-this-worker@{address}/0"
        with redis.Redis.from_url(worker, protocol=2) as client:
            keys = [SHARD.stream().key, SHARD.alive("worker"), SHARD.steady, SHARD.workers]
            keys.append(SHARD.bounds)
            arguments = [GROUP, "worker", "beats", 60_000, 60_000, "", 1, 16, 60_000]
            script("alive")(client, keys, arguments)  # type: ignore[arg-type]
            server.kill()
            server.start()  # it answers while it loads, that it knows nobody

            def beat() -> Any:
                try:
                    return client.get(keys[1])
                except redis.exceptions.BusyLoadingError:
                    return None

            assert until(beat, what="the server to have loaded") == b"beats"
            assert client.exists(keys[2])
        with redis.Redis.from_url(server.url, protocol=2) as nobody:
            for attempt in (("GET", keys[1]), ("AUTH", "default", ""), ("AUTH", "")):
                with pytest.raises(redis.exceptions.RedisError):
                    nobody.execute_command(*attempt)
