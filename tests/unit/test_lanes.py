"""Lanes: who reads which, who is called, and what idle workers take of others' lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from lmpool.affinity import LANES_PER_WORKER, lanes_in_use, own_lanes
from lmpool.keys import GROUP, ShardKeys
from lmpool.scripts import script
from lmpool.server import open_server
from lmpool.servers import Servers
from lmpool.wants import Digester
from lmpool.wire import Job, claim_head, pack_job
from lmpool.worker import intake as intake_module
from lmpool.worker import stealing
from lmpool.worker.batching import Batcher
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.homes import Homes
from lmpool.worker.intake import Intake, create_groups
from lmpool.worker.status import WorkerStatus
from tests.support.protocol import FINGERPRINT, Caller, Consumer, new_job, shard_of_pool
from tests.support.waiting import until

LANES = 8
HOUR_MS = 3_600_000


class Worker:
    """A worker's intake on a thread of its own; its engine is whoever calls `take`."""

    def __init__(
        self,
        url: str,
        shard: ShardKeys,
        name: str,
        workers: list[str],
        batch_size: int = 8,
        patience: float | None = None,
        beside: Sequence[ShardKeys] = (),
    ) -> None:
        shards = [shard, *beside]
        self.server: Any = open_server(url, blocks_for=1.0)
        self.servers = Servers(lambda: self.server)
        self.status = WorkerStatus({}, lambda: None)
        if patience is not None:
            self.status.patience = lambda: patience  # type: ignore[method-assign]
        self.homes = Homes(shards, name)
        for each in shards:
            self.homes.update(each, b"-1", LANES, workers)
        self.batcher = Batcher(batch_size, 0.001, 100_000)
        create_groups(self.servers, shards, name)
        self.intake = Intake(
            self.servers,
            shards,
            name,
            self.batcher,
            self.status,
            Digester(FINGERPRINT),
            DeadLetters(self.servers, name),
            continuous=False,
            homes=self.homes,
        )
        self._turns = 0
        self._turn = self.intake._turn
        self.intake._turn = self._counted_turn  # type: ignore[method-assign]
        self.failures: list[BaseException] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.intake.run()
        except BaseException as error:
            self.failures.append(error)

    def _counted_turn(self) -> None:
        self._turns += 1
        self._turn()

    def be_busy(self, seconds: float = 600.0) -> None:
        """As if its engine were at work, for long. No read is under way any more."""
        self.status.batch_seconds = seconds
        with self.batcher.changed:
            self.batcher.busy, self.batcher.busy_since = True, time.monotonic()
            self.batcher.changed.notify_all()
        seen = self._turns
        until(lambda: self._turns > seen, what="it to see that its engine is at work")

    def jobs(self) -> list[Job]:
        """What it has, taken."""
        taken = [delivery.job for delivery in self.batcher.take()]
        self.batcher.done()
        return taken

    def stop(self) -> None:
        self.status.stopping.set()
        self.batcher.wake()
        self.thread.join(60)
        self.servers.close()
        assert not self.failures, self.failures


@pytest.fixture
def shard(pool_name: str, redis_client: redis.Redis) -> ShardKeys:
    shard = shard_of_pool(pool_name, lanes=LANES)
    redis_client.hset(shard.bounds, "used", LANES)
    return shard


@pytest.fixture
def start(
    any_server: str, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(intake_module, "IDLE_BLOCK_MS", 50)
    workers: list[Worker] = []

    def start(name: str, others: list[str], **options: Any) -> Worker:
        workers.append(Worker(any_server, shard, name, [name, *others], **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


def lane_of(worker: str, workers: list[str], place: int = 0) -> int:
    return own_lanes(worker, workers, 0, LANES)[place]


# --- scripts -------------------------------------------------------------------------------------


def test_jobs_of_many_lanes_are_claimed_completed_and_given_back_in_one_call(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    jobs = [new_job(n) for n in range(3)]
    streams = [shard.stream(lane=lane).key for lane in (5, 2, 7)]
    arguments: list[Any] = [shard.prefix, "client", 30_000, 60_000, 100, GROUP, 1, LANES]
    heads = [claim_head(j.digest, n, 0, None) for j, n in zip(jobs, (5, 2, 7), strict=True)]
    arguments += ("".join(heads), 0, b"job", b"job", b"job")
    first = [shard.stream().key]
    assert script("enqueue")(redis_client, first, arguments) == [b"qqq", 1]  # type: ignore[arg-type]
    for job, stream in zip(jobs, streams, strict=True):
        ((entry, _),) = redis_client.xrange(stream)  # type: ignore[misc]
        assert caller.flight(job)[b"stream"] == stream.encode()
        assert caller.flight(job)[b"job"] == entry
    index: Any = redis_client.zrange(shard.waiting, 0, -1)
    assert set(index) == {b"5", b"2", b"7"}
    consumers = [Consumer(redis_client, shard, lane=lane) for lane in (5, 2, 7)]
    entries = [consumer.read()[0] for consumer in consumers]
    given_back = [shard.prefix, GROUP, LANES]
    judged = [shard.prefix, GROUP, 60_000]
    for job, entry in zip(jobs, entries, strict=True):
        given_back += (1, job.digest.hex(), entry)
        judged += (1, job.digest.hex(), entry)
    assert script("admit")(redis_client, streams, judged) == b"rrr"  # type: ignore[arg-type]
    assert script("release")(redis_client, streams, given_back) == 3  # type: ignore[arg-type]
    again = [consumer.read()[0] for consumer in consumers]
    assert all(new != old for new, old in zip(again, entries, strict=True))
    done: list[Any] = [shard.prefix, GROUP, 60_000, 0, 60_000, "", 0]
    for job, entry in zip(jobs, again, strict=True):
        done += (0, 1, job.digest.hex(), entry, "ok", "")
    assert script("complete")(redis_client, [shard.account, *streams], done) == [3, 0]  # type: ignore[arg-type]
    assert {notice.digest for notice in caller.notices()} == {job.digest for job in jobs}
    assert not any(redis_client.xlen(stream) for stream in streams)
    assert not any(consumer.held() for consumer in consumers)


def test_the_bound_is_that_of_all_lanes(redis_client: redis.Redis, shard: ShardKeys) -> None:
    caller = Caller(redis_client, shard)
    bound = 4 * LANES
    # One lane may have all of it.
    jobs = [new_job(n) for n in range(bound + 2)]
    assert caller.enqueue(*jobs, bound=bound, lane=1)[0] == "q" * bound + "ff"
    # Another one has its share all the same, and no more.
    others = [new_job(1, n) for n in range(6)]
    assert caller.enqueue(*others, bound=bound, lane=3)[0] == "qqqqff"
    # Of priority batch the bound is its own.
    batch = [new_job(2, n) for n in range(6)]
    assert caller.enqueue(*batch, bound=bound, lane=3, priority="batch")[0] == "q" * 6


def test_an_idle_worker_is_called_once_until_somebody_has_looked(
    redis_client: redis.Redis, shard: ShardKeys, pool_name: str
) -> None:
    caller = Caller(redis_client, shard)
    for n in range(5):
        caller.enqueue(new_job(n), lane=n)
    assert redis_client.xlen(shard.wake) == 1
    one = Caller(redis_client, shard_of_pool(f"{pool_name}-one"))
    one.enqueue(new_job(1))  # a shard of one lane calls nobody
    assert not redis_client.exists(one.shard.wake, one.shard.waiting)


def look(
    server: redis.Redis, shard: ShardKeys, patience_ms: int, *calls: bytes, does: str = "on"
) -> Any:
    arguments = [shard.prefix, GROUP, "me", patience_ms, does, shard.lanes, *calls]
    return script("waiting")(server, [shard.waiting, shard.wake], arguments)  # type: ignore[arg-type]


def test_a_lane_is_anyones_once_it_has_waited(redis_client: redis.Redis, shard: ShardKeys) -> None:
    caller = Caller(redis_client, shard)
    for lane in (3, 6):
        Consumer(redis_client, shard, "home", lane=lane)
    caller.enqueue(new_job(1), lane=3)
    (soonest,) = look(redis_client, shard, HOUR_MS)
    assert 0 < soonest <= HOUR_MS
    until(lambda: look(redis_client, shard, 20)[1:2] == [b"3"])
    for number in (1, 2):
        entry = {"job": pack_job(new_job(2, number))}
        redis_client.xadd(shard.stream(lane=6).key, entry, id=f"1-{number}")
    redis_client.zadd(shard.waiting, {"6": 1})
    soonest, name, since, jobs = look(redis_client, shard, HOUR_MS)
    assert (name, jobs) == (b"6", 2)
    assert since >= HOUR_MS
    assert 0 < soonest <= HOUR_MS


def test_what_was_read_leaves_the_index_when_it_is_looked_at(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, home = Caller(redis_client, shard), Consumer(redis_client, shard, "home", lane=3)
    caller.enqueue(new_job(1), lane=3)
    assert len(home.read()) == 1
    assert redis_client.zcard(shard.waiting) == 1
    assert look(redis_client, shard, 0) == [-1]
    assert redis_client.zcard(shard.waiting) == 0
    # What came since is as old as it is, not as what was there before it.
    home = Consumer(redis_client, shard, "home", lane=4)
    redis_client.xadd(shard.stream(lane=4).key, {"job": pack_job(new_job(2))}, id="1-1")
    redis_client.zadd(shard.waiting, {"4": 1})
    assert len(home.read()) == 1
    caller.enqueue(new_job(3), lane=4)
    assert redis_client.zscore(shard.waiting, "4") == 1
    (soonest,) = look(redis_client, shard, HOUR_MS)
    assert soonest > 0


def test_lanes_that_a_shard_has_no_more_wait_for_nobody(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    Consumer(redis_client, shard, "home", lane=6)
    caller.enqueue(new_job(1), lane=6)
    redis_client.delete(shard.wake)
    assert look(redis_client, ShardKeys(shard.prefix, 0, 4), 0) == [-1]
    assert not redis_client.exists(shard.waiting, shard.wake)


@pytest.mark.parametrize("what", ["type", "names", "flood"])
def test_an_index_that_others_wrote_does_no_harm(
    what: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    if what == "type":
        redis_client.set(shard.waiting, "nonsense")
    elif what == "names":
        redis_client.zadd(shard.waiting, {"x": 1, "b": 2, "-3": 3, "99999999": 4, "7": 5})
    else:
        redis_client.zadd(shard.waiting, {str(n): n for n in range(10_000)})
    assert look(redis_client, shard, 0) == [-1]
    assert not redis_client.exists(shard.waiting)
    Caller(redis_client, shard).enqueue(new_job(1), lane=3)
    assert redis_client.zrange(shard.waiting, 0, -1) == [b"3"]


@pytest.mark.parametrize("said", ["9e15", "inf", "an hour"])
def test_a_lane_that_is_dated_in_the_future_waits_since_it_is_looked_at(
    said: str, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    Consumer(redis_client, shard, "home", lane=3)
    job = {"job": pack_job(new_job(5))}
    hour = round(1000 * (time.time() + 3600))
    if said == "an hour":  # the server's clock was set back: its entries are dated so, too
        redis_client.xadd(shard.stream(lane=3).key, job, id=f"{hour}-0")
    else:
        redis_client.xadd(shard.stream(lane=3).key, job)
    redis_client.zadd(shard.waiting, {"3": hour if said == "an hour" else float(said)})
    found = until(lambda: look(redis_client, shard, 100)[1:])
    assert (found[0], found[2]) == (b"3", 1)


def test_who_only_lists_the_lanes_calls_nobody(redis_client: redis.Redis, shard: ShardKeys) -> None:
    Consumer(redis_client, shard, "home", lane=3)
    Caller(redis_client, shard).enqueue(new_job(1), lane=3)
    called = redis_client.xrange(shard.wake)
    assert len(called) == 1  # type: ignore[arg-type]
    for _ in range(3):
        assert look(redis_client, shard, 0, does="list")[1] == b"3"
    assert redis_client.xrange(shard.wake) == called


def test_calls_are_followed_passed_on_and_forgotten(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    for key in shard.groups:
        redis_client.xgroup_create(key, GROUP, id="0", mkstream=True)

    def calls() -> list[bytes]:
        found: Any = redis_client.xrange(shard.wake)
        return [entry for entry, _ in found]

    def heard() -> bytes:
        ((_, ((entry, _),)),) = redis_client.xreadgroup(GROUP, "me", {shard.wake: ">"})  # type: ignore[misc]
        return bytes(entry)

    caller.enqueue(new_job(1), lane=3)
    call = heard()
    look(redis_client, shard, 60_000, call)
    assert calls() == [call]  # followed: nobody else is called
    look(redis_client, shard, 60_000, call, does="pass")
    assert len(calls()) == 1  # another is called in its place
    assert calls() != [call]
    call = heard()
    assert len(look(redis_client, shard, 0, call)) == 4
    passed = heard()  # whoever takes them is idle no more
    Consumer(redis_client, shard, "me", lane=3).read()
    assert look(redis_client, shard, 0, passed) == [-1]
    assert calls() == [passed]  # more may come at once
    assert look(redis_client, shard, 0, passed, does="end") == [-1]
    assert calls() == []
    assert redis_client.xpending(shard.wake, GROUP)["pending"] == 0


def test_a_shard_knows_its_workers(redis_client: redis.Redis, shard: ShardKeys) -> None:
    def beat(name: str, known: bytes = b"", life: int = HOUR_MS) -> list[bytes]:
        keys = [shard.stream().key, shard.alive(name), shard.steady, shard.workers, shard.bounds]
        arguments = [GROUP, name, "beat", life, life, known, 1000, LANES_PER_WORKER, HOUR_MS]
        found: Any = script("alive")(redis_client, keys, arguments)  # type: ignore[arg-type]
        living = int(redis_client.zcount(shard.workers, 0, "+inf"))  # type: ignore[arg-type]
        used = found.pop(1)
        assert used == lanes_in_use(living, 1000)
        assert int(redis_client.hget(shard.bounds, "used")) == used  # type: ignore[arg-type]
        assert redis_client.pttl(shard.bounds) > 0  # type: ignore[operator]
        return list(found)

    first, *workers = beat("a")
    assert workers == [b"a"]
    assert beat("a", first) == [first]  # nothing has changed
    second, *workers = beat("b", first)
    assert second != first
    assert sorted(workers) == [b"a", b"b"]
    assert sorted(beat("a", first)[1:]) == [b"a", b"b"]
    # One whose life ends is gone, and so is one that leaves.
    third, *workers = beat("c", second, life=60_000)
    assert len(workers) == 3
    redis_client.zincrby(shard.workers, -60_000, "c")  # as if so much time had passed
    fourth, *workers = beat("a", third)
    assert sorted(workers) == [b"a", b"b"]
    Consumer(redis_client, shard, "b").leave()
    assert beat("a", fourth)[1:] == [b"a"]
    redis_client.set(shard.workers, "nonsense")
    assert beat("a")[1:] == [b"a"]
    for n in range(70):
        beat(f"w{n}")


def test_no_change_of_workers_is_taken_for_one_before_all_was_lost(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    def beat(name: str, known: bytes = b"") -> list[bytes]:
        keys = [shard.stream().key, shard.alive(name), shard.steady, shard.workers, shard.bounds]
        arguments = [GROUP, name, "beat", HOUR_MS, HOUR_MS, known, 1000, LANES_PER_WORKER, HOUR_MS]
        found: Any = script("alive")(redis_client, keys, arguments)  # type: ignore[arg-type]
        return [found[0], *sorted(found[2:])]

    beat("a")
    known, *workers = beat("b")
    assert workers == [b"a", b"b"]
    server_ms = time.time_ns() // 1_000_000
    redis_client.delete(shard.workers)
    until(lambda: time.time_ns() // 1_000_000 > server_ms + 100, what="the clock to go on")
    beat("c")  # in place of b
    assert beat("a", known)[1:] == [b"a", b"c"]


def test_lanes_that_are_not_in_use_are_others(redis_client: redis.Redis, shard: ShardKeys) -> None:
    caller = Caller(redis_client, shard)
    redis_client.hset(shard.bounds, "used", 4)
    assert caller.enqueue(new_job(1), new_job(2), lane=6)[0] == "qq"
    assert caller.enqueue(new_job(3), lane=1)[0] == "q"
    assert [redis_client.xlen(shard.stream(lane=n).key) for n in range(LANES)] == [
        0,
        1,
        2,
        *[0] * 5,
    ]
    # One lane needs no index, and where no worker has said a number it is the first.
    redis_client.delete(shard.waiting, shard.wake)
    redis_client.hdel(shard.bounds, "used")
    assert caller.enqueue(new_job(4), lane=7)[0] == "q"
    assert redis_client.xlen(shard.stream().key) == 1
    assert not redis_client.exists(shard.waiting, shard.wake)


def test_what_was_left_in_a_lane_that_is_not_in_use_any_more_is_run(
    start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    Caller(redis_client, shard).enqueue(new_job(1), lane=6)
    redis_client.hset(shard.bounds, "used", 1)
    worker = start("a", [])
    worker.homes.update(shard, b"-2", 1)
    Caller(redis_client, shard).enqueue(new_job(2), lane=5)
    found: list[Job] = []
    until(lambda: found.extend(worker.jobs()) or len(found) == 2)  # type: ignore[func-returns-value]


# --- intake --------------------------------------------------------------------------------------


def test_a_worker_reads_its_own_lanes_at_once(
    start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    workers = ["a", "b"]
    one, other = (start(name, [n for n in workers if n != name], patience=60.0) for name in workers)
    caller = Caller(redis_client, shard)
    mine = [new_job(1), new_job(2)]
    caller.enqueue(mine[0], lane=lane_of("a", workers))
    caller.enqueue(mine[1], lane=lane_of("a", workers, 1))
    caller.enqueue(new_job(3), lane=lane_of("b", workers), priority="batch")
    until(lambda: len(one.batcher) == 2 and len(other.batcher) == 1)
    assert one.jobs() == mine
    assert other.jobs() == [new_job(3)]
    assert one.status.own_jobs == 2
    assert one.status.stolen_jobs == other.status.stolen_jobs == 0


def test_where_a_worker_took_jobs_is_known_when_another_is_home(
    start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """What it forgot there is looked for by itself alone: see `Recovery`."""
    worker = start("a", [])
    lane = lane_of("b", ["a", "b"])
    Caller(redis_client, shard).enqueue(new_job(1), lane=lane)
    until(lambda: worker.jobs() == [new_job(1)])
    worker.homes.update(shard, b"-2", LANES, ["b"])
    assert shard.stream(lane=lane) not in worker.homes.own(shard)
    assert worker.status.visited == {shard.stream(lane=lane).key}


def test_what_waits_too_long_is_taken_by_who_is_idle(
    start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    workers = ["a", "b"]
    home = start("a", ["b"])
    home.be_busy()
    caller, job = Caller(redis_client, shard), new_job(1)
    began = time.monotonic()
    caller.enqueue(job, lane=lane_of("a", workers))
    idle = start("b", ["a"], patience=0.1)
    until(lambda: len(idle.batcher), every=0.001)
    assert time.monotonic() - began >= 0.099  # the server counts whole milliseconds
    assert idle.jobs() == [job]
    assert idle.status.stolen_jobs == 1
    assert idle.status.visited == {shard.stream(lane=lane_of("a", workers)).key}
    assert not len(home.batcher)


def test_a_home_that_died_is_not_waited_for(
    start: Callable[..., Worker],
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stealing, "IDLE_LOOK", 1000.0)  # it is called
    workers = ["a", "b"]
    idle = start("b", ["a"])  # nobody is "a"
    caller = Caller(redis_client, shard)
    lane = lane_of("a", workers)
    for n in range(3):
        caller.enqueue(new_job(n), lane=lane)
        until(lambda: len(idle.batcher), every=0.001)
        assert idle.jobs() == [new_job(n)]


def test_many_idle_workers_share_one_long_lane(
    start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    workers = ["a", "b", "c", "d"]
    home = start("a", workers[1:])
    home.be_busy()
    lane = lane_of("a", workers)
    Caller(redis_client, shard).enqueue(*(new_job(n) for n in range(32)), lane=lane)
    others = [start(name, [n for n in workers if n != name]) for name in workers[1:]]
    # One is called, and each calls the next one.
    until(lambda: all(len(other.batcher) == 8 for other in others))
    assert len(queued_in(redis_client, shard, lane)) == 32 - 3 * 8


def queued_in(client: redis.Redis, shard: ShardKeys, lane: int) -> list[Any]:
    """Entries that nobody was given."""
    stream = shard.stream(lane=lane).key
    (group,) = client.xinfo_groups(stream)  # type: ignore[misc]
    last = group["last-delivered-id"].decode()
    found: Any = client.xrange(stream, f"({last}", "+")
    return list(found)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_no_more_is_claimed_than_fits_however_many_lanes_wait(
    batch_size: int, start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    for lane in range(LANES):
        caller.enqueue(*(new_job(lane, n) for n in range(4)), lane=lane)
        caller.enqueue(new_job(lane, 9), lane=lane, priority="batch")
    worker = start("a", [], batch_size=batch_size)
    seen = set()
    while len(seen) < 5 * LANES:
        until(lambda: len(worker.batcher))
        held = sum(
            len(Consumer(redis_client, shard, "a", stream.priority, stream.lane).held())
            for stream in shard.streams
        )
        assert held - len(seen) <= 2 * max(2, 2 * batch_size)
        seen |= {job.digest for job in worker.jobs()}


def test_the_oldest_of_all_shards_goes_first_where_few_fit(
    start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys, pool_name: str
) -> None:
    other = shard_of_pool(pool_name, shard=1, lanes=LANES)
    for each in (shard, other):
        redis_client.hset(each.bounds, "used", LANES)
        for key in each.groups:
            redis_client.xgroup_create(key, GROUP, id="0", mkstream=True)
    old, young = new_job(1), [new_job(2, n) for n in range(9)]
    Caller(redis_client, other).enqueue(old, lane=3)
    time.sleep(0.01)
    Caller(redis_client, shard).enqueue(*young, lane=5)
    worker = start("a", [], batch_size=1, beside=[other])
    until(lambda: len(worker.batcher))
    assert worker.jobs() == [old]
    until(lambda: len(worker.batcher))
    assert worker.jobs() == young[:1]


@pytest.mark.parametrize("batch_size", [5, 32])  # fewer than own streams, and more
def test_a_batch_fills_from_one_lane_as_from_many(
    batch_size: int, start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    worker = start("a", [], batch_size=batch_size)
    worker.be_busy()
    caller = Caller(redis_client, shard)
    caller.enqueue(*(new_job(n) for n in range(batch_size)), lane=5)
    reads: list[int] = []
    read = worker.batcher.add
    worker.batcher.add = lambda jobs, waits=True: (reads.append(len(jobs)), read(jobs, waits))[1]  # type: ignore[method-assign,assignment,arg-type]
    worker.batcher.done()
    until(lambda: len(worker.batcher) == batch_size)
    assert reads == [batch_size]  # at once, not one by one


def test_jobs_of_a_call_that_wakes_a_worker_come_together_whatever_their_lanes(
    start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    worker = start("a", [], batch_size=2 * LANES)
    reads: list[int] = []
    read = worker.batcher.add
    worker.batcher.add = lambda jobs, waits=True: (reads.append(len(jobs)), read(jobs, waits))[1]  # type: ignore[method-assign,assignment,arg-type]
    time.sleep(0.1)  # until it waits in a read
    arguments: list[Any] = [shard.prefix, "client", 30_000, 60_000, 100, GROUP, 1, LANES]
    jobs = [new_job(number) for number in range(2 * LANES)]
    heads = [claim_head(job.digest, n % LANES, 0, None) for n, job in enumerate(jobs)]
    arguments += ("".join(heads), 0, *map(pack_job, jobs))
    script("enqueue")(redis_client, [shard.stream().key], arguments)  # type: ignore[arg-type]
    until(lambda: sum(reads) == 2 * LANES)
    assert reads == [2 * LANES]


def test_a_lane_that_the_index_lost_is_found_by_its_home(
    start: Callable[..., Worker], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    worker = start("a", [])
    redis_client.xadd(shard.stream(lane=4).key, {"job": pack_job(new_job(5))})
    until(lambda: len(worker.batcher))
