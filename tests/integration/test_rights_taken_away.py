"""A user of the server that may not do all that its role needs: nothing is taken for damage."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, cast

import pytest
import redis
from redis.asyncio import ConnectionPool

import lmpool
from lmpool.commands import Server, Value
from lmpool.errors import ServerRefused
from lmpool.keys import GROUP, ShardKeys
from lmpool.liveness import living
from lmpool.scripts import script
from lmpool.server import open_server
from lmpool.servers import Servers
from lmpool.wire import Job
from lmpool.worker.control_redis import PatientRedis
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.homes import Homes
from lmpool.worker.mending import mend
from tests.support.clients import connected
from tests.support.parts import info_of
from tests.support.protocol import Caller, Consumer, new_job, shard_of_pool
from tests.support.server import RealServer
from tests.support.workers import in_process_worker
from tests.unit.test_scripts import NAMES

pytestmark = [pytest.mark.server, pytest.mark.one_server]

JOBS = [new_job(number) for number in range(1, 5)]
READS = ("EXISTS", "GET", "LEN", "MGET", "RANGE", "CARD", "COUNT", "XPENDING", "XINFO", "TTL")


@pytest.fixture
def narrow(url_of: Callable[..., str]) -> Callable[..., str]:
    """The URL of a user that may do all but these commands."""
    return lambda *commands: url_of("narrow", "~*", "+@all", *(f"-{each}" for each in commands))


@pytest.fixture
def shard(admin: redis.Redis, pool_name: str) -> ShardKeys:
    """One with jobs that wait, and one that a worker has, and all that workers keep for long."""
    shard = shard_of_pool(pool_name)
    worker = Consumer(admin, shard)
    Caller(admin, shard).enqueue(*JOBS)
    worker.read(1)
    admin.xadd(shard.dead, {"job": "x", "reason": "by hand"})
    admin.xadd(shard.account, {"held": "1", "bytes": "1", "life": "1", "digests": ""})
    admin.hset(shard.adapters, "a", "b")
    admin.hset(shard.counters, "computed", "1")
    admin.zadd(shard.waiting, {"0": 1})
    return shard


def held(admin: redis.Redis) -> dict[bytes, Any]:
    return {key: admin.dump(key) for key in admin.scan_iter(count=1000)}


@pytest.mark.parametrize("command", ["xinfo", "zcard", "zcount", "hlen", "hgetall", "hget"])
def test_a_worker_takes_nothing_for_damaged_that_it_may_not_look_at(
    command: str, narrow: Callable[..., str], admin: redis.Redis, shard: ShardKeys
) -> None:
    before = held(admin)
    with (
        closing(Servers.of_url(narrow(command))) as servers,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        mend(servers, [shard], info_of(1), Homes([shard], "me"), {shard.prefix})
    assert held(admin) == before


@pytest.mark.parametrize("commands", [["xadd"], ["get"], ["xack", "xdel"]])
def test_a_job_is_not_given_up_by_who_may_not_do_all_of_it(
    commands: list[str], narrow: Callable[..., str], admin: redis.Redis, shard: ShardKeys
) -> None:
    stream, job = shard.stream(), JOBS[0]
    pending: Any = admin.xpending_range(stream.key, GROUP, "-", "+", 9)
    (entry,) = [item["message_id"] for item in pending]
    before = held(admin)
    with (
        closing(Servers.of_url(narrow(*commands))) as servers,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        DeadLetters(servers, "me").give_up(stream, entry, b"data", job, 2, "other")
    assert held(admin) == before


@pytest.mark.parametrize("name", ["release", "sift"])
def test_what_cannot_be_taken_off_is_put_nowhere_else(
    name: str, narrow: Callable[..., str], admin: redis.Redis, shard: ShardKeys
) -> None:
    """Or it would be there once more with each try. To take it off in one of two ways is enough."""
    jobs, worker = shard.stream().key, Consumer(admin, shard)
    arguments: list[Value]
    if name == "sift":
        admin.xadd(jobs, {"job": bytes(8 << 20)})
        worker.read()
        keys, arguments = [jobs, shard.dead], [shard.prefix, GROUP, worker.id, "0", 60_000, 10]
    else:
        digest, entry = JOBS[0].digest.hex(), worker.held()[0]
        keys, arguments = [jobs], [shard.prefix, GROUP, 1, 1, digest, entry]
    before = held(admin)
    with closing(open_server(narrow("xack", "xdel"))) as server:
        for _ in range(2):
            with pytest.raises(redis.exceptions.NoPermissionError):
                script(name)(server, keys, arguments)
        assert held(admin) == before
        for lacking in ("xack", "xdel"):
            narrow(lacking)
            script(name)(server, keys, arguments)
    assert admin.xlen(jobs) == len(JOBS)
    assert admin.xlen(shard.dead) == (2 if name == "sift" else 1)


@pytest.mark.parametrize("stored", [(), JOBS[:1]])
@pytest.mark.parametrize("command", ["mget", "xadd", "incrby"])
def test_what_is_told_of_twice_is_counted_once(
    command: str,
    stored: list[Job],
    narrow: Callable[..., str],
    admin: redis.Redis,
    shard: ShardKeys,
) -> None:
    worker = Consumer(admin, shard)
    done = [(JOBS[0], worker.held()[0], "ok", "")]
    with closing(open_server(narrow())) as server:
        worker.server = cast(redis.Redis, server)
        for lacking in (command, command, "sort"):
            narrow(lacking)
            with suppress(redis.exceptions.NoPermissionError):
                worker.complete(done, [("computed", 1)], stored)
                break
    assert admin.hgetall(shard.counters) == {b"computed": b"2"}


def test_what_is_done_is_not_undone_by_who_may_call_no_idle_worker(
    narrow: Callable[..., str], admin: redis.Redis, pool_name: str
) -> None:
    shard = shard_of_pool(pool_name, lanes=2)
    admin.hset(shard.bounds, mapping={"lanes": 2, "used": 2})
    worker = Consumer(admin, shard)
    with closing(open_server(narrow())) as server:
        caller = Caller(cast(redis.Redis, server), shard)
        admin.execute_command("ACL", "SETUSER", "narrow", "resetkeys", "~*[^e]")  # not ~*:wake
        assert caller.enqueue(*JOBS) == ("qqqq", True)
        admin.execute_command("ACL", "SETUSER", "narrow", "resetkeys", "~*")
        (entry,) = worker.read(1)
        narrow("xlen")
        worker.server = cast(redis.Redis, server)
        assert worker.release((JOBS[0], entry)) == 1
    assert entry.decode() not in str(admin.xrange(worker.stream))


@pytest.mark.parametrize("command", ["xadd", "xdel"])
def test_a_job_stays_where_it_is_while_it_may_not_come_forward(
    command: str, narrow: Callable[..., str], admin: redis.Redis, pool_name: str
) -> None:
    shard = shard_of_pool(pool_name)
    Caller(admin, shard).enqueue(JOBS[0], priority="batch")
    with closing(open_server(narrow())) as server:
        caller = Caller(cast(redis.Redis, server), shard, "other")
        caller.enqueue(JOBS[1])
        before = {key: dump for key, dump in held(admin).items() if b":reply:" not in key}
        narrow(command)
        with pytest.raises(redis.exceptions.NoPermissionError):
            caller.enqueue(JOBS[0])
    after = {key: dump for key, dump in held(admin).items() if b":reply:" not in key}
    assert after == before


def test_a_job_comes_forward_from_no_stream_that_is_none(
    admin: redis.Redis, pool_name: str
) -> None:
    """A worker mends that; until then each who asks would put another one there."""
    shard = shard_of_pool(pool_name)
    Caller(admin, shard).enqueue(JOBS[0], priority="batch")
    admin.set(shard.stream("batch").key, "overwritten")
    for number in range(2):
        assert Caller(admin, shard, f"other{number}").enqueue(JOBS[0]) == ("j", True)
    assert admin.exists(shard.stream("interactive").key) == 0


@pytest.mark.parametrize("command", ["hincrby", "xadd", "sadd", "srem"])
def test_what_was_not_taken_over_is_taken_over_later(
    command: str, narrow: Callable[..., str], admin: redis.Redis, shard: ShardKeys
) -> None:
    keys = [shard.inherited, shard.counters, shard.dead]
    letters: list[Value] = ["1-1", 1, "reason", "y", "2-1", 1, "reason", "z"]
    arguments: list[Value] = [60_000, 60_000, 10, "counted", 1, "computed", 5, *letters]
    with closing(open_server(narrow(command, "srem"))) as server:
        for lacking in (command, command, "sort"):
            narrow(lacking, "srem")
            with suppress(redis.exceptions.NoPermissionError):
                script("inherit")(server, keys, arguments)
    dead: Any = admin.xrange(shard.dead)
    assert [fields[b"reason"] for _, fields in dead] == [b"by hand", b"y", b"z"]
    assert admin.hgetall(shard.counters) == {b"computed": b"6"}
    assert 0 < int(cast(int, admin.pttl(shard.inherited))) <= 60_000


@pytest.mark.parametrize(
    "there",
    [
        "a string",
        {"computed": "x"},
        {"computed": "9" * 19},
        {"computed": "007"},
        {"computed": "00"},
    ],
)
def test_what_is_taken_over_is_not_lost_where_the_heirs_counters_are_damaged(
    there: Any, admin: redis.Redis, shard: ShardKeys
) -> None:
    admin.delete(shard.counters)
    if isinstance(there, str):
        admin.set(shard.counters, there)
    else:
        admin.hset(shard.counters, mapping={"failed": 2, **there})
    keys, letters = [shard.inherited, shard.counters, shard.dead], cast(int, admin.xlen(shard.dead))
    counted: list[Value] = ["counted", 3, "computed", 5, "failed", 1, "batches", "007"]
    script("inherit")(cast(Server, admin), keys, [60_000, 60_000, 10, *counted])
    kept = 0 if isinstance(there, str) else 2
    assert admin.hgetall(shard.counters) == {b"computed": b"5", b"failed": b"%d" % (1 + kept)}
    # What one's own life has is kept where there is nothing that could be added.
    for nothing in ("no number", "007", "00", "9" * 19, ""):
        counted = [f"counted {nothing}", 1, "computed", nothing, "2-1", 1, "reason", "y"]
        script("inherit")(cast(Server, admin), keys, [60_000, 60_000, 10, *counted])
        assert admin.hget(shard.counters, "computed") == b"5"
    assert admin.xlen(shard.dead) == letters + 1


@pytest.mark.parametrize("before", ["", "0-1"])
def test_nothing_is_taken_over_into_a_full_memory(
    before: str, narrow: Callable[..., str], admin: redis.Redis, shard: ShardKeys
) -> None:
    keys = [shard.inherited, shard.counters, shard.dead]
    arguments: list[Value] = [60_000, 60_000, 10, "counted", 1, "computed", 5, "1-1", 1, "a", "b"]
    if before:
        admin.sadd(shard.inherited, before)
    there = held(admin)
    admin.config_set("maxmemory", 1)
    try:
        with (
            closing(open_server(narrow())) as server,
            pytest.raises(redis.exceptions.ResponseError, match="maxmemory"),
        ):
            script("inherit")(server, keys, arguments)
    finally:
        admin.config_set("maxmemory", 0)
    assert held(admin) == there


@pytest.mark.parametrize("command", ["xlen", "xadd", "exists", "mget", "set"])
def test_who_asks_is_told_what_its_user_may_not_do(
    command: str,
    narrow: Callable[..., str],
    own_server: RealServer,
    admin: redis.Redis,
    pool_name: str,
) -> None:
    with in_process_worker(own_server.url, pool_name), connected(narrow(), pool_name) as lm:
        lm.sync.next_token_logprobs([1])
        narrow(command)
        said = rf"does not permit this user.*('{command}' command|ACL LOG).*users\.acl"
        with pytest.raises(ServerRefused, match=said):
            lm.sync.batch_next_token_logprobs([[2, number] for number in range(9)], timeout=30)
        narrow()
        lm.sync.next_token_logprobs([3], timeout=30)


def test_nobody_is_taken_for_dead_whom_a_user_may_not_see(
    narrow: Callable[..., str], own_server: RealServer, pool_name: str
) -> None:
    with (
        in_process_worker(own_server.url, pool_name),
        lmpool.connect(narrow("xinfo"), pool_name) as lm,
        pytest.raises(ServerRefused, match="does not permit this user"),
    ):
        lm.wait_for_workers_sync(timeout=30)


@pytest.mark.parametrize("refusal", ["BUSY a script runs", "MASTERDOWN of a replica"])
def test_nobody_is_taken_for_dead_while_the_server_says_nothing(
    refusal: str, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch, admin: redis.Redis
) -> None:
    def refuse(*_: object) -> None:
        raise redis.exceptions.ResponseError(refusal)

    monkeypatch.setattr(admin, "xinfo_consumers", refuse)
    with pytest.raises(redis.exceptions.ResponseError, match=refusal):
        living(cast(Server, admin), shard)


@pytest.mark.parametrize("command", ["zrangebyscore", "watch", "multi", "exec", "get", "set"])
def test_a_worker_that_may_not_see_to_control_jobs_says_so_once(
    command: str,
    narrow: Callable[..., str],
    admin: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("lmpool.worker.control_redis.PATIENCE", 0.0)

    async def look(server: PatientRedis) -> None:
        """What arq does, in this order, for each job."""
        admin.delete("arq:in-progress:x")
        admin.zadd("queue", {"x": 1})
        await server.zrangebyscore("queue", float("-inf"), 1)
        async with server.pipeline(transaction=True) as pipeline:
            await pipeline.watch("arq:in-progress:x")
            if await pipeline.exists("arq:in-progress:x"):
                return
            assert await pipeline.zscore("queue", "x") == 1
            pipeline.multi()
            pipeline.psetex("arq:in-progress:x", 60_000, b"1")
            try:
                await pipeline.execute()
            except redis.exceptions.ResponseError:
                return
        async with server.pipeline(transaction=True) as pipeline:
            pipeline.get("arq:job:x")
            pipeline.incr("arq:retry:x")
            await pipeline.execute()
        async with server.pipeline(transaction=True) as pipeline:
            pipeline.delete("arq:in-progress:x")
            pipeline.set("arq:result:x", b"its tokens")
            assert await pipeline.execute() == []
        await asyncio.gather(*server._notes)

    async def look_often() -> None:
        server = PatientRedis(ConnectionPool.from_url(narrow(), protocol=2))
        for lacking in ((command,), (), (command,)):
            narrow(*lacking)
            await look(server)
            await look(server)
        await server.aclose(close_connection_pool=True)

    with caplog.at_level(logging.WARNING):
        asyncio.run(look_often())
    told = [text for text in caplog.messages if "may not be answered" in text]
    assert len(told) == 2, caplog.text
    assert re.search(rf"'{command}'|refused {command.upper()}", told[0])
    assert "its tokens" not in caplog.text


def test_what_passes_by_itself_is_no_refusal_of_control_jobs(
    narrow: Callable[..., str], admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that is lost while a key is watched, and a full memory."""

    async def look() -> None:
        server = PatientRedis(ConnectionPool.from_url(narrow(), protocol=2))
        async with server.pipeline(transaction=True) as pipeline:
            await pipeline.watch("arq:in-progress:x")
            assert admin.execute_command("CLIENT", "KILL", "USER", "narrow") >= 1
            assert await pipeline.exists("arq:in-progress:x")
        admin.config_set("maxmemory", 1)
        try:
            assert await server.psetex("health", 1000, b"x") is None
        finally:
            admin.config_set("maxmemory", 0)
        await server.aclose(close_connection_pool=True)

    with caplog.at_level(logging.DEBUG, "lmpool.worker.control_redis"):
        asyncio.run(look())
    records = [record for record in caplog.records if record.name.endswith("control_redis")]
    assert [record.levelname for record in records] == ["DEBUG"] * 2, caplog.text
    assert "arq's EXISTS failed" in records[0].message
    assert "arq's PSETEX failed" in records[1].message


@pytest.mark.parametrize("name", NAMES)
def test_what_a_script_reads_in_vain_is_looked_at_with_care(name: str) -> None:
    source = script(name).source.replace("redis.pcall('XLEN', wake)", "")  # when all else is done
    found = re.findall(r"(given\()?redis\.pcall\('([A-Z]+)'", source)
    assert found
    assert not [command for given, command in found if command.endswith(READS) and not given]
