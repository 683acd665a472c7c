"""The scripts that workers call: complete, admit, release, leave, replace.

Each on fakeredis and on a real server.
"""

from __future__ import annotations

import random

import pytest
import redis

from lmpool.keys import PoolKeys, ShardKeys
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.wire import Job, pack_job, unpack_job
from lmpool.worker.carrying import carry_over
from lmpool.worker.homes import Homes
from lmpool.worker.mending import mend
from tests.support.parts import info_of
from tests.support.protocol import (
    Caller,
    Consumer,
    entries_of,
    new_job,
    put_result,
    queued,
    told,
    write_flight,
)

A, B, C = new_job(1), new_job(2), new_job(3)


@pytest.mark.parametrize("stored", [(), (A, B), (A, B, C)])
def test_everybody_who_waits_is_told_once_with_all_that_is_theirs(
    stored: tuple[Job, ...],
    caller: Caller,
    other: Caller,
    worker: Consumer,
    redis_client: redis.Redis,
    shard: ShardKeys,
) -> None:
    caller.enqueue(A, B)
    other.enqueue(B, C)
    entries = worker.read()
    done = [(job, entry, "ok", "") for job, entry in zip((A, B, C), entries, strict=True)]
    assert worker.complete(done, [("computed", 3), ("batches", 1)], stored) == 3
    assert told(caller) == [(A.digest.hex(), "ok", ""), (B.digest.hex(), "ok", "")]
    assert told(other) == [(B.digest.hex(), "ok", ""), (C.digest.hex(), "ok", "")]
    assert len(entries_of(redis_client, shard.reply("first"))) == 2  # hello, and one notice
    assert not any(caller.flight(job) for job in (A, B, C))
    assert worker.held() == []
    assert queued(redis_client, shard) == []
    assert redis_client.hgetall(shard.counters) == {b"computed": b"3", b"batches": b"1"}
    assert redis_client.pttl(shard.counters) > 0  # type: ignore[operator]


def test_what_was_delivered_twice_is_told_once(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, B)
    redis_client.xadd(worker.stream, {"job": pack_job(A)})
    first, second, third = worker.read()
    done = [(A, first, "ok", ""), (B, second, "ok", ""), (A, third, "ok", "")]
    assert worker.complete(done, stored=(A, B)) == 3
    assert told(caller) == [(A.digest.hex(), "ok", ""), (B.digest.hex(), "ok", "")]
    assert worker.held() == []
    assert queued(redis_client, shard) == []


@pytest.mark.parametrize("completes", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_each_job_of_a_batch_is_judged_and_told_of_by_its_own_flight(
    seed: int, completes: bool, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    rng = random.Random(seed)
    callers = [Caller(redis_client, shard, name) for name in ("first", "second", "third")]
    jobs = [new_job(1, n, deadline=rng.choice([None, 2**50])) for n in range(30)]
    waiting = {job: rng.choice([callers[:1], callers[:2], callers[1:], callers]) for job in jobs}
    for caller in callers:
        caller.enqueue(*(job for job in jobs if caller in waiting[job]))
    found = entries_of(redis_client, worker.stream)
    entries = {unpack_job(fields[b"job"]).digest: entry for entry, fields in found}
    worker.read()
    gone, broken, replaced = jobs[:3], jobs[3:6], jobs[6:9]
    for job in gone:
        redis_client.delete(shard.flight(job.digest))
    for job in broken:
        redis_client.set(shard.flight(job.digest), "1-1 no flight")
    for job in replaced:
        write_flight(redis_client, shard, job, "1-1", *(caller.id for caller in waiting[job]))
    rng.shuffle(jobs)
    if completes:
        done = [(job, entries[job.digest], "ok", "") for job in jobs]
        done += [(job, b"9-%d" % n, "ok", "") for n, job in enumerate(jobs[:5])]  # run twice
        rng.shuffle(done)
        worker.complete(done, stored=jobs)
        for caller in callers:
            mine = {j.digest.hex() for j in jobs if caller in waiting[j]}
            mine -= {job.digest.hex() for job in gone + broken}
            assert sorted(told(caller)) == [(digest, "ok", "") for digest in sorted(mine)]
        assert not any(redis_client.exists(shard.flight(job.digest)) for job in jobs)
        assert worker.held() == []
    else:
        dropped = {job.digest for job in gone + broken + replaced}
        expected = "".join("w" if job.digest in dropped else "r" for job in jobs)
        assert worker.admit(*((job, entries[job.digest]) for job in jobs)) == expected
        assert len(worker.held()) == expected.count("r")


def test_an_error_is_told_to_everybody_who_waits(
    caller: Caller, other: Caller, worker: Consumer
) -> None:
    caller.enqueue(A, B)
    other.enqueue(A)
    first, second = worker.read()
    worker.complete([(A, first, "failed", "too\r\nodd ü"), (B, second, "ok", "")])
    assert told(caller) == [
        (A.digest.hex(), "failed", "too\r\nodd ü"),
        (B.digest.hex(), "ok", ""),
    ]
    assert told(other) == [(A.digest.hex(), "failed", "too\r\nodd ü")]
    assert not caller.flight(A)
    assert worker.held() == []


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_no_reply_stream_is_made_for_a_client_that_vanished(
    status: str,
    caller: Caller,
    other: Caller,
    worker: Consumer,
    redis_client: redis.Redis,
    shard: ShardKeys,
) -> None:
    caller.enqueue(A)
    other.enqueue(A)
    caller.vanish()
    (entry,) = worker.read()
    worker.complete([(A, entry, status, "")])
    assert not redis_client.exists(shard.reply("first"))
    assert [notice[1] for notice in told(other)] == [status]


def test_the_error_of_an_old_delivery_does_not_fail_the_job_that_is_queued_now(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    (old,) = worker.read()
    caller.withdraw(A)
    other.enqueue(A)
    assert worker.complete([(A, old, "failed", "out of date")]) == 1
    assert told(other) == []
    assert b"c:second" in other.flight(A)
    assert len(queued(redis_client, shard)) == 1
    (new,) = worker.read()
    worker.complete([(A, new, "failed", "in earnest")])
    assert told(other) == [(A.digest.hex(), "failed", "in earnest")]


def test_the_row_of_an_old_delivery_is_as_good_as_the_new(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    (old,) = worker.read()
    caller.withdraw(A)
    other.enqueue(A)
    assert worker.complete([(A, old, "ok", "")]) == 2
    assert told(other) == [(A.digest.hex(), "ok", "")]
    assert queued(redis_client, shard) == []  # the second is not run
    assert worker.held() == []


def test_completing_twice_tells_once(caller: Caller, worker: Consumer) -> None:
    caller.enqueue(A)
    (entry,) = worker.read()
    worker.complete([(A, entry, "ok", "")])
    worker.complete([(A, entry, "ok", "")])
    assert len(told(caller)) == 1


def test_a_large_batch_is_completed_whole(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    jobs = [new_job(i, 1) for i in range(2500)]
    for i in range(0, len(jobs), 500):
        caller.enqueue(*jobs[i : i + 500], bound=10_000)
    entries = worker.read(10_000)
    done = [(job, entry, "ok", "") for job, entry in zip(jobs, entries, strict=True)]
    assert worker.complete(done) == 2500
    assert len(told(caller)) == 2500
    assert worker.held() == []
    assert queued(redis_client, shard) == []


def test_a_job_is_run_where_somebody_waits_and_its_row_is_not_there(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, B)
    first, second = worker.read()
    put_result(redis_client, shard, B)
    assert worker.admit((A, first), (B, second)) == "rx"
    # Both are still to be completed: the row of the second is only announced.
    assert worker.held() == [first, second]
    assert caller.flight(B)


def test_a_withdrawn_job_is_dropped(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    (entry,) = worker.read()
    caller.withdraw(A)
    assert worker.admit((A, entry)) == "w"
    assert worker.held() == []
    assert queued(redis_client, shard) == []


def test_a_job_that_only_the_vanished_wait_for_is_dropped(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, B)
    other.enqueue(B)
    first, second = worker.read()
    caller.vanish()
    assert worker.admit((A, first), (B, second)) == "wr"
    assert not caller.flight(A)
    assert caller.flight(B)
    assert worker.held() == [second]
    assert len(queued(redis_client, shard)) == 1
    assert not redis_client.exists(shard.reply("first"))


def test_a_delivery_that_was_replaced_is_dropped_and_the_new_one_kept(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    (old,) = worker.read()
    caller.withdraw(A)
    other.enqueue(A)
    assert worker.admit((A, old)) == "w"
    assert b"c:second" in other.flight(A)
    assert len(queued(redis_client, shard)) == 1


def test_an_expired_job_is_dropped_and_everybody_told(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(new_job(1, deadline=1), new_job(2, deadline=1), new_job(3, deadline=2**52))
    other.enqueue(new_job(1, deadline=2), B)  # B without a deadline
    entries = worker.read()
    assert worker.admit(*zip((A, B, C), entries, strict=True)) == "err"
    for each in (caller, other):
        assert told(each) == [(A.digest.hex(), "expired", "")]
    assert not caller.flight(A)
    assert worker.held() == entries[1:]
    assert len(queued(redis_client, shard)) == 2
    assert redis_client.hgetall(shard.counters) == {b"expired": b"1"}
    assert redis_client.pttl(shard.counters) > 0  # type: ignore[operator]


def test_a_job_given_back_is_the_same_flight(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A, B, C)
    first, second = worker.read(2)
    assert worker.release((A, first), (B, second)) == 2
    assert worker.held() == []
    assert queued(redis_client, shard) == [pack_job(C), pack_job(A), pack_job(B)]
    assert other.enqueue(A) == ("j", True)
    # Somebody else runs it, and everybody is told.
    colleague = Consumer(redis_client, shard, "colleague")
    third, again, _ = colleague.read()
    assert caller.flight(A)[b"job"] == again
    assert colleague.admit((A, again), (C, third)) == "rr"
    colleague.complete([(A, again, "failed", "why")])
    assert told(caller) == told(other) == [(A.digest.hex(), "failed", "why")]
    assert caller.check(B, C) == ("jj", False)


def test_what_was_withdrawn_is_not_given_back(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    (entry,) = worker.read()
    caller.withdraw(A)
    assert worker.release((A, entry)) == 0
    assert worker.held() == []
    assert queued(redis_client, shard) == []
    assert not caller.flight(A)


def test_an_old_delivery_given_back_does_not_take_the_flight(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(A)
    (entry,) = worker.read()
    write_flight(redis_client, shard, A, "9-9", caller.id)
    assert worker.release((A, entry)) == 1
    assert caller.flight(A)[b"job"] == b"9-9"


def test_entries_that_are_no_jobs_can_be_given_back(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    redis_client.xadd(shard.stream().key, {"x": b"\0\xff", "y": "2"})
    (entry,) = worker.read()
    assert worker.release((None, entry)) == 1
    ((again, fields),) = entries_of(redis_client, shard.stream().key)
    assert again != entry
    assert fields == {b"x": b"\0\xff", b"y": b"2"}


def test_a_worker_that_leaves_is_forgotten_unless_it_holds_jobs(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    redis_client.set(shard.alive("worker"), b"")
    caller.enqueue(A)
    (entry,) = worker.read()
    assert worker.leave() == 0
    assert worker.is_there()
    assert worker.held() == [entry]
    assert not redis_client.exists(shard.alive("worker"))
    worker.complete([(A, entry, "ok", "")])
    assert worker.leave() == 1
    assert not worker.is_there()


def test_a_key_is_replaced_only_if_it_holds_what_was_read(
    redis_client: redis.Redis, pool_name: str, any_server: str
) -> None:
    def replace(read: bytes, write: bytes) -> int:
        answer: int = script("replace")(redis_client, [pool_name], [read, write])  # type: ignore[arg-type]
        return answer

    assert replace(b"", b"first") == 1
    assert replace(b"", b"second") == 0
    assert replace(b"other", b"second") == 0
    assert redis_client.get(pool_name) == b"first"
    assert replace(b"first", b"\0\xff") == 1
    assert replace(b"\0\xff", b"third") == 1
    redis_client.delete(pool_name)


def test_dead_letters_stay_where_they_are_until_their_stream_is_mended(
    redis_client: redis.Redis, pool_name: str
) -> None:
    info = info_of(2).moved_to(1, 1)
    (heir,) = info.shard_keys(PoolKeys(pool_name))
    _, left = info.left_shards(PoolKeys(pool_name))
    servers = Servers(lambda: redis_client)  # type: ignore[arg-type,return-value]
    redis_client.hset(left.counters, "failed", "1")
    redis_client.xadd(left.dead, {"job": "x", "reason": "y"})
    redis_client.set(heir.dead, "no stream")
    for _ in range(2):
        with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
            carry_over(servers, left, info, [heir])
    assert len(entries_of(redis_client, left.dead)) == 1
    assert heir.dead in mend(servers, [heir], info, Homes([heir], "me"), set())
    for _ in range(2):
        carry_over(servers, left, info, [heir])
    assert [fields[b"reason"] for _, fields in entries_of(redis_client, heir.dead)] == [b"y"]
    assert redis_client.hgetall(heir.counters) == {b"failed": b"1"}
    assert entries_of(redis_client, left.dead) == []
