"""One coroutine, awaited or run: how blocking methods are made."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from typing import Any

import pytest

from lmpool.errors import LmpoolError, PoolTimeout, UnknownPool
from lmpool.producer.blocking import (
    blocking,
    is_blocking,
    outcome,
    pause,
    result,
    run_blocking,
)
from lmpool.producer.deadline import Deadline
from lmpool.producer.waits import Future

NEVER = Deadline(None)


class Counter:
    async def add(self, future: Future[int], more: int = 1, *, seconds: float = 0.0) -> int:
        """Add."""
        await pause(seconds)
        return await outcome(future, NEVER, "nothing") + more

    add_sync = blocking(add)


def later(value: int | Exception, seconds: float = 0.02) -> Future[int]:
    """A future that another thread completes."""
    future: Future[int] = Future()

    def complete() -> None:
        time.sleep(seconds)
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    threading.Thread(target=complete, daemon=True).start()
    return future


def test_a_twin_does_what_the_method_does() -> None:
    assert asyncio.run(Counter().add(later(3), seconds=0.01)) == 4
    assert Counter().add_sync(later(3), more=2, seconds=0.01) == 5
    with pytest.raises(ZeroDivisionError):
        Counter().add_sync(later(ZeroDivisionError()))


def test_a_twin_looks_as_the_method_does() -> None:
    assert inspect.signature(Counter.add_sync) == inspect.signature(Counter.add)
    assert Counter.add_sync.__doc__ == Counter.add.__doc__
    assert not inspect.iscoroutinefunction(Counter.add_sync)


def test_it_blocks_inside_a_running_loop_and_leaves_it_as_it_was() -> None:
    async def both() -> tuple[int, int]:
        first = Counter().add_sync(later(1))
        assert not is_blocking()
        return first, await Counter().add(later(2))

    assert asyncio.run(both()) == (2, 3)


def test_only_the_thread_that_blocks_blocks() -> None:
    future: Future[int] = Future()
    thread = threading.Thread(target=Counter().add_sync, args=(future,))
    thread.start()
    try:
        assert not is_blocking()
        assert asyncio.run(Counter().add(later(1))) == 2
    finally:
        future.set_result(0)
        thread.join(60)


def test_a_blocking_call_within_another() -> None:
    async def outer() -> int:
        inner = Counter().add_sync(later(1))
        assert is_blocking()
        return inner + await outcome(later(1), NEVER, "nothing")

    assert run_blocking(outer()) == 3


def test_an_event_loop_that_a_blocking_call_runs_waits_as_event_loops_do() -> None:
    never: Future[int] = Future()

    async def patient() -> int:
        assert not is_blocking()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Counter().add(never), 0.01)
        assert Counter().add_sync(later(1)) == 2
        return await Counter().add(later(2))

    async def outer() -> int:
        # As an iterable of prompts may, or a signal handler.
        found = asyncio.run(patient())
        assert is_blocking()
        return found

    assert run_blocking(outer()) == 3
    assert not is_blocking()


def test_what_only_a_loop_can_wait_for_is_refused() -> None:
    cleaned = []

    async def wrong() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            cleaned.append(True)

    with pytest.raises(RuntimeError, match="only an event loop"):
        run_blocking(wrong())
    assert cleaned
    assert not is_blocking()


def test_a_shared_future_outlives_who_waited_for_it() -> None:
    async def cancelled(shared: bool) -> bool:
        future: Future[int] = Future()
        task = asyncio.ensure_future(outcome(future, NEVER, "nothing", shared=shared))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return future.cancelled()

    assert not asyncio.run(cancelled(shared=True))
    assert asyncio.run(cancelled(shared=False))


class Waits:
    async def wait(self, future: Future[int], timeout: float | None, shared: bool = False) -> int:
        return await outcome(future, Deadline(timeout), "no answer", shared=shared)

    wait_sync = blocking(wait)


def test_each_who_waits_for_a_shared_future_has_an_error_of_their_own() -> None:
    """One that is raised again and again has everybody's frames in its traceback."""
    cause = ConnectionError("refused")
    future: Future[int] = Future()
    try:
        raise UnknownPool("nobody serves it") from cause
    except UnknownPool as error:
        future.set_exception(error)
    first = future.exception()
    assert first is not None
    before = first.__traceback__

    async def both() -> list[int | BaseException]:
        waits = [outcome(future, NEVER, "", shared=True) for _ in range(2)]
        return await asyncio.gather(*waits, return_exceptions=True)

    errors: list[Any] = asyncio.run(both())
    for wait in (NEVER, Deadline(1.0)):
        with pytest.raises(UnknownPool) as failed:
            result(future, wait, "", shared=True)
        errors.append(failed.value)
    assert {(type(error), str(error), error.__cause__) for error in errors} == {
        (UnknownPool, "nobody serves it", cause)
    }
    assert len({*map(id, errors), id(first)}) == 5
    assert first.__traceback__ is before


@pytest.mark.parametrize("blocks", [False, True])
def test_a_deadline_ends_the_wait(blocks: bool) -> None:
    def wait(future: Future[int], timeout: float | None, shared: bool = False) -> int:
        if blocks:
            return Waits().wait_sync(future, timeout, shared)
        return asyncio.run(Waits().wait(future, timeout, shared))

    assert wait(later(3), 20.0) == wait(later(3), None) == 3
    mine: Future[int] = Future()
    with pytest.raises(PoolTimeout, match=r"^no answer after 0\.05 s$"):
        wait(mine, 0.05)
    assert mine.cancelled(), "nobody waits for it: it must not be begun"
    others: Future[int] = Future()
    with pytest.raises(PoolTimeout):
        wait(others, 0.05, shared=True)
    assert not others.done()
    others.set_result(1)
    begun: Future[int] = Future()
    begun.set_running_or_notify_cancel()
    with pytest.raises(PoolTimeout):
        wait(begun, 0.05)
    begun.set_result(1)  # and nobody complains
    with pytest.raises(PoolTimeout, match="of its own"):
        wait(later(PoolTimeout("of its own")), 20.0)


def test_what_is_there_is_taken_whenever_it_came() -> None:
    there: Future[int] = Future()
    there.set_result(7)
    assert Waits().wait_sync(there, 1e-9) == 7
    assert asyncio.run(Waits().wait(there, 1e-9)) == 7


def test_whoever_awaits_outside_asyncio_is_told_what_to_do() -> None:
    for waiting in (Waits().wait(Future(), None), pause(1.0)):
        with pytest.raises(LmpoolError, match=r"asyncio.*trio\.to_thread\.run_sync"):
            waiting.send(None)  # as trio does
