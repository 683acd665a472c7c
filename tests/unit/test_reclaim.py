"""The scripts that take jobs over and give them up."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from lmpool.keys import GROUP, ShardKeys
from lmpool.liveness import LIFE_MS
from lmpool.scripts import script
from lmpool.wire import pack_job
from tests.support.protocol import (
    Caller,
    Consumer,
    be_steady,
    entries_of,
    new_job,
    shard_of_pool,
)
from tests.support.waiting import until

A, B = new_job(1), new_job(2)
LONG_MS = 60_000
"""A life that does not end while a test stands still."""


@pytest.fixture
def shard(pool_name: str, redis_client: redis.Redis) -> ShardKeys:
    shard = shard_of_pool(pool_name)
    be_steady(redis_client, shard)
    return shard


def reclaim(
    server: redis.Redis, shard: ShardKeys, *forgotten: bytes, life_ms: int = LIFE_MS
) -> Any:
    arguments = [shard.prefix, GROUP, "me", life_ms, len(forgotten), *forgotten]
    keys = [shard.steady, shard.stream().key]
    found: Any = script("reclaim")(server, keys, arguments)  # type: ignore[arg-type]
    return found and found[1:]


def bury(server: redis.Redis, shard: ShardKeys, job: Any, entry: bytes) -> Any:
    arguments = [shard.prefix, GROUP, 60_000, 100, job.digest.hex(), entry, "failed", "it died"]
    kept = ["job", pack_job(job), "reason", "it died"]
    return script("bury")(server, [shard.stream().key, shard.dead], [*arguments, *kept])  # type: ignore[arg-type]


def test_jobs_of_the_dead_are_taken_over_one_at_a_time(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    Caller(redis_client, shard).enqueue(A, B)
    owner, me = Consumer(redis_client, shard, "owner"), Consumer(redis_client, shard, "me")
    first, second = owner.read()
    redis_client.set(shard.alive("owner"), b"")
    assert reclaim(redis_client, shard) is None  # however long it takes
    redis_client.delete(shard.alive("owner"))
    assert reclaim(redis_client, shard) == [b"owner", first, 2, b"job", pack_job(A)]
    assert (owner.held(), me.held()) == ([second], [first])
    assert reclaim(redis_client, shard) == [b"owner", second, 2, b"job", pack_job(B)]
    assert owner.is_there()
    assert reclaim(redis_client, shard) is None
    assert not owner.is_there()  # it holds nothing any more
    assert me.held() == [first, second]


def test_a_heartbeat_lives_no_longer_when_the_clock_was_set_back(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    Caller(redis_client, shard).enqueue(A)
    owner = Consumer(redis_client, shard, "owner")
    (entry,) = owner.read()
    hour = 3_600_000
    be_steady(redis_client, shard, for_ms=LONG_MS)
    redis_client.set(shard.alive("owner"), b"", px=LONG_MS + hour)  # as after a step of an hour
    assert reclaim(redis_client, shard, life_ms=LONG_MS) is None  # it may yet be renewed
    left: Any = redis_client.pttl(shard.alive("owner"))
    assert 0 < left <= LONG_MS
    redis_client.pexpire(shard.alive("owner"), 1)
    until(lambda: reclaim(redis_client, shard) == [b"owner", entry, 2, b"job", pack_job(A)])


def test_a_heartbeat_that_lost_its_life_gets_one(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    Caller(redis_client, shard).enqueue(A)
    Consumer(redis_client, shard, "owner").read()
    redis_client.set(shard.alive("owner"), b"")
    assert reclaim(redis_client, shard) is None  # it may live
    assert 0 < redis_client.pttl(shard.alive("owner")) <= LIFE_MS  # type: ignore[operator]


@pytest.mark.parametrize("since", [None, -60_000, 0, LONG_MS - 30_000, "nonsense"])
def test_nobody_is_dead_before_the_living_could_renew(
    since: Any, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """The server was away, or is another, or its clock was set back."""
    Caller(redis_client, shard).enqueue(A, B)
    owner, me = Consumer(redis_client, shard, "owner"), Consumer(redis_client, shard, "me")
    forgotten, held = me.read(1) + owner.read()
    redis_client.delete(shard.steady)
    if since == "nonsense":
        redis_client.rpush(shard.steady, since)
    elif since is not None:
        be_steady(redis_client, shard, for_ms=since)
    assert reclaim(redis_client, shard, life_ms=LONG_MS) is None
    assert owner.held() == [held]
    assert reclaim(redis_client, shard, forgotten, life_ms=LONG_MS)[:3] == [b"me", forgotten, 1]
    redis_client.delete(shard.steady)
    be_steady(redis_client, shard, for_ms=LONG_MS)
    assert reclaim(redis_client, shard, life_ms=LONG_MS)[:3] == [b"owner", held, 2]


def test_what_was_withdrawn_is_not_taken_over(redis_client: redis.Redis, shard: ShardKeys) -> None:
    caller = Caller(redis_client, shard)
    caller.enqueue(A, B)
    owner = Consumer(redis_client, shard, "owner")
    _, second = owner.read()
    caller.withdraw(A)
    assert reclaim(redis_client, shard)[1] == second
    assert reclaim(redis_client, shard) is None
    assert not owner.is_there()


def test_deliveries_add_up_over_owners(redis_client: redis.Redis, shard: ShardKeys) -> None:
    Caller(redis_client, shard).enqueue(A)
    (entry,) = Consumer(redis_client, shard, "owner").read()
    assert reclaim(redis_client, shard)[2] == 2
    redis_client.xclaim(shard.stream().key, GROUP, "next", 0, [entry])
    assert reclaim(redis_client, shard)[:3] == [b"next", entry, 4]


def test_what_kills_its_workers_adds_up_whatever_becomes_of_the_server_between(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    Caller(redis_client, shard).enqueue(A)
    (entry,) = Consumer(redis_client, shard, "first").read()
    for deliveries, last in ((2, "first"), (3, "second"), (4, "third")):
        redis_client.delete(shard.steady)  # it restarted, or failed over
        assert reclaim(redis_client, shard) is None
        be_steady(redis_client, shard)
        assert reclaim(redis_client, shard)[:3] == [last.encode(), entry, deliveries]
        taker = "second" if deliveries == 2 else "third"
        redis_client.xclaim(
            shard.stream().key, GROUP, taker, 0, [entry], retrycount=deliveries, justid=True
        )


def test_what_a_worker_forgot_comes_back_to_it(redis_client: redis.Redis, shard: ShardKeys) -> None:
    Caller(redis_client, shard).enqueue(A, B)
    me = Consumer(redis_client, shard, "me")
    first, second = me.read()
    assert reclaim(redis_client, shard) is None
    for _ in range(4):  # nobody died of it
        assert reclaim(redis_client, shard, second)[:3] == [b"me", second, 1]
    assert reclaim(redis_client, shard, b"1-1") is None  # not ours
    assert me.held() == [first, second]


def test_without_a_stream_or_a_group_there_is_nothing(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    assert reclaim(redis_client, shard) is None
    Caller(redis_client, shard).enqueue(A)
    assert reclaim(redis_client, shard) is None


def test_a_job_that_is_given_up_is_kept_and_told(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, other = Caller(redis_client, shard), Caller(redis_client, shard, "other")
    caller.enqueue(A)
    other.enqueue(A)
    (entry,) = Consumer(redis_client, shard, "me").read()
    assert bury(redis_client, shard, A, entry) == b""
    for client in (caller, other):
        assert [(n.status, n.error) for n in client.notices()] == [("failed", "it died")]
    ((_, kept),) = entries_of(redis_client, shard.dead)
    assert kept == {b"job": pack_job(A), b"reason": b"it died"}
    assert not caller.flight(A)
    assert entries_of(redis_client, shard.stream().key) == []
    assert redis_client.hget(shard.counters, "failed") == b"1"


def test_who_cannot_be_kept_is_told_all_the_same(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    caller.enqueue(A)
    (entry,) = Consumer(redis_client, shard, "me").read()
    redis_client.set(shard.dead, b"in the way")
    assert b"WRONGTYPE" in bury(redis_client, shard, A, entry)
    assert [notice.status for notice in caller.notices()] == ["failed"]
    assert entries_of(redis_client, shard.stream().key) == []


def test_an_old_delivery_does_not_fail_the_job_that_is_queued_now(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    caller.enqueue(A)
    (entry,) = Consumer(redis_client, shard, "me").read()
    redis_client.delete(shard.flight(A.digest))
    caller.enqueue(A)
    bury(redis_client, shard, A, entry)
    assert caller.notices() == []
    assert caller.flight(A)
