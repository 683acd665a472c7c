"""The bound of what a pool stores, and the readers that are waited for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from lmpool.keys import ShardKeys
from lmpool.result_memory import footprint, room
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.worker import result_store
from lmpool.worker.result_store import ResultStore
from tests.support.parts import Time
from tests.support.protocol import Caller, Consumer, new_job, put_result, shard_of_pool
from tests.support.server import RealServer

MB = 1 << 20


def memory(used: int, most: int = 400 * MB, uncounted: int = 0) -> dict[str, Any]:
    return {
        "maxmemory": most,
        "used_memory": used + uncounted,
        "mem_not_counted_for_evict": uncounted,
    }


def test_there_is_no_bound_where_the_server_has_none() -> None:
    assert room(memory(10**12, 0), 10**9) is None
    assert room({}, 5) is None


def test_a_reserve_stays_free() -> None:
    assert room(memory(100 * MB), 0) == 268 * MB
    assert room(memory(100 * MB, uncounted=50 * MB), 0) == 268 * MB
    assert room(memory(399 * MB), 0) == -31 * MB
    assert room(memory(0, 16 * MB), 0) == 12 * MB  # of a small server a quarter
    assert room(memory(0, 64_000 * MB), 0) == 60_000 * MB  # of a large one a sixteenth


def test_pools_on_one_server_come_to_hold_alike() -> None:
    most, others = 400 * MB, 20 * MB
    held = [300 * MB, 40 * MB, 1 * MB]
    bounds = list(held)
    for _ in range(1000):
        for pool, mine in enumerate(held):
            left = room(memory(others + sum(held)), mine)
            assert left is not None
            bounds[pool] = max(0, mine + left)
            # Each writes all the time.
            held[pool] = min(bounds[pool], mine + 2 * MB)
    assert max(held) < 1.25 * min(held)
    assert most // 2 < sum(held) < most - others


@pytest.mark.parametrize(("size", "count"), [(10, 4000), (1033, 4000), (262_154, 100)])
def test_what_a_result_takes_is_known_well_enough(
    size: int, count: int, server_binary: str, pool_name: str
) -> None:
    shard = shard_of_pool(pool_name)
    with RealServer(binary=server_binary) as server, server.client() as client:
        before: Any = client.info("memory")
        Consumer(client, shard)
        for _ in range(0, count, 50):
            digests = [os.urandom(16) for _ in range(50)]
            with client.pipeline(transaction=False) as pipeline:
                for digest in digests:
                    pipeline.set(shard.result(digest), bytes(size), px=600_000)
                pipeline.execute()
            arguments = [shard.prefix, "workers", 60_000, 50 * footprint(size), 600_000]
            arguments += ["".join(digest.hex() for digest in digests), 0]
            script("complete")(client, [shard.account], arguments)  # type: ignore[arg-type]
        after: Any = client.info("memory")
        taken = (after["used_memory"] - before["used_memory"]) / count
        assert 0.5 * footprint(size) < taken < 1.15 * footprint(size)


# --- with a server -------------------------------------------------------------------------------


EACH = 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    time.sleep = lambda seconds: setattr(time, "now", time.now + seconds)  # type: ignore[attr-defined]
    monkeypatch.setattr(result_store, "time", time)
    return time


@pytest.fixture
def shard(pool_name: str, any_server: str) -> ShardKeys:
    return shard_of_pool(pool_name)


@pytest.fixture
def store_of(any_server: str, shard: ShardKeys) -> Iterator[Callable[..., ResultStore]]:
    opened: list[Servers] = []

    def make(most: int | None, stopping: Callable[[], bool] = lambda: False) -> ResultStore:
        opened.append(Servers.of_url(any_server))
        store = ResultStore(opened[-1], (shard,), most, stopping)
        store.look()
        return store

    yield make
    for servers in opened:
        servers.close()


def write(
    store: ResultStore, client: redis.Redis, shard: ShardKeys, *numbers: int, worker: str = "w"
) -> None:
    """Store results as a worker does: what is evicted goes with them."""
    consumer = Consumer(client, shard, worker)
    entries = consumer.read()
    jobs = [new_job(number) for number in numbers]
    size = EACH * len(jobs)
    before = store.before_writing(shard, size)
    if before is not None:
        answer = before.script(client, before.keys, before.arguments)  # type: ignore[arg-type]
        store.evicted(shard, answer, size)
    for job in jobs:
        put_result(client, shard, job)
    done = [(job, entry, "ok", "") for job, entry in zip(jobs, entries, strict=False)]
    consumer.complete(done, stored=jobs, bytes_each=EACH)
    store.holds(shard, consumer.holds)


def there(client: redis.Redis, shard: ShardKeys, most: int = 40) -> list[int]:
    return [n for n in range(most) if client.exists(shard.result(new_job(n).digest))]


def test_the_bound_is_kept_by_whoever_writes(
    store_of: Callable[..., ResultStore], redis_client: redis.Redis, shard: ShardKeys, clock: Time
) -> None:
    first, second = store_of(5 * EACH), store_of(5 * EACH)
    assert first.bound(shard) == 5 * EACH
    for number in range(10):
        write((first, second)[number % 2], redis_client, shard, number)
        clock.now += 1.0  # each sees what the other has written
    assert there(redis_client, shard) == [5, 6, 7, 8, 9]
    write(first, redis_client, shard, *range(20, 28))  # more at once than the bound
    assert there(redis_client, shard) == [*range(20, 28)]


def test_without_a_bound_nothing_goes(
    store_of: Callable[..., ResultStore], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    store = store_of(None)
    assert store.bound(shard) is None
    for number in range(10):
        write(store, redis_client, shard, number)
    assert there(redis_client, shard) == [*range(10)]


def test_one_that_goes_on_reading_is_waited_for_and_one_that_does_not_for_some_seconds(
    store_of: Callable[..., ResultStore], redis_client: redis.Redis, shard: ShardKeys, clock: Time
) -> None:
    reader, sleeper = Caller(redis_client, shard, "reader"), Caller(redis_client, shard, "sleeper")
    store = store_of(4 * EACH)
    for number in range(4):
        (reader if number % 2 else sleeper).enqueue(new_job(number))
        write(store, redis_client, shard, number)
    took_off: list[float] = []
    sleep = clock.sleep  # type: ignore[attr-defined]

    def read_now_and_then(seconds: float) -> None:
        sleep(seconds)
        if clock.now - (took_off or [1000.0])[-1] > 4.0:  # less than its patience
            took_off.append(clock.now)
            redis_client.xtrim(shard.reply("reader"), maxlen=3 - len(took_off), approximate=False)

    clock.sleep = read_now_and_then  # type: ignore[attr-defined]
    write(store, redis_client, shard, 10)  # not yet known to be crowded: one chunk too many
    assert there(redis_client, shard) == [0, 1, 2, 3, 10]
    redis_client.delete(shard.result(new_job(10).digest))
    began = clock.now
    write(store, redis_client, shard, 11)
    waited = clock.now - began
    assert result_store.READER_PATIENCE <= waited < 2 * result_store.READER_PATIENCE
    left = there(redis_client, shard)
    assert 0 not in left
    assert 3 in left  # its reader is at it


def test_who_takes_nothing_is_waited_for_once(
    store_of: Callable[..., ResultStore], redis_client: redis.Redis, shard: ShardKeys, clock: Time
) -> None:
    """Its notices stay the same ones, also after minutes."""
    sleeper = Caller(redis_client, shard, "sleeper")
    store = store_of(4 * EACH)
    waits: list[float] = []
    for number in range(80):
        sleeper.enqueue(new_job(number))
        began = clock.now
        write(store, redis_client, shard, number)
        waits.append(clock.now - began)
        clock.now += 1.0
    assert 0 < sum(waits) < 2 * result_store.READER_PATIENCE


def test_few_sleepers_are_kept_in_mind(
    store_of: Callable[..., ResultStore], shard: ShardKeys
) -> None:
    store = store_of(4 * EACH)
    for number in range(2 * result_store.READERS_MOST):
        store._take(shard, [0, 0, b"sleeper %d" % number, b"1-1"])
    assert len(store._readers) == result_store.READERS_MOST


def test_nobody_waits_for_readers_where_the_bound_has_ended(
    store_of: Callable[..., ResultStore], redis_client: redis.Redis, shard: ShardKeys, clock: Time
) -> None:
    store = store_of(2 * EACH)
    caller = Caller(redis_client, shard)
    for number in range(3):
        caller.enqueue(new_job(number))
        write(store, redis_client, shard, number)

    def lift(seconds: float) -> None:  # as CONFIG SET maxmemory 0 does
        clock.now += seconds
        assert clock.now - began < 60, "it waits for ever"
        store._most = None

    began = clock.now
    clock.sleep = lift  # type: ignore[attr-defined]
    write(store, redis_client, shard, 5)
    assert there(redis_client, shard) == [0, 1, 2, 5]
    assert clock.now - began < result_store.READER_PATIENCE


def test_who_is_told_to_stop_writes_what_is_computed(
    store_of: Callable[..., ResultStore], redis_client: redis.Redis, shard: ShardKeys, clock: Time
) -> None:
    stopping: list[bool] = []
    store = store_of(2 * EACH, lambda: bool(stopping))
    caller = Caller(redis_client, shard)
    for number in range(3):
        caller.enqueue(new_job(number))
        write(store, redis_client, shard, number)
    stopping.append(True)
    write(store, redis_client, shard, 5)
    assert there(redis_client, shard) == [0, 1, 2, 5]


def test_a_server_that_hides_its_memory_has_the_bound_that_is_set(
    store_of: Callable[..., ResultStore],
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise redis.exceptions.NoPermissionError("this user has no permissions")

    for most, left in ((3 * EACH, 3), (None, 6)):
        store = store_of(most)
        monkeypatch.setattr(store._servers.anywhere, "info", refuse)
        store.look()
        for number in range(6):
            write(store, redis_client, shard, number)
        assert len(there(redis_client, shard)) == left


def test_a_full_server_gets_relief_until_nothing_is_left(
    store_of: Callable[..., ResultStore], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    store = store_of(None)
    for number in range(20):
        write(store, redis_client, shard, number)
    assert store.relieve(shard, 2 * EACH)
    assert there(redis_client, shard) == [*range(2, 20)]
    assert store.relieve(shard, 100 * EACH)
    assert there(redis_client, shard) == []
    assert not store.relieve(shard, EACH)
