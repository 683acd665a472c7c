"""Rows that do not travel as callers have them: those of one call are converted as they come."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.errors import (
    LmpoolError,
    PoolMismatch,
    PoolTimeout,
    PromptError,
    PromptFailed,
    UnknownAdapter,
)
from lmpool.producer import caller as caller_module
from lmpool.producer import stacking as stacking_module
from lmpool.producer.answers import AnswerReader
from lmpool.producer.frameworks import framework
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.pooled_lm import PooledLM
from lmpool.producer.stacking import Conversion, are_converted
from lmpool.rows import EncodedRow, pack_values, unpack_row
from lmpool.servers import Servers
from lmpool.wants import Digest, Row, Top, TopLogprobs
from tests.support.parts import VOCAB, info_of, jobs_of, new_session
from tests.support.waiting import until

NARROW = Row("bf16")
PROMPTS = [[1], [2], [3]]
ASKS = [(prompt, NARROW) for prompt in PROMPTS]


def came(number: int) -> EncodedRow:
    """A row as it comes in bfloat16, of its own numbers."""
    values = np.arange(number, number + VOCAB, dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2")
    return unpack_row(pack_values("bf16", bits, number + 0.25).joined())


def right(number: int) -> npt.NDArray[np.float32]:
    return came(number).logprobs()


class Watched:
    """As NumPy's rows, and tells how many were made."""

    def __init__(self) -> None:
        self._numpy = framework("numpy")
        self.is_there = True
        self.made = threading.Semaphore(0)

    def one(self, row: EncodedRow) -> Any:
        values = self._numpy.one(row)
        self.made.release()
        return values


class Held:
    """A client whose answers land when a test says so."""

    def __init__(self, **options: Any) -> None:
        self.session = new_session("redis://127.0.0.1:1/0", "pool", framework="numpy", **options)
        self.lm: PooledLM[Any] = PooledLM(self.session.options)
        self.client = self.lm._client
        self.session.cache = self.client.cache
        self.client._session = self.session
        self.client._start = lambda: None  # type: ignore[method-assign]
        self.watched = Watched()
        self.lm._framework = self.watched  # type: ignore[assignment]
        self.submitted: list[PendingCall] = []
        self.then: Callable[[PendingCall], None] = lambda call: None
        """Done with each call, once it is known."""
        submit = self.client.submit

        def submitting(calls: Sequence[PendingCall], *, reads: bool = False) -> bool:
            submit(calls)
            for call in calls:
                self.submitted.append(call)
                self.then(call)
            return False

        self.client.submit = submitting  # type: ignore[method-assign]

    def digest(self, place: int, call: int = -1) -> Digest:
        return self.submitted[call].jobs[place].digest

    def land(self, place: int, answer: Any) -> None:
        with self.session.lock:
            woken = self.session.table.land(self.digest(place), answer)
        wake(woken)

    def fail(self, place: int, error: LmpoolError) -> None:
        with self.session.lock:
            woken = self.session.table.fail(self.digest(place), error)
        wake(woken)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    monkeypatch.setattr(stacking_module, "LARGE", 2 * VOCAB)
    return Held()


@pytest.fixture
def thread(held: Held) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool
        held.session.fail_everything(LmpoolError("over"))  # a test that failed waits no longer


def test_a_thread_that_waits_converts_rows_before_the_last_is_there(
    held: Held, thread: ThreadPoolExecutor
) -> None:
    asking = thread.submit(held.lm.sync.ask_many, ASKS, timeout=120)
    until(lambda: held.submitted)
    for number in range(3):
        assert not asking.done()
        held.land(number, came(number))
        assert held.watched.made.acquire(timeout=60)
    for number, row in enumerate(asking.result(60)):
        np.testing.assert_array_equal(row, right(number))


def test_who_awaits_converts_rows_before_the_last_is_there(held: Held) -> None:
    async def main() -> None:
        asking = asyncio.create_task(held.lm.ask_many(ASKS))
        await asyncio.to_thread(until, lambda: held.submitted)
        for number in range(3):
            assert not asking.done()
            held.land(number, came(number))
            assert await asyncio.to_thread(held.watched.made.acquire, timeout=60)
        for number, row in enumerate(await asking):
            np.testing.assert_array_equal(row, right(number))

    asyncio.run(main())


def test_what_a_row_came_in_is_free_once_it_is_converted(
    held: Held, thread: ThreadPoolExecutor
) -> None:
    asking = thread.submit(held.lm.sync.ask_many, ASKS, timeout=120)
    until(lambda: held.submitted)
    row = came(0)
    numbers = weakref.ref(row.data)
    held.land(0, row)
    del row
    assert held.watched.made.acquire(timeout=60)
    until(lambda: numbers() is None)
    assert not asking.done()
    held.land(1, came(1))
    held.land(2, came(2))
    assert len(asking.result(60)) == 3


def test_each_row_has_memory_of_its_own_also_of_equal_asks(held: Held) -> None:
    def answer(call: PendingCall) -> None:
        held.land(0, came(0))
        held.land(2, came(2))

    held.then = answer
    first, same, other = held.lm.sync.ask_many([ASKS[0], ASKS[0], ASKS[1]])
    np.testing.assert_array_equal(first, right(0))
    np.testing.assert_array_equal(same, right(0))
    np.testing.assert_array_equal(other, right(2))
    for row in (first, same, other):
        memory = row if row.base is None else row.base
        assert memory.flags.owndata
        assert memory.nbytes == 4 * VOCAB
    assert not np.shares_memory(first, same)


def test_wants_of_any_kind_and_errors_stand_in_their_places(held: Held) -> None:
    def answer(call: PendingCall) -> None:
        top = call.jobs[2].want
        assert isinstance(top, Top)
        held.land(2, top.reduce(right(7)))
        held.land(4, whole)
        held.fail(3, PromptFailed("why"))
        held.land(0, came(0))
        held.land(1, came(1))

    held.then = answer
    whole = unpack_row(b"".join(pack_values("f32", right(4))))
    asks: Any = [
        (PROMPTS[0], NARROW),
        ([VOCAB + 1], NARROW),
        (PROMPTS[1], NARROW),
        (PROMPTS[0], Top(2)),
        ([9], NARROW),
        ([9], Row("f32")),
    ]
    zero, bad, one, likeliest, failed, given = held.lm.sync.ask_many(asks, errors="return")
    np.testing.assert_array_equal(zero, right(0))
    np.testing.assert_array_equal(one, right(1))
    assert isinstance(likeliest, TopLogprobs)
    assert likeliest.token_ids.tolist() == [VOCAB - 1, VOCAB - 2]
    assert isinstance(bad, PromptError)
    assert isinstance(failed, PromptFailed)
    assert (bad.index, failed.index) == (1, 4)
    np.testing.assert_array_equal(given, right(4))
    assert np.shares_memory(given, whole.data)  # as it came


def test_an_error_that_is_raised_says_which_ask_it_was(held: Held) -> None:
    def answer(call: PendingCall) -> None:
        held.land(0, came(0))
        held.fail(1, PromptFailed("why"))

    held.then = answer
    with pytest.raises(PromptFailed, match="why") as caught:
        held.lm.sync.ask_many(ASKS)
    assert caught.value.index == 1
    assert not held.session.table.flights


def test_rows_that_the_cache_has_are_converted_while_others_come(
    held: Held, thread: ThreadPoolExecutor
) -> None:
    held.session.confirmed = float("inf")
    jobs = jobs_of(PROMPTS, NARROW)
    held.session.cache.put(jobs[1].digest, came(1))
    asking = thread.submit(held.lm.sync.ask_many, ASKS, timeout=120)
    assert held.watched.made.acquire(timeout=60)
    assert not asking.done()
    held.land(0, came(0))
    held.land(2, came(2))
    for number, row in enumerate(asking.result(60)):
        np.testing.assert_array_equal(row, right(number))
    for job in jobs:
        held.session.cache.put(job.digest, came(5))
    for number, row in enumerate(held.lm.sync.ask_many(ASKS)):  # all at once
        np.testing.assert_array_equal(row, right(1 if number == 1 else 5))
    assert not held.session.table.flights


def test_what_is_not_there_in_time_is_an_error_beside_rows_that_are(held: Held) -> None:
    held.then = lambda call: held.land(1, came(1))
    late, there, _ = held.lm.sync.ask_many(ASKS, errors="return", timeout=0.01)
    assert isinstance(late, PoolTimeout)
    np.testing.assert_array_equal(there, right(1))
    with pytest.raises(PoolTimeout, match="2 of 3"):
        held.lm.sync.ask_many(ASKS, timeout=0.01)
    assert not held.session.table.flights


def test_who_is_cancelled_withdraws_what_is_not_there(held: Held) -> None:
    async def main() -> None:
        asking = asyncio.create_task(held.lm.ask_many(ASKS))
        await asyncio.to_thread(until, lambda: held.submitted)
        held.land(0, came(0))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not held.session.table.flights
        assert held.session.table.statistics.withdrawn == 2

    asyncio.run(main())


def test_a_call_that_is_asked_anew_has_rows_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking_module, "LARGE", 2 * VOCAB)
    held = Held(when_replaced="follow")

    def answer(call: PendingCall) -> None:
        if len(held.submitted) == 1:
            held.land(0, came(8))
            held.session.fail_everything(PoolMismatch("another model"))
            held.session.info = info_of(fingerprint="fedcba9876543210" * 2)
            return
        for place in range(3):
            held.land(place, came(place))

    held.then = answer
    for number, row in enumerate(held.lm.sync.ask_many(ASKS)):
        np.testing.assert_array_equal(row, right(number))
    assert [call.info for call in held.submitted] == [info_of(), held.session.info]


def test_torch_rows_are_the_callers_own_each_by_itself(held: Held) -> None:
    torch = pytest.importorskip("torch")
    held.lm._framework = framework("torch")

    def answer(call: PendingCall) -> None:
        for place in range(3):
            held.land(place, came(place))

    held.then = answer
    for number, row in enumerate(held.lm.sync.ask_many(ASKS)):
        assert row.dtype == torch.float32
        assert row.untyped_storage().nbytes() == 4 * VOCAB
        np.testing.assert_array_equal(row.numpy(), right(number))
        row.fill_(7)


def test_rows_are_converted_as_they_come_where_they_are_large_and_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = info_of()
    narrow, whole = jobs_of(PROMPTS, NARROW), jobs_of(PROMPTS, Row("f32"))
    tops = jobs_of(PROMPTS, Top(2))
    assert not are_converted(narrow, info)
    monkeypatch.setattr(stacking_module, "LARGE", 2 * VOCAB)
    assert are_converted(narrow, info)
    assert are_converted([*tops, *whole, *jobs_of(PROMPTS, Row("f16"))], info)
    assert not are_converted(narrow[:1], info)
    assert not are_converted([*tops, *whole], info)


def test_of_small_rows_no_job_is_looked_at() -> None:
    class Unseen(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("looked at")

    assert not are_converted(Unseen(jobs_of(PROMPTS, NARROW)), info_of())


def test_rows_in_f32_are_left_to_the_caller_as_they_came() -> None:
    conversion = Conversion[Any](framework("numpy"))
    row = unpack_row(b"".join(pack_values("f32", right(0))))
    assert not conversion.takes(row)
    assert conversion.takes(came(0))
    assert conversion.whole([row]) == [row]


def test_the_last_row_may_land_after_others_were_taken_in(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def bar(_: int) -> Iterator[Callable[[int], None]]:
        def update(done: int) -> None:
            if not done:
                for number in range(len(ASKS)):
                    held.land(number, came(number))

        yield update

    monkeypatch.setattr(caller_module, "_bar", bar)
    for number, row in enumerate(held.lm.sync.ask_many(ASKS, progress=True)):
        np.testing.assert_array_equal(row, right(number))


def test_rows_that_are_converted_are_received_elsewhere(held: Held) -> None:
    """Also those in f32 among them."""

    def answer(call: PendingCall) -> None:
        reader = AnswerReader(held.session, Servers.of_url("redis://127.0.0.1:1/0"))
        digests = [job.digest for job in call.jobs]
        assert reader._lend(digests, [24 + 4 * VOCAB] * len(digests)) == [None] * len(digests)
        for number in range(2):
            held.land(number, came(number))
        held.land(2, unpack_row(pack_values("f32", right(2)).joined()))

    held.then = answer
    found = held.lm.sync.ask_many([*ASKS[:2], (PROMPTS[2], Row("f32"))])
    for number, row in enumerate(found):
        np.testing.assert_array_equal(row, right(number))


@pytest.mark.parametrize("error", [UnknownAdapter, PoolMismatch])
def test_errors_that_are_kept_hold_on_to_no_row(held: Held, error: type[LmpoolError]) -> None:
    def answer(_: PendingCall) -> None:
        held.land(0, came(0))
        held.fail(1, error("gone"))
        held.land(2, came(2))

    held.then = answer
    gc.disable()
    try:
        found = held.lm.sync.ask_many(ASKS, errors="return")
        row = weakref.ref(found[0])
        assert isinstance(found[1], error)
        held.submitted.clear()
        for unsent in held.session.table.unsent.values():
            unsent.clear()
        del found
        assert row() is None
    finally:
        gc.enable()


class Late(Watched):
    """Of whose rows each takes until something happened."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self.happens = happens
        self.count = 0

    def one(self, row: EncodedRow) -> Any:
        self.count += 1
        self.happens()
        return super().one(row)


def test_an_error_is_told_before_all_that_came_is_converted(held: Held) -> None:
    def answer(_: PendingCall) -> None:
        held.land(0, came(0))
        held.land(1, came(1))

    held.then = answer
    slow = Late(lambda: held.fail(2, PromptFailed("no")) if slow.count == 1 else None)
    held.lm._framework = slow  # type: ignore[assignment]
    with pytest.raises(PromptFailed):
        held.lm.sync.ask_many(ASKS)
    assert slow.count == 1


def test_the_time_is_over_before_all_that_came_is_converted(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(_: PendingCall) -> None:
        held.land(0, came(0))
        held.land(1, came(1))

    now = 0.0
    monkeypatch.setattr(caller_module.time, "monotonic", lambda: time.perf_counter() + now)

    def pass_by() -> None:
        nonlocal now
        now += 1_000

    held.then = answer
    held.lm._framework = slow = Late(pass_by)  # type: ignore[assignment]
    with pytest.raises(PoolTimeout, match="1 of 3"):
        held.lm.sync.ask_many(ASKS, timeout=100)
    assert slow.count == 1
