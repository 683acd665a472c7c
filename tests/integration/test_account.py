"""The account of what is stored: `complete.lua` enters, `evict.lua` makes room.

Each on fakeredis and on a real server.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from lmpool.keys import ShardKeys
from lmpool.scripts import script
from lmpool.wire import Job
from tests.support.protocol import (
    COUNTERS_TTL,
    Caller,
    Consumer,
    entries_of,
    new_job,
    put_result,
    shard_of_pool,
    write_flight,
)
from tests.support.waiting import until

JOBS = [new_job(i) for i in range(12)]
EACH = 100
FOR_EVER = 3_600_000


def store(worker: Consumer, *jobs: Job) -> int:
    """Write results as one batch; the bytes that are held then."""
    entries = worker.read()
    for job in jobs:
        put_result(worker.server, worker.shard, job)
    done = [(job, entry, "ok", "") for job, entry in zip(jobs, entries, strict=False)]
    worker.complete(done, stored=jobs, bytes_each=EACH, life_ms=60_000)
    return worker.holds


def stored_long_ago(server: redis.Redis, shard: ShardKeys, *batches: list[Job]) -> None:
    """Results that are accounted, whose time is over and which have no life, as they are restored.

    Not `store` with a short life: the account of one batch ends soon behind it.
    """
    seconds, _ = server.time()  # type: ignore[misc]
    held = 0
    for number, jobs in enumerate(batches):
        for job in jobs:
            put_result(server, shard, job)
        held += EACH * len(jobs)
        digests = "".join(job.digest.hex() for job in jobs)
        fields = {"held": held, "bytes": EACH * len(jobs), "life": 1, "digests": digests}
        server.xadd(shard.account, fields, id=f"{seconds * 1000 - 60_000}-{number}")  # type: ignore[arg-type]


def evict(
    server: redis.Redis,
    shard: ShardKeys,
    bound: int,
    *given_up: Any,
    most: int = 1000,
    looks: int = 1000,
    patience: int = FOR_EVER,
) -> tuple[int, int, dict[str, str]]:
    """Bytes held, results unlinked, and what each reader has not taken."""
    held, unlinked, *readers = script("evict")(
        server,  # type: ignore[arg-type]
        [shard.account],
        [shard.prefix, COUNTERS_TTL, bound, most, looks, patience, *given_up],
    )
    names = [reader.decode() for reader in readers]
    return held, unlinked, dict(zip(names[::2], names[1::2], strict=True))


def there(server: redis.Redis, shard: ShardKeys) -> list[int]:
    """Which results are there."""
    return [i for i, job in enumerate(JOBS) if server.exists(shard.result(job.digest))]


def test_the_oldest_go_and_what_is_held_is_known(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    assert [store(worker, *JOBS[i : i + 2]) for i in range(0, 10, 2)] == [
        200, 400, 600, 800, 1000,
    ]  # fmt: skip
    assert evict(redis_client, shard, 1000) == (1000, 0, {})
    assert evict(redis_client, shard, 999) == (800, 2, {})
    assert there(redis_client, shard) == [*range(2, 10)]
    assert evict(redis_client, shard, 450) == (400, 4, {})
    assert there(redis_client, shard) == [6, 7, 8, 9]
    assert store(worker, JOBS[10]) == 500
    assert redis_client.hget(shard.counters, "evicted") == b"6"
    assert redis_client.pttl(shard.counters) > 0  # type: ignore[operator]
    assert len(entries_of(redis_client, shard.account)) == 3
    assert evict(redis_client, shard, 0) == (0, 5, {})
    assert there(redis_client, shard) == []
    assert not redis_client.exists(shard.account)
    assert store(worker, JOBS[0]) == 100


def test_one_call_does_no_more_than_it_is_told(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    for job in JOBS:
        store(worker, job)
    assert evict(redis_client, shard, 0, most=3)[:2] == (900, 3)
    assert evict(redis_client, shard, 0, looks=2)[:2] == (700, 2)
    assert there(redis_client, shard) == [*range(5, 12)]


def test_what_a_client_was_told_of_stays_until_it_has_taken_the_notice(
    caller: Caller, other: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(JOBS[0])
    store(worker, JOBS[0])
    other.enqueue(JOBS[1], JOBS[2])
    store(worker, JOBS[1], JOBS[2])
    store(worker, JOBS[3])  # nobody waits for it
    first = entries_of(redis_client, shard.reply("first"))
    second = entries_of(redis_client, shard.reply("second"))
    readers = {"first": first[0][0].decode(), "second": second[0][0].decode()}
    assert evict(redis_client, shard, 0) == (300, 1, readers)
    assert there(redis_client, shard) == [0, 1, 2]
    # The notice itself counts, not what came before it.
    redis_client.xdel(shard.reply("second"), second[0][0])
    readers["second"] = second[1][0].decode()
    assert evict(redis_client, shard, 0) == (300, 0, readers)
    redis_client.xdel(shard.reply("second"), second[1][0])
    assert evict(redis_client, shard, 0) == (100, 2, {"first": readers["first"]})
    assert there(redis_client, shard) == [0]
    caller.vanish()
    assert evict(redis_client, shard, 0) == (0, 1, {})


def test_a_notice_that_came_later_says_nothing_of_an_earlier_result(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    for job in JOBS[:2]:
        caller.enqueue(job)
        store(worker, job)
    hello, first, second = (entry for entry, _ in entries_of(redis_client, shard.reply("first")))
    redis_client.xdel(shard.reply("first"), hello, first)
    assert evict(redis_client, shard, 0) == (100, 1, {"first": second.decode()})
    assert there(redis_client, shard) == [1]


def test_who_takes_nothing_is_not_waited_for(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(JOBS[0])
    store(worker, JOBS[0])
    readers = evict(redis_client, shard, 0)[2]
    ((name, first),) = readers.items()
    assert evict(redis_client, shard, 0, name, "5-0") == (100, 0, readers)  # it took some since
    assert evict(redis_client, shard, 0, "else", first) == (100, 0, readers)
    assert evict(redis_client, shard, 0, name, first) == (0, 1, {})
    caller.enqueue(JOBS[1])
    store(worker, JOBS[1])
    assert evict(redis_client, shard, 0)[:2] == (100, 0)
    time.sleep(0.01)
    assert evict(redis_client, shard, 0, patience=1) == (0, 1, {})  # too long ago for anybody


def test_what_ended_by_itself_leaves_the_account_and_what_was_stored_again_stays(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    stored_long_ago(redis_client, shard, JOBS[:1], JOBS[1:2])
    store(worker, JOBS[2])
    for job in JOBS[:2]:  # as if computed again just now
        redis_client.pexpire(shard.result(job.digest), FOR_EVER)
    assert evict(redis_client, shard, 300) == (100, 0, {})
    assert there(redis_client, shard) == [0, 1, 2]
    assert redis_client.hget(shard.counters, "evicted") is None


def test_what_was_restored_without_its_life_gets_one_as_it_is_over(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """Or it would stay for ever, and nobody would count it."""
    stored_long_ago(redis_client, shard, JOBS[:2], JOBS[2:4], JOBS[4:6])
    redis_client.pexpire(shard.result(JOBS[1].digest), FOR_EVER)  # it was stored again
    assert store(worker, JOBS[6]) == 700
    # No more at once than is told.
    assert [evict(redis_client, shard, 700, most=2)[0] for _ in range(4)] == [500, 300, 100, 100]
    until(lambda: there(redis_client, shard) == [1, 6])
    assert redis_client.pttl(shard.result(JOBS[6].digest)) == -1  # its time is not over


def test_the_sum_survives_the_newest_entry(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(JOBS[0])
    store(worker, JOBS[0])
    for number in range(1, 6):
        store(worker, JOBS[number])
        # The first, which is waited for, stays, and all behind it go: the newest, too.
        assert evict(redis_client, shard, 0)[:2] == (100, 1)
    assert len(entries_of(redis_client, shard.account)) == 2  # the first, and the sum
    assert store(worker, JOBS[6], JOBS[7]) == 300
    assert len(entries_of(redis_client, shard.account)) == 2
    assert evict(redis_client, shard, 300) == (300, 0, {})


def test_nothing_stored_is_not_entered(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(JOBS[0])
    (entry,) = worker.read()
    worker.complete([(JOBS[0], entry, "failed", "why")])
    assert worker.holds == 0
    assert not redis_client.exists(shard.account)


@pytest.mark.parametrize("lost", ["account", "sum", "number", "string"])
def test_the_sum_is_that_of_the_account_whatever_is_lost(
    lost: str, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    for job in JOBS[:3]:
        store(worker, job)
    assert redis_client.get(shard.held) == b"300"
    if lost == "account":
        redis_client.delete(shard.account)
    elif lost == "number":
        redis_client.set(shard.held, "no number")
    else:
        redis_client.delete(shard.held)
    if lost == "string":
        redis_client.hset(shard.held, "a", "b")
    left = 0 if lost == "account" else 300
    assert store(worker, JOBS[3]) == left + 100
    assert store(worker, JOBS[4]) == left + 200
    newest = entries_of(redis_client, shard.account)[-1][1]
    assert int(newest[b"held"]) == left + 200
    assert 0 < redis_client.pttl(shard.held) <= 60_000  # type: ignore[operator]


def test_a_sum_that_is_wrong_is_right_again_after_a_look(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    store(worker, JOBS[0])
    redis_client.set(shard.held, 7_000)
    assert evict(redis_client, shard, 1000) == (100, 0, {})
    assert store(worker, JOBS[1]) == 200


def test_a_sum_that_is_wrong_in_the_account_is_right_once_all_of_it_was_looked_at(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """Or what is stored would go at once, from then on, however much room there is."""
    store(worker, JOBS[0])
    redis_client.set(shard.held, 10**15)
    store(worker, JOBS[1])
    assert evict(redis_client, shard, 1000) == (0, 2, {})
    assert store(worker, JOBS[2]) == EACH
    # What is waited for stays.
    caller = Caller(redis_client, shard)
    caller.enqueue(JOBS[3])
    redis_client.set(shard.held, 10**15)
    store(worker, JOBS[3])
    held, unlinked, readers = evict(redis_client, shard, 1000)
    assert (held, unlinked, [*readers]) == (EACH, 1, [caller.id])
    assert evict(redis_client, shard, 1000) == (EACH, 0, {})
    assert there(redis_client, shard) == [3]


def test_a_sum_is_known_where_it_is_by_chance_what_the_newest_entry_said(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """That entry goes, and with it what it said."""
    caller = Caller(redis_client, shard)
    caller.enqueue(JOBS[0])
    store(worker, JOBS[0])  # awaited
    ((_, fields),) = entries_of(redis_client, shard.account)
    redis_client.delete(shard.account)
    another: Any = {"held": EACH, "bytes": 7, "life": 60_000, "digests": JOBS[1].digest.hex()}
    for entry in (fields | {b"held": 10**15}, another):
        redis_client.xadd(shard.account, entry)
    assert evict(redis_client, shard, EACH - 1)[0] == EACH
    assert store(worker, JOBS[2]) == 2 * EACH


@pytest.mark.parametrize("damage", ["string", "hash"])
def test_a_damaged_account_is_begun_anew(
    damage: str, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    def spoil() -> None:
        redis_client.delete(shard.account)
        if damage == "string":
            redis_client.set(shard.account, "x")
        else:
            redis_client.hset(shard.account, "a", "b")

    spoil()
    assert evict(redis_client, shard, 0) == (0, 0, {})
    spoil()
    assert store(worker, JOBS[0]) == 100
    assert evict(redis_client, shard, 0) == (0, 1, {})


def test_a_reply_key_that_is_no_stream_is_not_waited_for(
    caller: Caller, worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller.enqueue(JOBS[0])
    store(worker, JOBS[0])
    redis_client.delete(shard.reply("first"))
    redis_client.hset(shard.reply("first"), "a", "b")
    assert evict(redis_client, shard, 0) == (0, 1, {})


def test_more_clients_than_a_script_may_name_are_told_all_the_same(
    worker: Consumer, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    callers = [Caller(redis_client, shard, f"client-{i}") for i in range(4200)]
    callers[0].enqueue(JOBS[0])
    with redis_client.pipeline(transaction=False) as pipeline:
        for one in callers:
            pipeline.xadd(shard.reply(one.id), {"hello": "1"})
        pipeline.execute()
    ((entry, _),) = entries_of(redis_client, worker.stream)
    write_flight(redis_client, shard, JOBS[0], entry.decode(), *(one.id for one in callers))
    store(worker, JOBS[0])
    assert all(len(one.notices()) == 1 for one in (callers[0], callers[4199]))
    assert evict(redis_client, shard, 0)[:2] == (100, 0)


def test_room_is_made_where_the_servers_memory_is_full(
    server_url: str, redis_client: redis.Redis, pool_name: str
) -> None:
    shard = shard_of_pool(pool_name)
    worker = Consumer(redis_client, shard)
    stored_long_ago(redis_client, shard, JOBS[8:9])
    store(worker, *JOBS[:4])
    store(worker, *JOBS[4:8])
    redis_client.config_set("maxmemory", 1)
    try:
        assert evict(redis_client, shard, 800) == (800, 0, {})  # only what ended by itself
        assert evict(redis_client, shard, 800) == (800, 0, {})
        assert evict(redis_client, shard, 400) == (400, 4, {})
    finally:
        redis_client.config_set("maxmemory", 0)
    assert evict(redis_client, shard, 400) == (400, 0, {})
    until(lambda: there(redis_client, shard) == [4, 5, 6, 7])
