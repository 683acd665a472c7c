"""The scripts that clients call: enqueue, withdraw, check.

Each on fakeredis and on a real server.
"""

from __future__ import annotations

import pytest
import redis

from lmpool.keys import ShardKeys
from lmpool.wire import pack_job
from tests.support.protocol import (
    Caller,
    Consumer,
    entries_of,
    new_job,
    put_result,
    queued,
    shard_of_pool,
    told,
    write_flight,
)
from tests.support.server import RealServer

A, B, C = new_job(1), new_job(2), new_job(3)


def test_the_first_asks_the_second_joins_and_the_third_finds_it(
    caller: Caller, other: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    assert caller.enqueue(A, B) == ("qq", True)
    assert other.enqueue(B, C) == ("jq", True)
    assert queued(redis_client, shard) == [pack_job(A), pack_job(B), pack_job(C)]
    put_result(redis_client, shard, A)
    assert other.enqueue(A, B, C) == ("hjj", False)
    assert len(queued(redis_client, shard)) == 3


def test_a_prompt_twice_in_one_request_joins_also_where_it_filled_the_backlog(
    caller: Caller, worker: Consumer
) -> None:
    assert caller.enqueue(A, A, B, A, bound=1) == ("qjfj", True)
    assert len(worker.read()) == 1


def test_a_prompt_twice_in_one_request_is_one_job(
    caller: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    assert caller.enqueue(A, A, B, A) == ("qjqj", True)
    assert len(queued(redis_client, shard)) == 2


def test_a_prompt_that_thousands_wait_for_is_one_job(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    assert caller.enqueue(A) == ("q", True)
    ((entry, _),) = entries_of(redis_client, shard.stream().key)
    crowd = [f"{number:036d}" for number in range(3_500)]
    write_flight(redis_client, shard, A, entry.decode(), caller.id, *crowd)
    late = [Caller(redis_client, shard, f"late-{number:031d}") for number in range(100)]
    for each in late:
        assert each.enqueue(A) == ("j", True)
        assert each.check(A) == ("j", False)
    assert len(worker.read()) == 1
    waiting = caller.flight(A).keys() - {b"job", b"stream", b"deadline"}
    assert 3_501 < len(waiting) < 3_601, "some are noted, and no more than a flight may have"
    worker.complete([(A, entry, "ok", "")])
    assert [digest for digest, *_ in told(caller)] == [A.digest.hex()]
    put_result(redis_client, shard, A)
    assert {each.check(A)[0] for each in late} == {"h"}


def test_a_flight_knows_its_job_and_who_waits(
    caller: Caller, other: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    other.enqueue(A)
    ((entry, _),) = entries_of(redis_client, shard.stream().key)
    assert caller.flight(A) == {
        b"job": entry,
        b"stream": shard.stream().key.encode(),
        b"deadline": b"",
        b"c:first": b"",
        b"c:second": b"",
    }


def test_everything_that_a_client_leaves_has_an_end(
    caller: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, reply_ttl=20_000, flight_ttl=30_000)
    for key, ttl in ((shard.reply("first"), 20_000), (shard.flight(A.digest), 30_000)):
        assert 0 < redis_client.pttl(key) <= ttl  # type: ignore[operator]
    # Asking again renews both.
    caller.enqueue(A, reply_ttl=50_000, flight_ttl=70_000)
    assert redis_client.pttl(shard.reply("first")) > 40_000  # type: ignore[operator]
    assert redis_client.pttl(shard.flight(A.digest)) > 60_000  # type: ignore[operator]


def test_at_the_bound_nothing_more_is_queued(
    caller: Caller, other: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    put_result(redis_client, shard, new_job(9))
    assert caller.enqueue(A, B, C, new_job(4), bound=3) == ("qqqf", True)
    assert not caller.flight(new_job(4))
    # What is there or under way needs no room.
    assert other.enqueue(A, new_job(9), new_job(5), bound=3) == ("jhf", True)
    assert len(queued(redis_client, shard)) == 3


def test_the_bound_counts_what_workers_hold(caller: Caller, worker: Consumer) -> None:
    caller.enqueue(A, B)
    first, _second = worker.read()
    assert caller.enqueue(C, bound=2) == ("f", False)
    worker.complete([(A, first, "ok", "")])
    assert caller.enqueue(C, bound=2) == ("q", False)


@pytest.mark.parametrize("name", ["mine", "a@b", "with space"])
def test_an_adapter_must_be_the_registered_one(
    name: str, caller: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    job = new_job(1, adapter=f"{name}@abc")
    assert caller.enqueue(job, A) == ("aq", True)
    redis_client.hset(shard.adapters, name, "abc\n/folder")
    assert caller.enqueue(job) == ("q", False)
    redis_client.hset(shard.adapters, name, "def\n/folder")
    # Even where its row is there: the name means another adapter now.
    put_result(redis_client, shard, job)
    assert caller.enqueue(job) == ("a", False)
    assert caller.enqueue(new_job(1, adapter=f"{name}@")) == ("a", False)


def test_a_reply_stream_that_vanished_is_made_anew_and_told(
    caller: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    assert caller.enqueue(A)[1] is True
    assert caller.enqueue(A)[1] is False
    caller.vanish()
    assert caller.enqueue(A)[1] is True
    assert told(caller) == []  # it says hello, and no more


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        (100, 200, b"200"),
        (200, 100, b"200"),
        (100, 100, b"100"),
        (100, None, b""),
        (None, 100, b""),
        (None, None, b""),
    ],
)
def test_a_job_runs_for_whoever_waits_longest(
    held: int | None, asked: int | None, expected: bytes, caller: Caller, other: Caller
) -> None:
    caller.enqueue(new_job(1, deadline=held))
    assert other.enqueue(new_job(1, deadline=asked))[0] == "j"
    assert caller.flight(A)[b"deadline"] == expected


def test_a_job_stays_where_it_is_while_the_stream_of_who_asks_next_takes_none(
    caller: Caller, other: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, priority="batch")
    first, batch = shard.stream().key, shard.stream("batch").key
    redis_client.set(first, "no stream")
    (waits,) = entries_of(redis_client, batch)
    assert other.enqueue(A) == ("j", True)
    assert entries_of(redis_client, batch) == [waits]
    assert caller.flight(A)[b"job"] == waits[0]
    redis_client.delete(first)
    assert other.enqueue(A) == ("j", False)
    ((entry, _),) = entries_of(redis_client, first)
    assert entries_of(redis_client, batch) == []
    assert caller.flight(A)[b"job"] == entry


def test_a_job_that_is_gone_does_not_come_forward(
    caller: Caller, other: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, priority="batch")
    batch = shard.stream("batch").key
    ((entry, _),) = entries_of(redis_client, batch)
    redis_client.xdel(batch, entry)
    assert other.enqueue(A) == ("j", True)
    assert queued(redis_client, shard) == []
    assert caller.flight(A)[b"job"] == entry
    assert caller.flight(A)[b"stream"] == batch.encode()


def test_a_job_is_withdrawn_when_the_last_who_waits_leaves(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, B)
    other.enqueue(A)
    assert caller.withdraw(A, B) == 1
    assert queued(redis_client, shard) == [pack_job(A)]
    assert caller.flight(A).keys() == {b"job", b"stream", b"deadline", b"c:second"}
    assert caller.withdraw(A) == 0  # not a second time
    assert other.withdraw(A) == 1
    assert queued(redis_client, shard) == []
    assert not caller.flight(A)
    assert worker.read() == []


def test_only_who_waits_can_withdraw(
    caller: Caller, other: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    assert other.withdraw(A, C) == 0
    assert len(queued(redis_client, shard)) == 1
    assert caller.flight(A)


def test_looking_after_what_is_there_under_way_and_unknown(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, B)
    worker.read(1)  # A is being computed
    put_result(redis_client, shard, C)
    assert caller.check(A, B, C, new_job(4)) == ("jjhu", False)


def test_a_flight_whose_job_is_gone_will_never_land(
    caller: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    redis_client.xtrim(shard.stream().key, maxlen=0)
    assert caller.check(A) == ("u", False)
    assert not caller.flight(A)
    assert caller.enqueue(A) == ("q", False)


def test_looking_after_renews_the_leases(
    caller: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, reply_ttl=20_000, flight_ttl=20_000)
    caller.check(A, reply_ttl=60_000, flight_ttl=60_000)
    assert redis_client.pttl(shard.reply("first")) > 30_000  # type: ignore[operator]
    assert redis_client.pttl(shard.flight(A.digest)) > 30_000  # type: ignore[operator]


def test_who_vanished_is_back_after_looking(
    caller: Caller, other: Caller, worker: Consumer
) -> None:
    other.enqueue(A)
    assert caller.check(A) == ("j", True)  # it waits from now on
    (entry,) = worker.read()
    caller.vanish()
    assert caller.check(A) == ("j", True)
    worker.complete([(A, entry, "ok", "")])
    assert told(caller) == told(other) == [(A.digest.hex(), "ok", "")]


def test_waiting_goes_on_while_the_servers_memory_is_full(
    server_binary: str, pool_name: str
) -> None:
    with RealServer() as server, server.client() as client:
        shard = shard_of_pool(pool_name)
        caller = Caller(client, shard)
        caller.enqueue(A)
        client.config_set("maxmemory", 1)
        assert caller.check(A) == ("j", False)
        assert caller.withdraw(A) == 1
