from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import redis

from lmpool.keys import GROUP, ShardKeys
from lmpool.scripts import script
from lmpool.server import open_server
from lmpool.servers import Servers
from lmpool.wants import Digester
from lmpool.wire import Job, pack_job
from lmpool.worker import company as company_module
from lmpool.worker import holding as holding_module
from lmpool.worker import intake as intake_module
from lmpool.worker.batching import Batcher
from lmpool.worker.dead_letters import GARBAGE_BYTES, DeadLetters
from lmpool.worker.holding import release
from lmpool.worker.intake import Intake, create_groups
from lmpool.worker.status import WorkerStatus
from tests.support.protocol import (
    FINGERPRINT,
    Caller,
    Consumer,
    entries_of,
    new_job,
    shard_of_pool,
)
from tests.support.waiting import until


class Reader:
    """An intake at work on a thread of its own, and what it reads into."""

    def __init__(
        self,
        url: str,
        shards: list[ShardKeys],
        consumer: str = "reader",
        batch_size: int = 8,
        timeout: float = 0.001,
        continuous: bool = False,
    ) -> None:
        self.server: Any = open_server(url, blocks_for=1.0)
        self.servers = Servers(lambda: self.server)
        self.blocks: list[int | None] = []
        self._xreadgroup = self.server.xreadgroup
        self.server.xreadgroup = self._read
        self.failures: list[BaseException] = []
        self.status = WorkerStatus({}, lambda: None)
        self.batcher = Batcher(batch_size, timeout, 10_000)
        self.intake = Intake(
            self.servers,
            shards,
            consumer,
            self.batcher,
            self.status,
            Digester(FINGERPRINT),
            DeadLetters(self.servers, consumer),
            continuous,
        )
        create_groups(self.servers, shards, consumer)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _read(self, *arguments: Any, block: int | None, **options: Any) -> Any:
        self.blocks.append(block)
        return self._xreadgroup(*arguments, block=block, **options)

    def _run(self) -> None:
        try:
            self.intake.run()
        except BaseException as error:
            self.failures.append(error)

    def take(self, count: int) -> list[Job]:
        """Wait until `count` jobs are there, and take them as the engine does."""
        until(lambda: len(self.batcher) >= count, what=f"{count} jobs")
        jobs: list[Job] = []
        while len(jobs) < count:
            jobs += [delivery.job for delivery in self.batcher.take()]
        return jobs

    def take_some(self, most: int) -> list[Job]:
        """Take what is there, at most so many, and be done with them."""
        until(lambda: len(self.batcher), what="a job")
        jobs = [delivery.job for delivery in self.batcher.take(most)]
        self.batcher.done()
        return jobs

    def stop(self) -> None:
        self.status.stopping.set()
        self.batcher.wake()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.servers.close()
        assert not self.failures, self.failures


@pytest.fixture
def shard(pool_name: str, any_server: str) -> ShardKeys:
    return shard_of_pool(pool_name)


@pytest.fixture
def start(
    any_server: str, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Reader]]:
    monkeypatch.setattr(intake_module, "IDLE_BLOCK_MS", 50)
    readers: list[Reader] = []

    def start(**options: Any) -> Reader:
        readers.append(Reader(any_server, options.pop("shards", [shard]), **options))
        return readers[-1]

    yield start
    for reader in readers:
        reader.stop()


def test_jobs_come_in_order(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    jobs = [new_job(i, i + 1) for i in range(20)]
    assert Caller(redis_client, shard).enqueue(*jobs) == ("q" * 20, True)
    reader = start(batch_size=100)
    assert reader.take(20) == jobs
    assert len(Consumer(redis_client, shard, "reader").held()) == 20


def test_what_is_done_by_the_time_that_it_is_looked_at_is_followed_by_a_read_that_waits(
    start: Callable[..., Reader],
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake_module, "SHORT_WAIT", 5.0)
    reader = start(timeout=0.0)
    for number in range(5):
        Caller(redis_client, shard).enqueue(new_job(number))
        with reader.batcher.changed:  # in one step, as seen by the intake
            assert reader.batcher.wait()
            reader.batcher.done()
    assert reader.blocks
    assert None not in reader.blocks


def test_jobs_that_were_there_before_the_first_worker_are_read(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    job = new_job(1)
    Caller(redis_client, shard).enqueue(job)  # no group yet
    assert start().take(1) == [job]


def good_fields(**changed: Any) -> bytes:
    job = new_job(1, 2)
    fields = {
        "v": 2,
        "want": ["row", "f32"],
        "digest": job.digest,
        "tokens": job.tokens,
        "adapter": None,
        "deadline": None,
        "sent": 0,
        **changed,
    }
    packed: bytes = msgpack.packb(fields)
    return packed


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"job": b""}, "not msgpack"),
        ({"job": b"garbage"}, "not msgpack|instead of a map"),
        ({"job": b"\xc1\xff\x00\r\n"}, "not msgpack"),
        ({"other": b"field"}, "not msgpack"),
        ({"job": msgpack.packb([1, 2, 3])}, "a list instead of a map"),
        ({"job": msgpack.packb({})}, "no digest"),
        ({"job": good_fields(v=99)}, "job version 99: this worker reads version 2"),
        ({"job": good_fields(want=["rm -rf"])}, "unknown want"),
        ({"job": good_fields(want=["top", 7])}, "digest is not the one"),
        ({"job": good_fields(digest=b"x" * 16)}, "digest is not the one of this prompt"),
        ({"job": good_fields(tokens=b"\x09\x00\x00\x00")}, "digest is not the one"),
        ({"job": good_fields(want=["row", "f16"])}, "digest is not the one"),
        ({"job": good_fields(adapter="a@1")}, "digest is not the one"),
    ],
    ids=range(13),
)
def test_garbage_is_put_aside_with_its_reason_and_does_not_stop_anything(
    fields: dict[Any, Any],
    reason: str,
    start: Callable[..., Reader],
    redis_client: redis.Redis,
    shard: ShardKeys,
) -> None:
    good = new_job(7)
    redis_client.xadd(shard.stream().key, fields)
    Caller(redis_client, shard).enqueue(good)
    reader = start()
    assert reader.take(1) == [good]
    ((_, dead),) = until(lambda: entries_of(redis_client, shard.dead))
    assert dead[b"job"] == fields.get("job", b"")
    assert dead[b"worker"] == b"reader"
    assert re.search(reason, dead[b"reason"].decode())
    # Acknowledged and deleted: only the good one is still held.
    held = until(lambda: Consumer(redis_client, shard, "reader").held())
    assert [entry for entry, _ in entries_of(redis_client, shard.stream().key)] == held
    assert len(held) == 1
    assert redis_client.hget(shard.counters, "failed") == b"1"


def test_a_huge_entry_is_put_aside_cut(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    redis_client.xadd(shard.stream().key, {"job": b"\xc1" * 200_000})
    start()
    ((_, dead),) = until(lambda: entries_of(redis_client, shard.dead))
    assert len(dead[b"job"]) == GARBAGE_BYTES


def test_among_many_jobs_that_are_alike_each_has_its_digest_checked(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    jobs = [replace(new_job(i + 1), sent=2**40) for i in range(9)]
    wrong = replace(jobs[4], digest=jobs[5].digest)
    odd: list[Any] = [{"job": b"garbage"}, {"other": pack_job(jobs[7])}]
    with redis_client.pipeline() as pipeline:
        for i in range(9):
            pipeline.xadd(shard.stream().key, {"job": pack_job(wrong if i == 4 else jobs[i])})
            if i in (2, 6):
                pipeline.xadd(shard.stream().key, odd[i == 6])
        pipeline.xadd(shard.stream().key, {"more": b"", "job": pack_job(jobs[4])})
        pipeline.execute()
    reader = start(batch_size=100)
    assert reader.take(9) == [*jobs[:4], *jobs[5:], jobs[4]]
    dead = until(lambda: found if len(found := entries_of(redis_client, shard.dead)) == 3 else [])
    assert [fields[b"job"] for _, fields in dead] == [b"garbage", pack_job(wrong), b""]
    assert [b"digest is not the one" in fields[b"reason"] for _, fields in dead] == [0, 1, 0]


@pytest.mark.parametrize("what", ["version", "digest"])
def test_the_caller_of_a_refused_job_is_told(
    what: str, start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    job = new_job(1, 2) if what == "version" else new_job(1, 2, fingerprint="f" * 32)
    caller.enqueue(job)
    if what == "version":
        ((entry, _),) = entries_of(redis_client, shard.stream().key)
        redis_client.delete(shard.stream().key)
        redis_client.xadd(shard.stream().key, {"job": good_fields(v=1)}, id=entry)
    start()
    (notice,) = until(caller.notices)
    assert notice.digest == job.digest
    assert notice.status == "refused"
    assert ("version 1:" if what == "version" else "digest") in notice.error
    assert not caller.flight(job)


@pytest.mark.parametrize("how", ["group", "stream"])
def test_a_group_that_vanished_is_made_again(
    how: str, start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    reader = start()
    until(lambda: reader.blocks)
    if how == "group":
        redis_client.xgroup_destroy(shard.stream().key, GROUP)
    else:
        redis_client.delete(shard.stream().key)
    job = new_job(5)
    Caller(redis_client, shard).enqueue(job)
    assert reader.take(1) == [job]


def test_an_idle_worker_blocks_and_a_busy_one_does_not(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    reader = start()
    until(lambda: len(reader.blocks) >= 3)
    assert None not in reader.blocks
    caller.enqueue(new_job(1))
    reader.status.batch_seconds = 200.0
    reader.take(1)  # the engine is at work, and about to end
    reader.batcher.busy_since -= 200.0
    reader.batcher.wake()
    # One blocking read may have begun before.
    until(lambda: reader.blocks[-1] is None)
    seen = len(reader.blocks)
    caller.enqueue(new_job(2))
    until(lambda: len(reader.batcher) == 1)
    assert set(reader.blocks[seen:]) <= {None}
    reader.batcher.take()
    reader.batcher.done()
    until(lambda: reader.blocks[-1] is not None)


def test_a_batch_waits_for_company_where_those_before_it_had_some(
    start: Callable[..., Reader],
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, number in (("LONE_MOST", 1), ("TRIES_AGAIN", 3)):
        monkeypatch.setattr(company_module, name, number)
    caller, reader = Caller(redis_client, shard), start(timeout=0.5)
    reader.status.batch_seconds = 200.0
    jobs = iter([new_job(number) for number in range(20)])

    def batch(company: int = 0, late: Sequence[Job] = ()) -> tuple[int, bool]:
        """How many jobs a batch has that begins with one, and whether it waits."""
        reader.batcher.timeout = 30.0 if company else 0.5  # unless its company fills it
        caller.enqueue(next(jobs))
        until(lambda: len(reader.batcher))
        waits = reader.batcher._waits
        for _ in range(company):
            caller.enqueue(next(jobs))
        taken = reader.batcher.wait()
        if late:
            reader.batcher.busy_since -= 200.0  # the engine is about to end
            reader.batcher.wake()
            seen = len(reader.blocks)
            until(lambda: len(reader.blocks) > seen + 1)  # what is read now is read meanwhile
            caller.enqueue(*late)
            until(lambda: len(reader.batcher) == len(late))
        reader.batcher.done()
        time.sleep(0.3)  # a batch that follows sooner is company missed
        return len(taken), waits

    assert batch() == (1, True)  # in vain
    assert batch() == (1, False)
    assert batch(company=7) == (8, True)  # one in three tries again: this one finds some
    assert batch() == (1, True)
    later = [next(jobs)]
    assert batch(late=later) == (1, False)  # what came so soon would have been company
    assert [delivery.job for delivery in reader.batcher.wait()] == later
    reader.batcher.done()
    time.sleep(0.3)
    assert batch() == (1, True)


def test_an_engine_that_is_always_at_work_is_given_more_whatever_came_before(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, reader = Caller(redis_client, shard), start(continuous=True)
    reader.status.batch_seconds = 0.0001  # a step of it
    for number in range(8):
        caller.enqueue(new_job(number))
        assert reader.take_some(8) == [new_job(number)]
        time.sleep(0.02)
    caller.enqueue(new_job(8))
    until(lambda: len(reader.batcher))
    reader.batcher.take()  # which goes on for long, step by step
    stepping = threading.Event()
    stepper = threading.Thread(target=lambda: _step(reader, stepping))
    stepper.start()
    try:
        caller.enqueue(new_job(9))
        until(lambda: len(reader.batcher))
    finally:
        stepping.set()
        stepper.join()


def _step(reader: Reader, ended: threading.Event) -> None:
    while not ended.wait(0.0002):
        reader.batcher.stepped()


def test_a_short_batch_is_left_alone_until_it_is_about_to_end(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, reader = Caller(redis_client, shard), start()
    reader.status.batch_seconds = 0.02
    caller.enqueue(new_job(1))
    assert reader.take(1) == [new_job(1)]
    looks = len(reader.blocks)
    time.sleep(0.06)  # at first it is too early, in the end it takes too long
    assert len(reader.blocks) - looks <= 11
    reader.batcher.done()
    caller.enqueue(new_job(2))
    assert reader.take(1) == [new_job(2)]
    caller.enqueue(new_job(3))

    def is_found() -> bool:
        """While the engine is at work; a busy machine may look too late in one step of it."""
        if not len(reader.batcher):
            reader.batcher.stepped()
            reader.batcher.wake()
        return len(reader.batcher) > 0

    until(is_found, every=0.04)
    assert reader.batcher.busy


def test_more_of_what_waits_is_read_before_a_short_batch_is_about_to_end(
    start: Callable[..., Reader],
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake_module, "AHEAD", 4000.0)
    Caller(redis_client, shard).enqueue(*(new_job(i) for i in range(8)))
    reader = start(batch_size=4)
    reader.status.batch_seconds = 3000.0
    assert len(reader.take(4)) == 4
    until(lambda: len(reader.batcher) == 4)


def test_no_more_is_claimed_than_the_next_batch_takes(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    Caller(redis_client, shard).enqueue(*(new_job(i) for i in range(50)))
    reader = start(batch_size=4)
    until(lambda: len(reader.batcher) == 4)
    assert len(Consumer(redis_client, shard, "reader").held()) == 4
    # What a busy worker left, an idle one takes.
    other = Consumer(redis_client, shard, "other")
    assert len(other.read(100)) == 46


def test_what_waits_for_a_batch_that_takes_too_long_is_given_back(
    start: Callable[..., Reader],
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake_module, "GIVE_BACK_AFTER", 0.05)
    caller = Caller(redis_client, shard)
    reader = start(batch_size=1)
    reader.status.batch_seconds = 0.01
    first, second = new_job(1), new_job(2)
    caller.enqueue(first)
    assert reader.take(1) == [first]
    caller.enqueue(second)
    other = Consumer(redis_client, shard, "other")
    assert until(other.read)
    # It is the same job to its callers.
    (entry,) = other.held()
    assert caller.flight(second)[b"job"] == entry
    assert len(Consumer(redis_client, shard, "reader").held()) == 1


def test_several_shards_are_read_together(
    any_server: str, redis_client: redis.Redis, pool_name: str, start: Callable[..., Reader]
) -> None:
    shards = [shard_of_pool(pool_name, shard=number) for number in range(3)]
    jobs = [new_job(number) for number in range(3)]
    for shard, job in zip(shards, jobs, strict=True):
        Caller(redis_client, shard).enqueue(job)
    reader = start(shards=shards, batch_size=6)
    until(lambda: len(reader.batcher) == 3)
    delivery = reader.batcher.take()
    assert {(c.stream.shard.number, c.job.digest) for c in delivery} == {
        (number, job.digest) for number, job in enumerate(jobs)
    }
    for c in delivery:
        assert c.place == (shards[c.stream.shard.number].stream().key, c.entry)
    assert reader.status.held == {c.place for c in delivery}


def test_of_priority_batch_no_more_is_claimed_than_is_left_and_none_before_the_others(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    create_groups(Servers(lambda: redis_client), [shard], "reader")  # type: ignore[arg-type,return-value]
    for number in range(8):
        redis_client.xadd(shard.stream("batch").key, {"job": pack_job(new_job(number))})
    reader = start(batch_size=4, timeout=30.0)
    until(lambda: len(reader.batcher) == 4)
    seen = len(reader.blocks)
    until(lambda: len(reader.blocks) > seen + 2)
    interactive = [new_job(100 + number) for number in range(4)]
    Caller(redis_client, shard).enqueue(*interactive)
    until(lambda: len(reader.batcher) == 8)
    assert len(Consumer(redis_client, shard, "reader", "batch").held()) == 4
    assert len(Consumer(redis_client, shard, "reader").held()) == 4
    found = reader.batcher.take()
    assert [delivery.job for delivery in found if not delivery.is_batch_priority] == interactive[:3]


def test_a_job_starts_its_batchs_clock_when_it_comes(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    reader = start(timeout=30.0)
    before = time.monotonic()
    Caller(redis_client, shard).enqueue(new_job(1))
    until(lambda: len(reader.batcher) == 1)
    (delivery,) = reader.batcher.take()
    assert before <= delivery.came <= time.monotonic()


def test_it_stops_while_it_waits(start: Callable[..., Reader]) -> None:
    reader = start()
    until(lambda: reader.blocks)
    reader.stop()


def test_a_lost_server_is_waited_for(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    reader = start()
    until(lambda: reader.blocks)
    failures = [redis.exceptions.ConnectionError("gone"), redis.exceptions.TimeoutError()]
    original = reader._xreadgroup

    def fail(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*arguments, **options)

    reader._xreadgroup = fail
    until(lambda: not failures)
    job = new_job(3)
    Caller(redis_client, shard).enqueue(job)
    assert reader.take(1) == [job]


def test_a_server_that_vanishes_while_its_group_is_made_again_is_waited_for(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    reader = start()
    until(lambda: reader.blocks)
    create = reader.server.xgroup_createconsumer
    failures: list[Exception] = [redis.exceptions.ConnectionError("gone again")]

    def fail(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return create(*arguments, **options)

    reader.server.xgroup_createconsumer = fail
    redis_client.delete(shard.stream().key)
    job = new_job(3)
    Caller(redis_client, shard).enqueue(job)
    assert reader.take(1) == [job]
    assert not failures


def lose_an_answer(reader: Reader) -> list[int]:
    """Let the next answer with jobs be lost on its way; one item is left until it was."""
    original = reader._xreadgroup
    left = [1]

    def lose(*arguments: Any, **options: Any) -> Any:
        answer = original(*arguments, **options)
        if answer and left:
            left.pop()
            raise redis.exceptions.ConnectionError("the answer was lost")
        return answer

    reader._xreadgroup = lose
    seen = len(reader.blocks)
    until(lambda: len(reader.blocks) > seen)  # the read that was under way is over
    return left


def test_jobs_lost_on_their_way_and_withdrawn_are_let_go(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    reader = start()
    original = reader.server.evalsha
    lose_an_answer(reader)
    job, kept = new_job(1), new_job(2)
    unwanted = [job]

    def withdraw_first(sha: str, *arguments: Any) -> Any:
        if unwanted and sha == script("reread").sha:
            caller.withdraw(unwanted.pop())
        return original(sha, *arguments)

    reader.server.evalsha = withdraw_first
    caller.enqueue(job, kept)
    assert reader.take(1) == [kept]
    assert until(lambda: len(Consumer(redis_client, shard, "reader").held()) == 1)
    assert not entries_of(redis_client, shard.dead)


def test_what_is_read_again_counts_no_delivery(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller, stream = Caller(redis_client, shard), shard.stream().key
    reader = start()
    original = reader.server.evalsha
    failures, is_taken_over = [1, 2, 3], threading.Event()

    def lose_some(sha: str, *arguments: Any) -> Any:
        if not failures and sha == script("reread").sha:
            is_taken_over.wait(30)  # until then it reads nothing else
        answer = original(sha, *arguments)
        if failures and sha == script("reread").sha:
            failures.pop()
            raise redis.exceptions.ConnectionError("the answer was lost")
        return answer

    reader.server.evalsha = lose_some
    left = lose_an_answer(reader)
    jobs = [new_job(number) for number in range(1, 4)]
    caller.enqueue(*jobs)
    until(lambda: not left)
    # The answer to the recovery, which took this one over, was lost too: it is run alone, later.
    caller.enqueue(suspect := new_job(9))
    (entry,) = Consumer(redis_client, shard, "dead").read()
    redis_client.xclaim(stream, GROUP, "reader", 0, [entry])
    is_taken_over.set()
    assert reader.take(3) == jobs
    assert not failures
    counts: Any = redis_client.xpending_range(stream, GROUP, "-", "+", 10, consumername="reader")
    assert [item["times_delivered"] for item in counts] == [1, 1, 1, 2]
    caller.enqueue(after := new_job(5))
    reader.batcher.done()
    assert reader.take(1) == [after]
    assert suspect.digest not in {held for _, held in reader.status.held}


def test_what_was_taken_over_is_not_read_again_after_a_failure(
    start: Callable[..., Reader], redis_client: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(redis_client, shard)
    caller.enqueue(new_job(1))
    (entry,) = Consumer(redis_client, shard, "dead").read()
    reader = start()
    until(lambda: len(reader.blocks) >= 2)
    # The recovery's thread takes over the job of a dead worker: it waits for its turn alone.
    reader.status.held.add((shard.stream().key, entry))
    redis_client.xclaim(shard.stream().key, GROUP, "reader", 0, [entry])
    left = lose_an_answer(reader)
    lost, after = new_job(2), new_job(3)
    caller.enqueue(lost)
    until(lambda: not left)
    assert reader.take(1) == [lost]
    caller.enqueue(after)
    reader.batcher.done()
    assert reader.take(1) == [after]


# --- giving back -------------------------------------------------------------------------------


@pytest.fixture
def servers(redis_client: redis.Redis) -> Servers:
    return Servers(lambda: redis_client)  # type: ignore[arg-type,return-value]


def test_a_group_is_made_once_and_joined(
    servers: Servers, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    create_groups(servers, [shard], "a")
    create_groups(servers, [shard], "a")
    create_groups(servers, [shard], "b")
    consumers: Any = redis_client.xinfo_consumers(shard.stream().key, GROUP)
    assert {c["name"] for c in consumers} == {b"a", b"b"}
    for stream in shard.groups:
        (group,) = redis_client.xinfo_groups(stream)  # type: ignore[misc]
        assert group["name"] == GROUP.encode()


def test_everything_that_is_held_is_given_back_at_once(
    servers: Servers, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    create_groups(servers, [shard], "worker")
    caller, consumer = Caller(redis_client, shard), Consumer(redis_client, shard)
    jobs = [new_job(i, i // 256) for i in range(1203)]  # more than two portions
    for i in range(0, len(jobs), 400):
        caller.enqueue(*jobs[i : i + 400], bound=5000)
    held = consumer.read(5000)
    assert len(held) == len(jobs)
    key = shard.stream().key
    known = {
        (key, entry): job for entry, job in zip(held[:600], jobs[:600], strict=True)
    }  # the rest is looked up
    redis_client.xadd(shard.stream().key, {"job": b"garbage"})
    consumer.read()
    assert release(servers, [shard], "worker", known, (), set()) == len(jobs) + 1
    assert consumer.held() == []
    other = Consumer(redis_client, shard, "other")
    entries = other.read(5000)
    assert len(entries) == len(jobs) + 1
    for job, entry in zip(jobs, entries, strict=False):
        assert caller.flight(job)[b"job"] == entry
        assert redis_client.xrange(shard.stream().key, entry, entry)[0][1] == {
            b"job": pack_job(job)
        }  # type: ignore[index]


def test_what_cannot_be_given_back_is_named(
    servers: Servers,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuses(*_: Any) -> None:
        raise redis.exceptions.ResponseError("out of order")

    create_groups(servers, [shard], "worker")
    Caller(redis_client, shard).enqueue(new_job(1))
    (entry,) = Consumer(redis_client, shard).read()
    monkeypatch.setattr(holding_module, "script", lambda name: refuses)
    assert release(servers, [shard], "worker", {}, (), set()) == 0
    named = f"{entry.decode()} of {shard.stream().key}"
    assert f"{named} cannot be given back: out of order" in caplog.text


def test_nothing_held_nothing_given_back(
    servers: Servers, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    create_groups(servers, [shard], "worker")
    assert release(servers, [shard], "worker", {}, (), set()) == 0


def test_jobs_of_a_read_whose_answer_was_lost_are_read_again(
    redis_client: redis.Redis, shard: ShardKeys, start: Callable[..., Reader]
) -> None:
    reader = start()
    caller = Caller(redis_client, shard)
    jobs = [new_job(2, i) for i in range(20)]
    read, armed, lost = reader._xreadgroup, threading.Event(), []

    def lose(*arguments: Any, **options: Any) -> Any:
        answer = read(*arguments, **options)
        if armed.is_set() and answer and answer[0][1] and not lost:
            lost.append(answer)
            caller.withdraw(jobs[0])
            raise redis.exceptions.ConnectionError("cut")
        return answer

    reader._xreadgroup = lose
    caller.enqueue(new_job(1))
    reader.take_some(1)  # the read that ended with it was the last one that began without `lose`
    armed.set()
    caller.enqueue(*jobs)
    found = [job.digest for _ in jobs[1:] for job in reader.take_some(1)]
    assert sorted(found) == sorted(job.digest for job in jobs[1:])  # each once
    assert lost
    caller.enqueue(new_job(3))
    assert reader.take_some(1)[0].digest == new_job(3).digest


def test_a_refusal_that_cannot_be_told_loses_no_other_job(
    redis_client: redis.Redis,
    shard: ShardKeys,
    start: Callable[..., Reader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = start()
    refuse, failures = DeadLetters.refuse, []

    def fail_once(*arguments: Any) -> None:
        if not failures:
            failures.append(1)
            raise redis.exceptions.ConnectionError("cut")
        refuse(*arguments)

    monkeypatch.setattr(DeadLetters, "refuse", fail_once)
    with redis_client.pipeline() as pipeline:
        pipeline.xadd(shard.stream().key, {"job": b"garbage"})
        for i in range(5):
            pipeline.xadd(shard.stream().key, {"job": pack_job(new_job(i + 1))})
        pipeline.execute()
    found = [job.digest for _ in range(5) for job in reader.take_some(1)]
    assert sorted(found) == sorted(new_job(i + 1).digest for i in range(5))
    assert len(entries_of(redis_client, shard.dead)) == 1


def test_a_refusal_in_one_stream_that_cannot_be_told_loses_no_job_of_another(
    redis_client: redis.Redis,
    shard: ShardKeys,
    start: Callable[..., Reader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse, failures = DeadLetters.refuse, []

    def fail_once(*arguments: Any) -> None:
        if not failures:
            failures.append(1)
            raise redis.exceptions.ConnectionError("cut")
        refuse(*arguments)

    monkeypatch.setattr(DeadLetters, "refuse", fail_once)
    with redis_client.pipeline() as pipeline:
        pipeline.xadd(shard.stream().key, {"job": pack_job(new_job(1))})
        pipeline.xadd(shard.stream("batch").key, {"job": b"garbage"})
        pipeline.execute()
    reader = start()  # now: a read that blocks ends with the first stream alone on Redis 7.0
    assert reader.take(1) == [new_job(1)]
    until(lambda: len(entries_of(redis_client, shard.dead)) == 1)
    assert failures


def test_what_was_delivered_before_is_not_given_back_as_if_it_were_new(
    servers: Servers, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """Nor does this delivery count, which ran nothing, whether or not it is known here."""
    create_groups(servers, [shard], "worker")
    jobs = [new_job(number) for number in range(1, 6)]
    Caller(redis_client, shard).enqueue(*jobs)
    worker, other = (Consumer(redis_client, shard, name) for name in ("worker", "other"))
    new, known, unknown, gone, theirs = worker.read()
    stream = shard.stream().key
    redis_client.xclaim(stream, GROUP, "worker", 0, [known, unknown, gone], retrycount=3)
    redis_client.xclaim(stream, GROUP, "other", 0, [theirs], retrycount=2)
    redis_client.xdel(stream, gone)  # it was withdrawn
    stays: set[tuple[str, bytes]] = set()
    # Once as it is told to stop, and again as it leaves, of each place that it has.
    counts = [
        release(servers, [shard, shard], "worker", {(stream, known): jobs[1]}, (), stays)
        for _ in range(2)
    ]
    assert counts == [1, 0]
    found: Any = redis_client.xpending_range(stream, GROUP, "-", "+", 10)
    assert {item["message_id"]: item["times_delivered"] for item in found} == {
        known: 2, unknown: 2, theirs: 2,
    }  # fmt: skip
    assert worker.held() == [known, unknown]
    (again,) = other.read()
    assert again > new
    assert other.held() == [theirs, again]


def test_shards_whose_reads_failed_say_nothing_of_how_others_are_read() -> None:
    """One that came back empty knows of one worker, and so of one lane, at first."""
    sure, unsure = ShardKeys("{a}", 0, 16), ShardKeys("{b}", 1, 16)
    said: list[str] = []
    intake: Any = Intake.__new__(Intake)
    intake._ahead, intake._shards, intake._unsure = None, [sure, unsure], {unsure.prefix}
    intake._most, intake._thieves = 1 << 20, {}
    intake._servers = SimpleNamespace(fails_apart=True)
    intake._homes = SimpleNamespace(has_several=lambda shard: shard is sure)
    intake._status = SimpleNamespace(own_jobs=0)
    intake._reads_again = lambda rooms: iter(())
    intake._own = lambda shards, rooms: list(sure.streams)
    intake._read_few = lambda shards, rooms: said.append("few") or []
    intake._read_now = lambda shards, rooms, count: iter([said.append("all") or []])
    intake._read_more = lambda *given, **options: iter(())
    for _ in intake._reads(None, {"interactive": 2, "batch": 2}):
        pass
    assert said == ["few"]
