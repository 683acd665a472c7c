"""What comes one batch after another is read by the engine's thread, and nothing else changes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import redis

from lmpool.bell import CAN_WAIT, Bell
from lmpool.clock import ServerClock
from lmpool.keys import ShardKeys
from lmpool.replies import Parser
from lmpool.server import open_server
from lmpool.servers import Servers
from lmpool.wants import Digester
from lmpool.wire import Job
from lmpool.worker import intake as intake_module
from lmpool.worker.batching import Batcher, Delivery
from lmpool.worker.company import TRIES_AGAIN
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.intake import Intake, create_groups
from lmpool.worker.status import WorkerStatus
from tests.support.protocol import FINGERPRINT, Caller, new_job, shard_of_pool
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not CAN_WAIT, reason="nothing waits for two things at once here")

CONSUMER = "both"
BLOCK = 20.0
"""Seconds that a read blocks: what waits for the end of one comes far too late."""
SOON = BLOCK / 2


def a_job(number: int, sent: int | None = None) -> Job:
    """A job that is sent now, or was by another clock."""
    return replace(new_job(number), sent=ServerClock().now_ms() if sent is None else sent)


def number_of(delivery: Delivery) -> int:
    return int(delivery.job.token_ids()[0])


def alone(number: int, shard: ShardKeys) -> Delivery:
    """A job that is to be run alone, as the recovery brings it."""
    job = a_job(number)
    return Delivery(job, b"1-%d" % number, shard.stream(), time.monotonic(), threading.Event())


class Both:
    """An intake and an engine's thread, which takes each batch and is done with it at once, or
    when it `may_end`."""

    def __init__(self, url: str, shard: ShardKeys) -> None:
        self.server: Any = open_server(url, blocks_for=BLOCK)
        self.servers = Servers(lambda: self.server)
        self.own_reads = 0
        """Blocking reads of the intake's own thread."""
        self.looks = 0
        """All reads of that thread."""
        self._blocks = False
        """Whether it is in a blocking one."""
        self._xreadgroup = self.server.xreadgroup
        self.server.xreadgroup = self._read
        self.status = WorkerStatus({}, lambda: None)
        self.batcher = Batcher(8, 0.001, 10_000)
        self.taken: list[list[int]] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.steps_on = False
        """Whether batches go on after a step until they may end."""
        self.calls = 0
        """How often the engine's thread was called to do something else."""
        self._is_called = threading.Event()
        self.failures: list[BaseException] = []
        self.intake = Intake(
            self.servers,
            [shard],
            CONSUMER,
            self.batcher,
            self.status,
            Digester(FINGERPRINT),
            DeadLetters(self.servers, CONSUMER),
            False,
        )
        create_groups(self.servers, [shard], CONSUMER)
        self.threads = [
            threading.Thread(target=self._run, args=(target,))
            for target in (self.intake.run, self._engine)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, *arguments: Any, block: int | None, **options: Any) -> Any:
        self.looks += 1
        self.own_reads += block is not None
        self._blocks = block is not None
        try:
            return self._xreadgroup(*arguments, block=block, **options)
        finally:
            self._blocks = False

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            self.failures.append(error)

    def _engine(self) -> None:
        with self.batcher.baton.accepted():
            while not self.status.stopping.is_set():
                batch = self.batcher.wait(
                    lambda: self._is_called.is_set() or self.status.stopping.is_set()
                )
                if self._is_called.is_set():
                    self._is_called.clear()
                    self.calls += 1
                self.taken.append([number_of(delivery) for delivery in batch])
                while batch and self.steps_on and not self.may_end.wait(0.005):
                    self.status.end_batch(1, self.batcher.stepped())
                    self.batcher.goes_on_after_step()
                self.may_end.wait()
                self.batcher.done()

    @property
    def jobs(self) -> list[int]:
        """What came, by number."""
        return [number for batch in self.taken for number in batch]

    @property
    def reads(self) -> bool:
        """Whether the engine's thread reads now."""
        return self.batcher.baton._reading is not None

    @property
    def listens(self) -> bool:
        """Whether a read is under way which the next job answers."""
        return self.intake._ahead is not None or self._blocks

    def call(self) -> None:
        """Have the engine's thread do something else."""
        self._is_called.set()
        self.batcher.wake()

    def stop(self) -> None:
        self.status.stopping.set()
        self.may_end.set()
        self.batcher.wake()
        self.threads[1].join(60)
        self.servers.cut()  # a read that the intake has taken over blocks still
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        self.servers.close()
        assert not self.failures, self.failures


@pytest.fixture
def shard(pool_name: str, server_url: str) -> ShardKeys:
    return shard_of_pool(pool_name)


@pytest.fixture
def both(server_url: str, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr(intake_module, "IDLE_BLOCK_MS", round(1000 * BLOCK))
    found = Both(server_url, shard)
    yield found
    found.stop()


@pytest.fixture
def caller(redis_client: redis.Redis, shard: ShardKeys) -> Caller:
    return Caller(redis_client, shard)


def ask(both: Both, caller: Caller, *numbers: int) -> None:
    """Jobs at once, until the engine has them all."""
    had = len(both.jobs)
    caller.enqueue(*map(a_job, numbers))
    until(lambda: len(both.jobs) == had + len(numbers), what=f"the jobs {numbers}")


def settle(both: Both, caller: Caller, first: int = 1_000_000) -> None:
    """Jobs one by one, until the engine's thread reads."""
    for number in range(first, first + 1000):
        ask(both, caller, number)
        with suppress(AssertionError):
            until(lambda: both.reads, 0.02, every=0.002)
            return
    raise AssertionError("the engine's thread never reads")


def one_by_one(both: Both, caller: Caller, count: int, clock_ms: int = 0) -> int:
    """Jobs one by one, sent by a clock that is so much ahead. How often the intake has read."""
    before = both.own_reads
    for number in range(count):
        caller.enqueue(a_job(number, ServerClock().now_ms() + clock_ms))
        until(lambda number=number: both.jobs[-1] == number, every=0.001)
        until(lambda: both.listens, every=0.001)  # or the next one has waited for this one
        time.sleep(0.002)
    return both.own_reads - before


def test_jobs_that_come_one_by_one_are_read_by_the_engines_thread(
    both: Both, caller: Caller
) -> None:
    settle(both, caller)
    assert one_by_one(both, caller, 60) < 20
    assert both.jobs[-60:] == list(range(60))
    assert all(len(batch) == 1 for batch in both.taken)


def test_batches_that_come_one_by_one_are_read_by_the_engines_thread(
    both: Both, caller: Caller
) -> None:
    settle(both, caller)
    before = both.own_reads
    for first in range(0, 300, 5):
        ask(both, caller, *range(first, first + 5))
        until(lambda: both.listens, every=0.001)
        time.sleep(0.002)
    assert both.own_reads - before < 20
    assert both.taken[-60:] == [[*range(first, first + 5)] for first in range(0, 300, 5)]


def test_a_connection_that_is_a_threads_alone_is_not_lent(
    monkeypatch: pytest.MonkeyPatch, both: Both, caller: Caller
) -> None:
    """As TLS's are: while the baton goes to and fro in vain nobody would see what comes."""
    lent: list[object] = []
    monkeypatch.setattr(Parser, "is_plain", False)
    monkeypatch.setattr(both.batcher, "lend", lambda *given: lent.append(given))
    numbers = iter(range(10**6))

    def comes_alone() -> bool:
        ask(both, caller, next(numbers))
        return both.intake._company.is_missing

    for _ in range(20):
        until(comes_alone)
    assert not lent


def test_whether_others_come_by_now_is_tried_now_and_then(both: Both, caller: Caller) -> None:
    settle(both, caller)
    before = both.looks
    for number in range(TRIES_AGAIN + 5):
        ask(both, caller, number)
        time.sleep(0.001)
    assert both.looks > before


def test_more_than_a_batch_takes_is_the_intakes(both: Both, caller: Caller) -> None:
    settle(both, caller)
    before = both.own_reads
    ask(both, caller, *range(30))
    until(lambda: both.own_reads > before, SOON, what="the intake to read")


def test_a_job_that_came_during_a_batch_has_company(both: Both, caller: Caller) -> None:
    """An intake would have found it by then: two clients in turn would get no common batch."""
    settle(both, caller)
    before = both.own_reads
    both.may_end.clear()
    caller.enqueue(a_job(1))
    until(lambda: both.batcher.busy, what="the first one to run")
    time.sleep(0.01)
    caller.enqueue(a_job(2))
    time.sleep(0.01)
    both.may_end.set()
    until(lambda: both.jobs[-1] == 2)
    until(lambda: both.own_reads > before, SOON, what="the intake to read")


@pytest.mark.parametrize("clock_ms", [-50, 50])
def test_what_clock_a_client_has_is_no_matter(clock_ms: int, both: Both, caller: Caller) -> None:
    settle(both, caller)
    assert one_by_one(both, caller, 60, clock_ms) < 20


def test_what_waits_for_a_long_job_is_given_back(
    both: Both, caller: Caller, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker may be idle."""
    give_up, given_up = both.batcher.give_up, list[int]()

    def noted() -> list[Delivery]:
        left = give_up()
        given_up.extend(map(number_of, left))
        return left

    monkeypatch.setattr(both.batcher, "give_up", noted)
    settle(both, caller)
    both.may_end.clear()
    both.batcher.add_alone(alone(1, shard))
    until(lambda: both.jobs[-1] == 1, what="one that runs alone")
    caller.enqueue(a_job(2))  # which answers the read that was under way
    until(lambda: given_up == [2], what="it to be given back")
    both.may_end.set()
    until(lambda: both.jobs[-1] == 2)


def test_what_a_batch_leaves_behind_is_the_intakes_to_look_after(shard: ShardKeys) -> None:
    batcher, reader = Batcher(8, 0.001, 10_000), object()
    sleeper = threading.Thread(target=batcher.lend, args=(reader, threading.Event()), daemon=True)
    with batcher.baton.accepted():
        sleeper.start()
        until(lambda: batcher.baton._reader is reader)
        batcher.add_alone(alone(1, shard))
        batcher.add([alone(2, shard)], waits=False)
        assert len(batcher.take()) == 1
        sleeper.join(60)
        assert not sleeper.is_alive()


def test_who_is_called_away_leaves_the_read_to_the_intake(both: Both, caller: Caller) -> None:
    settle(both, caller)
    before = time.monotonic()
    both.call()
    until(lambda: both.calls == 1, what="the call")
    assert time.monotonic() - before < SOON
    ask(both, caller, 1)
    ask(both, caller, 2)
    assert both.jobs[-2:] == [1, 2]
    settle(both, caller, 2_000_000)


def test_a_job_to_be_run_alone_does_not_wait_for_another(
    both: Both, caller: Caller, shard: ShardKeys
) -> None:
    settle(both, caller)
    before = time.monotonic()
    both.batcher.add_alone(alone(7, shard))
    until(lambda: 7 in both.jobs, what="the job")
    assert time.monotonic() - before < SOON
    ask(both, caller, 1)


def test_what_goes_on_after_a_step_gets_company(both: Both, caller: Caller) -> None:
    settle(both, caller)
    both.may_end.clear()
    both.steps_on = True
    before = both.own_reads
    try:
        caller.enqueue(a_job(1))
        until(lambda: 1 in both.jobs, what="the first one")
        caller.enqueue(a_job(2))
        until(lambda: len(both.batcher), what="another, read meanwhile")
    finally:
        both.steps_on = False
        both.may_end.set()
    until(lambda: 2 in both.jobs, what="the second one")
    assert both.own_reads >= before


def test_a_connection_that_ends_is_made_again(
    both: Both, caller: Caller, redis_client: redis.Redis
) -> None:
    settle(both, caller)
    number = both.server.connection_pool._one._sock
    mine = next(
        each["id"]
        for each in redis_client.client_list()
        if each["cmd"].startswith("xreadgroup") and each["name"] == "lmpool"
    )
    assert number is not None
    redis_client.client_kill_filter(_id=mine)
    ask(both, caller, 1)
    settle(both, caller, 2_000_000)


def test_a_stream_that_is_deleted_is_made_again(
    both: Both, caller: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    settle(both, caller)
    redis_client.delete(shard.stream().key)
    until(lambda: redis_client.exists(shard.stream().key), what="the stream")
    ask(both, caller, 1)


def test_what_is_no_job_is_refused(
    both: Both, caller: Caller, redis_client: redis.Redis, shard: ShardKeys
) -> None:
    settle(both, caller)
    redis_client.xadd(shard.stream().key, {"job": b"nonsense"})
    until(lambda: redis_client.xlen(shard.dead), what="the dead letter")
    ask(both, caller, 1)


def test_an_idle_pair_ends_once_its_read_is_over(
    server_url: str, shard: ShardKeys, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(server_url, shard)
    monkeypatch.setattr(both.servers, "cut", lambda: None)
    try:
        settle(both, caller)
    finally:
        both.stop()


@pytest.mark.parametrize("seed", range(6))
def test_each_job_comes_once_and_in_order_whatever_happens(
    seed: int,
    both: Both,
    caller: Caller,
    redis_client: redis.Redis,
    shard: ShardKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long the engine's thread stands still: what is given back goes to the stream's end.
    monkeypatch.setattr(intake_module, "GIVE_BACK_AFTER", 600.0)
    draw = random.Random(seed)
    sent = 0
    by_themselves: list[int] = []

    def one_after_another() -> None:
        nonlocal sent
        for _ in range(draw.randrange(1, 12)):
            caller.enqueue(a_job(sent))
            sent += 1
            time.sleep(draw.choice((0.0, 0.001, 0.003)))

    def several() -> None:
        nonlocal sent
        count = draw.randrange(2, 20)
        caller.enqueue(*[a_job(sent + number) for number in range(count)])
        sent += count

    def one_alone() -> None:
        by_themselves.append(5_000_000 + len(by_themselves))
        both.batcher.add_alone(alone(by_themselves[-1], shard))

    def cut() -> None:
        for each in redis_client.client_list():
            if each["cmd"].startswith("xreadgroup") and each["name"] == "lmpool":
                redis_client.client_kill_filter(_id=each["id"])

    def hold() -> None:
        both.may_end.clear()
        one_after_another()
        both.may_end.set()

    def rest() -> None:
        time.sleep(draw.choice((0.0, 0.01, 0.05)))

    actions = [one_after_another] * 6 + [several, one_alone, both.call, both.call, cut, hold, rest]
    for _ in range(60):
        draw.choice(actions)()

    def others() -> list[int]:
        return [number for number in both.jobs if number not in by_themselves]

    until(lambda: len(others()) >= sent, what=f"{sent} jobs")
    assert others() == list(range(sent))
    until(
        lambda: sorted(set(both.jobs) - set(range(sent))) == by_themselves,
        what="those that run alone",
    )
    assert len(both.jobs) == len(by_themselves) + sent


def test_a_bell_is_heard_once() -> None:
    bell = Bell()
    try:
        bell.ring()
        bell.ring()
        assert not bell.lets_wait(bell._rope.fileno(), 5.0)
        bell.quiet()
        began = time.monotonic()
        assert not bell.lets_wait(bell._rope.fileno(), 0.05)
        assert time.monotonic() - began >= 0.04
    finally:
        bell.close()
