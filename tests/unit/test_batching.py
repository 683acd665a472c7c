from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmpool.keys import PoolKeys, Priority
from lmpool.wants import Digest, Row, Score, Want
from lmpool.wire import Job
from lmpool.worker.batching import Batcher, Delivery
from tests.support.protocol import new_job

SHARD = PoolKeys("p").shard("0" * 8, 0)


class Clock:
    """A clock that a test holds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def delivery(
    number: int, tokens: int = 1, came: float = 1000.0, priority: Priority = "interactive"
) -> Delivery:
    job = Job(Row("f32"), Digest(b"%016d" % number), b"\0" * 4 * tokens, None)
    return Delivery(job, b"%d-0" % number, SHARD.stream(priority), came)


def new(
    batch_size: int = 4, timeout: float = 1.0, max_batch_tokens: int = 100
) -> tuple[Batcher, Clock]:
    clock = Clock()
    return Batcher(batch_size, timeout, max_batch_tokens, clock), clock


def test_without_a_job_there_is_nothing_due() -> None:
    batcher, _ = new()
    assert batcher.due_in() is None
    assert batcher.take() == []
    assert batcher.room() == 4


def test_a_full_batch_is_due_at_once() -> None:
    batcher, _ = new(batch_size=3)
    batcher.add([delivery(0), delivery(1)])
    assert batcher.due_in() == 1.0
    batcher.add([delivery(2)])
    assert batcher.due_in() == 0.0
    assert batcher.room() == 0


def test_a_batch_is_due_at_its_most_tokens() -> None:
    batcher, _ = new(max_batch_tokens=10)
    batcher.add([delivery(0, 4), delivery(1, 5)])
    assert batcher.due_in() == 1.0
    assert batcher.room() == 2
    batcher.add([delivery(2, 1)])
    assert batcher.due_in() == 0.0
    assert batcher.room() == 0


@given(timeout=st.floats(0, 60), age=st.floats(0, 100), later=st.floats(0, 100))
def test_a_partial_batch_is_due_at_its_timeout_after_its_first_job(
    timeout: float, age: float, later: float
) -> None:
    clock = Clock()
    batcher = Batcher(10, timeout, 100, clock)
    batcher.add([delivery(0, came=clock.now)])
    clock.now += age
    # Later jobs do not put it off.
    batcher.add([delivery(1, came=clock.now)])
    due = batcher.due_in()
    assert due is not None
    assert due == max(0.0, 1000.0 + timeout - clock.now)
    clock.now += later
    assert batcher.due_in() == max(0.0, 1000.0 + timeout - clock.now)


def test_a_job_longer_than_the_budget_goes_alone() -> None:
    batcher, _ = new(max_batch_tokens=10)
    batcher.add([delivery(0, 3), delivery(1, 50), delivery(2, 3), delivery(3, 3)])
    assert [[c.entry for c in batcher.take()] for _ in range(3)] == [
        [b"0-0"],
        [b"1-0"],
        [b"2-0", b"3-0"],
    ]
    assert len(batcher) == 0


def test_what_is_left_over_keeps_its_age() -> None:
    batcher, clock = new(batch_size=2)
    batcher.add([delivery(0), delivery(1), delivery(2, came=1000.5)])
    batcher.take()
    clock.now = 1001.0
    assert batcher.due_in() == 0.5


def test_a_taken_batch_is_running_until_it_is_done() -> None:
    batcher, clock = new()
    batcher.add([delivery(0)])
    assert not batcher.busy
    batcher.take()
    assert batcher.busy
    clock.now += 3
    assert batcher.running_for() == 3
    assert batcher.stepped() == 3
    clock.now += 2
    assert batcher.running_for() == 2
    batcher.add([delivery(1)])
    batcher.take()
    assert batcher.running_for() == 2  # the engine was at it already
    batcher.done()
    assert not batcher.busy


def test_an_empty_take_starts_nothing() -> None:
    batcher, _ = new()
    assert batcher.take() == []
    assert not batcher.busy


def test_jobs_are_given_up_only_while_a_batch_runs() -> None:
    batcher, _ = new(batch_size=2)
    batcher.add([delivery(0), delivery(1), delivery(2)])
    assert batcher.give_up() == []
    batcher.take()
    assert [c.entry for c in batcher.give_up()] == [b"2-0"]
    assert len(batcher) == 0
    assert batcher.room() == 2
    assert batcher.due_in() is None


def test_jobs_that_are_put_back_go_first() -> None:
    batcher, _ = new(batch_size=3, max_batch_tokens=10)
    of_batch = [delivery(3, 4, priority="batch"), delivery(4, priority="batch")]
    batcher.add([delivery(0, 2), delivery(1, 3), *of_batch])
    first = batcher.take()
    batcher.add([delivery(2)])
    batcher.put_back([c for c in first if c.entry != b"0-0"])
    assert batcher.due_in() == 0.0
    assert [c.entry for c in batcher.take()] == [b"1-0", b"2-0", b"3-0"]
    assert [c.entry for c in batcher.take()] == [b"4-0"]
    assert batcher.room() == 3


def test_a_second_delivery_that_is_put_back_runs_alone_all_the_same() -> None:
    batcher, _ = new(batch_size=4)
    batcher.add_alone(of_kind(0, alone=True))
    first = batcher.take()
    batcher.add([of_kind(1)])
    batcher.put_back(first)
    batcher.add_alone(of_kind(2, alone=True))
    assert [kinds(batcher.take()) for _ in range(3)] == ["i", "a", "a"]


def test_closing_returns_what_waited() -> None:
    batcher, _ = new()
    batcher.add([delivery(0), delivery(1)])
    assert [c.entry for c in batcher.close()] == [b"0-0", b"1-0"]
    assert batcher.wait() == []
    assert batcher.close() == []


class BatchesAgainstModel(RuleBasedStateMachine):
    """Jobs leave in the order they came, each once, in batches within the bounds."""

    SIZE, TIMEOUT, TOKENS = 4, 2.0, 12

    def __init__(self) -> None:
        super().__init__()
        self.batcher, self.clock = new(self.SIZE, self.TIMEOUT, self.TOKENS)
        self.waiting: list[Delivery] = []
        self.count = 0

    @rule(sizes=st.lists(st.integers(1, 20), max_size=6))
    def add(self, sizes: list[int]) -> None:
        jobs = [delivery(self.count + i, size, self.clock.now) for i, size in enumerate(sizes)]
        self.count += len(jobs)
        self.waiting += jobs
        self.batcher.add(jobs)

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(most=st.none() | st.integers(-1, 6))
    def take(self, most: int | None) -> None:
        batch = self.batcher.take(most)
        limit = self.SIZE if most is None else max(0, min(most, self.SIZE))
        assert batch == self.waiting[: len(batch)]  # in order, none skipped
        assert len(batch) <= limit
        tokens = sum(job.size for job in batch)
        assert tokens <= self.TOKENS or len(batch) == 1
        self.waiting = self.waiting[len(batch) :]
        # No job stays behind that had room.
        if self.waiting and len(batch) < limit:
            assert batch
            assert tokens + self.waiting[0].size > self.TOKENS

    @precondition(lambda self: self.batcher.busy)
    @rule()
    def give_up(self) -> None:
        assert self.batcher.give_up() == self.waiting
        self.waiting = []

    @rule()
    def done(self) -> None:
        self.batcher.done()

    @invariant()
    def it_is_due_when_the_model_says(self) -> None:
        tokens = sum(job.size for job in self.waiting)
        assert len(self.batcher) == len(self.waiting)
        if not self.waiting:
            expected = None
        elif len(self.waiting) >= self.SIZE or tokens >= self.TOKENS:
            expected = 0.0
        else:
            expected = max(0.0, self.waiting[0].came + self.TIMEOUT - self.clock.now)
        assert self.batcher.due_in() == expected
        room = 0 if tokens >= self.TOKENS else max(0, self.SIZE - len(self.waiting))
        assert self.batcher.room() == room

    def teardown(self) -> None:
        assert self.batcher.close() == self.waiting


TestBatchesAgainstModel = BatchesAgainstModel.TestCase


# --- waiting -----------------------------------------------------------------------------------


class Waiter:
    """A thread in `Batcher.wait`."""

    def __init__(self, batcher: Batcher, interrupted: Callable[[], bool] = lambda: False) -> None:
        self.batch: list[Delivery] | None = None

        def wait() -> None:
            self.batch = batcher.wait(interrupted)

        self.thread = threading.Thread(target=wait)
        self.thread.start()

    def result(self) -> list[Delivery]:
        self.thread.join(60)
        assert self.batch is not None, "it still waits"
        return self.batch


def test_a_wait_ends_at_once_when_the_batch_is_full() -> None:
    batcher = Batcher(2, 500.0, 100)
    waiter = Waiter(batcher)
    batcher.add([delivery(0, came=time.monotonic())])
    batcher.add([delivery(1, came=time.monotonic())])
    assert len(waiter.result()) == 2


def test_a_wait_ends_at_the_timeout_of_the_first_job() -> None:
    now = 0.0
    batcher = Batcher(100, 500.0, 1000, clock=lambda: now)
    waiter = Waiter(batcher)
    batcher.add([delivery(0, came=now)])
    now = 400.0
    batcher.add([delivery(1, came=now)])
    now = 500.0
    batcher.wake()
    assert len(waiter.result()) == 2
    batcher.done()


def test_a_wait_ends_by_itself() -> None:
    batcher = Batcher(100, 0.1, 1000)
    began = time.monotonic()
    batcher.add([delivery(0, came=began)])
    assert len(batcher.wait()) == 1
    assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize("how", ["close", "interrupt"])
def test_a_wait_ends_without_a_batch(how: str) -> None:
    stop = threading.Event()
    batcher = Batcher(2, 60.0, 100)
    waiter = Waiter(batcher, stop.is_set)
    assert waiter.thread.is_alive()
    if how == "close":
        batcher.close()
    else:
        stop.set()
        batcher.wake()
    assert waiter.result() == []


def test_nothing_is_lost_or_doubled_between_threads() -> None:
    batcher = Batcher(7, 0.0005, 30)
    taken: list[Delivery] = []
    ended = threading.Event()

    def take() -> None:
        while not ended.is_set() or len(batcher):
            taken.extend(batcher.wait(ended.is_set) or batcher.take())
            batcher.done()

    consumer = threading.Thread(target=take)
    consumer.start()
    jobs = [delivery(i, 1 + i % 5, time.monotonic()) for i in range(2000)]
    for i in range(0, len(jobs), 13):
        batcher.add(jobs[i : i + 13])
    ended.set()
    batcher.wake()
    consumer.join(60)
    assert not consumer.is_alive()
    assert taken == jobs


# --- who goes first ----------------------------------------------------------------------------


def of_kind(
    number: int, priority: Priority = "interactive", *, alone: bool = False, tokens: int = 1
) -> Delivery:
    settled = threading.Event() if alone else None
    stream = SHARD.stream(priority)
    return Delivery(new_job(*[number] * tokens), str(number).encode(), stream, 0.0, settled)


def kinds(batch: list[Delivery]) -> str:
    return "".join("a" if c.settled else c.stream.priority[0] for c in batch)


def test_jobs_of_priority_batch_have_a_place_in_eight() -> None:
    batcher = Batcher(8, 0.0, 10_000)
    batcher.add([of_kind(i, "batch") for i in range(20)])
    assert batcher.room() == 8  # they take no room from those that go first
    assert batcher.room_for_batch_priority() == 0
    batcher.add([of_kind(100 + i) for i in range(8)])
    assert kinds(batcher.take()) == "iiiiiiib"
    assert kinds(batcher.take()) == "ibbbbbbb"
    assert kinds(batcher.take()) == "bbbbbbbb"


def test_batches_of_one_take_turns() -> None:
    batcher = Batcher(1, 0.0, 10_000)
    batcher.add([of_kind(i, "batch") for i in range(2)] + [of_kind(9 + i) for i in range(20)])
    assert "".join(kinds(batcher.take()) for _ in range(16)) == "iiiiiiib" * 2


def test_batches_full_of_tokens_take_turns() -> None:
    batcher = Batcher(64, 0.0, 10)
    batcher.add([of_kind(i, "batch", tokens=5) for i in range(3)])
    batcher.add([of_kind(9 + i, tokens=5) for i in range(40)])
    taken = [kinds(batcher.take()) for _ in range(16)]
    assert taken == [*["ii"] * 7, "bi"] * 2


def test_a_long_job_of_priority_batch_is_not_starved() -> None:
    batcher = Batcher(8, 0.0, 10)
    batcher.add([of_kind(0, "batch", tokens=10)])  # as long as prompts may be
    batcher.add([of_kind(9 + i, tokens=1 + i % 3) for i in range(100)])
    taken = [kinds(batcher.take()) for _ in range(8)]
    assert taken[-1] == "b"
    assert "b" not in "".join(taken[:-1])


def test_a_second_delivery_runs_alone_and_every_other_batch_is_of_others() -> None:
    batcher = Batcher(4, 0.0, 10_000)
    for number in range(2):
        batcher.add_alone(of_kind(number, alone=True))
    batcher.add([of_kind(10 + i) for i in range(6)])
    assert [kinds(batcher.take()) for _ in range(4)] == ["a", "iiii", "a", "ii"]
    batcher.add_alone(of_kind(3, alone=True))
    assert [kinds([delivery]) for delivery in batcher.close()] == ["a"]


def test_the_last_job_may_be_taken_while_somebody_looks_what_is_due() -> None:
    class Watched(Batcher):
        """Somebody takes all there is as soon as it is counted."""

        taker: threading.Thread | None = None

        def __len__(self) -> int:
            count = super().__len__()
            if count and self.taker is None:
                self.taker = threading.Thread(target=self.take)
                self.taker.start()
                self.taker.join(0.1)
            return count

    batcher = Watched(8, 1.0, 1000, Clock())
    batcher.add([delivery(3)])
    assert batcher.due_in() == 1.0
    assert batcher.taker is not None
    batcher.taker.join()
    assert batcher.due_in() is None


LONG = 2_000
"""Tokens of a prompt of which eight fill the budget."""


def prompt(
    *tokens: int,
    adapter: str | None = None,
    want: Want | None = None,
    priority: Priority = "interactive",
) -> Delivery:
    job = Job(want or Row("f32"), Digest(b"-" * 16), np.array(tokens, np.uint32).tobytes(), adapter)
    return Delivery(job, b"1-0", SHARD.stream(priority), 1000.0)


def sharing(up_to: int = LONG) -> Batcher:
    return Batcher(64, 1.0, 8 * LONG, Clock(), shares_up_to=up_to)


def particles(count: int = 32, start: int = 0, adapter: str | None = None) -> list[Delivery]:
    """Prompts of one long beginning, each with tokens of its own behind it."""
    shared = range(start, start + LONG - 2)
    return [prompt(*shared, number, 2 * number, adapter=adapter) for number in range(count)]


@pytest.mark.parametrize(("up_to", "size"), [(LONG, 32), (LONG - 1, 8), (0, 8)])
def test_a_common_beginning_counts_once_where_it_is_computed_once(up_to: int, size: int) -> None:
    batcher = sharing(up_to)
    batcher.add(particles())
    assert (batcher.room(), batcher.due_in()) == ((32, 1.0) if size == 32 else (0, 0.0))
    assert len(batcher.take()) == size


def test_those_that_begin_alike_need_not_stand_together_nor_differ_at_the_end_alone() -> None:
    batcher = sharing()
    both = zip(particles(), particles(start=7), strict=True)
    batcher.add([each for pair in both for each in pair])
    assert len(batcher.take()) == 64
    batcher.add([prompt(*range(LONG - 100), *[number] * 100) for number in range(64)])
    assert len(batcher.take()) == 64
    assert (len(batcher), batcher.room()) == (0, 64)


def test_what_another_adapter_computes_is_not_shared() -> None:
    batcher = sharing()
    batcher.add([each for n in range(20) for each in particles(1, adapter=f"style-{n}@0")])
    assert len(batcher.take()) == 8


def test_a_text_counts_whole_as_all_of_it_is_scored() -> None:
    batcher = sharing()
    batcher.add([prompt(*range(LONG - 1), number, want=Score()) for number in range(20)])
    assert len(batcher.take()) == 8


def tree_size(deliveries: Iterable[Delivery]) -> int:
    """Positions of the trees of all prompts, one for each adapter: what is computed once."""
    nodes = set()
    for each in deliveries:
        tokens = each.job.tokens
        nodes.update((each.job.adapter, tokens[:end]) for end in range(4, len(tokens) + 1, 4))
    return len(nodes)


@pytest.mark.parametrize("seed", range(60))
def test_a_batch_is_never_more_than_its_budget_to_compute(seed: int) -> None:
    """Whatever came before, was dropped, was put back, or waits beside it."""
    random = np.random.default_rng(seed)
    budget, size = int(random.choice([60, 200, 400])), int(random.choice([2, 8, 40]))
    batcher = Batcher(size, 1.0, budget, shares_up_to=int(random.choice([60, 1_000])))
    waiting: list[Delivery] = []
    held: list[Delivery] = []
    sizes = []

    def some() -> Delivery:
        beginning = [int(random.integers(3))] * int(random.choice([0, 5, 20, 33, 60, 120]))
        tail = random.integers(3, 6, random.integers(1, 24)).tolist()
        adapter = [None, "style@0"][int(random.random() < 0.2)]
        priority: Priority = "batch" if random.random() < 0.3 else "interactive"
        return prompt(*beginning, *tail, adapter=adapter, priority=priority)

    for _ in range(60):
        match random.choice(
            ["add", "take", "put back", "give up", "take out"], p=[0.4, 0.4, 0.1, 0.05, 0.05]
        ):
            case "add":
                came = [some() for _ in range(random.integers(1, 20))]
                batcher.add(came)
                waiting += came
            case "take":
                held = batcher.take()
                batcher.done()
                assert len(held) <= size
                shared = [each for each in held if each.size <= batcher._shares_up_to]
                whole = sum(each.size for each in held if each.size > batcher._shares_up_to)
                assert len(held) == 1 or tree_size(shared) + whole <= budget
                sizes.append(len(held))
                waiting = [each for each in waiting if not any(each is one for one in held)]
            case "put back":
                batcher.put_back(held)
                waiting += held
                held = []
            case "give up":
                batcher.busy = True
                left = batcher.give_up()
                batcher.done()
                assert len(left) == len(waiting)
                waiting = []
            case "take out":
                gone = batcher.take_out(lambda each: each.size % 3 == 0)
                waiting = [each for each in waiting if not any(each is one for one in gone)]
        assert len(batcher) == len(waiting)
        interactive = [each for each in waiting if not each.is_batch_priority]
        assert batcher._tokens == sum(each.size for each in interactive)
        if not waiting:
            assert batcher.room() == size
    assert max(sizes) > 1
