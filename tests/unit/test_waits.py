"""Waiting for other threads: as the standard library's, without what Ctrl-C could leave held."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest

import lmpool
from lmpool.producer.pending import LoneCall, wake
from lmpool.producer.waits import Event, Future, never_lost
from tests.support.interruptions import Interruption
from tests.support.waiting import until


def in_threads(count: int, function: Callable[[], Any]) -> tuple[list[threading.Thread], list[Any]]:
    """What a function gives in each of so many threads, once they were joined."""
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(function())) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, found


def test_an_event_wakes_all_who_wait() -> None:
    event = Event()
    threads, found = in_threads(5, event.wait)
    until(lambda: len(event._asleep) == 5)
    assert not event.is_set()
    event.set()
    for thread in threads:
        thread.join(20)
    assert found == [True] * 5
    assert event.is_set()
    assert event._asleep == []


def test_an_event_may_be_set_again_and_again() -> None:
    event = Event()
    for _ in range(3):
        assert not event.wait(0.001)
        event.set()
        event.set()
        assert event.wait()
        assert event.wait(0.0)
        event.clear()
        assert not event.is_set()


@pytest.mark.parametrize("timeout", [0.0, -1.0, 1e-9])
def test_an_event_is_not_waited_for_where_no_time_is_left(timeout: float) -> None:
    event = Event()
    assert not event.wait(timeout)
    assert event._asleep == []


def test_an_event_may_be_waited_for_longer_than_a_lock_can_be() -> None:
    event = Event()
    threads, found = in_threads(1, lambda: event.wait(1e300))
    until(lambda: event._asleep)
    event.set()
    threads[0].join(20)
    assert found == [True]


def test_whoever_sets_an_event_in_the_middle_of_another_does_too() -> None:
    """As a signal's handler that came between: those who were woken already are no obstacle."""
    event = Event()
    threads, found = in_threads(2, event.wait)
    until(lambda: len(event._asleep) == 2)
    event._asleep[0].release()
    event.set()
    for thread in threads:
        thread.join(20)
    assert found == [True, True]


def test_no_wait_is_missed_that_begins_as_an_event_is_set() -> None:
    for _ in range(300):
        event = Event()
        threads, found = in_threads(2, lambda event=event: event.wait(20))  # type: ignore[misc]
        event.set()
        for thread in threads:
            thread.join(30)
        assert found == [True, True]


def test_a_future_brings_a_result_to_all_who_wait() -> None:
    future: Future[int] = Future()
    threads, found = in_threads(3, lambda: future.result(20))
    until(lambda: len(future._over._asleep) == 3)
    assert future.set_running_or_notify_cancel()
    assert not future.cancel()
    assert not future.done()
    future.set_result(7)
    for thread in threads:
        thread.join(20)
    assert found == [7, 7, 7]
    assert future.done()
    assert not future.cancelled()
    assert future.exception() is None


def test_a_future_raises_what_was_raised() -> None:
    future: Future[int] = Future()
    error = ValueError("of the other thread")
    future.set_exception(error)
    assert future.exception() is error
    for _ in range(2):
        with pytest.raises(ValueError, match="of the other") as raised:
            future.result()
        assert raised.value is error


def test_a_future_that_is_taken_back_is_not_begun() -> None:
    future: Future[int] = Future()
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    assert future.done()
    assert not future.set_running_or_notify_cancel()
    for ask in (future.result, future.exception):
        with pytest.raises(CancelledError):
            ask(0.0)
    future.set_result(1)  # whoever brings it all the same brings it to nobody
    assert future.cancelled()


def test_a_future_that_does_not_come_is_not_waited_for() -> None:
    future: Future[int] = Future()
    began = time.monotonic()
    for timeout in (0.0, 0.01):
        with pytest.raises(TimeoutError):
            future.result(timeout)
    assert time.monotonic() - began < 20
    future.set_result(3)
    assert future.result(0.0) == 3


@pytest.mark.parametrize("end", ["result", "exception", "cancel"])
def test_whoever_asked_is_called_once(end: str) -> None:
    future: Future[int] = Future()
    called: list[Any] = []
    for _ in range(2):
        future.add_done_callback(called.append)
    if end == "result":
        future.set_result(1)
        future.set_result(2)
        assert future.result() == 1
    elif end == "exception":
        future.set_exception(ValueError())
        future.set_exception(KeyError())
        assert type(future.exception()) is ValueError
    else:
        future.cancel()
        future.cancel()
    assert called == [future, future]
    future.add_done_callback(called.append)
    assert called == [future] * 3


OURS = os.path.dirname(lmpool.__file__)


def turn(loop: asyncio.AbstractEventLoop) -> None:
    """Run what is ready."""
    loop.call_soon(loop.stop)
    loop.run_forever()


def woken(loop: asyncio.AbstractEventLoop, at: int) -> Interruption:
    """A loop wakes two calls that are done, and is interrupted at a point meanwhile."""
    calls = [LoneCall(None, None, "interactive", None) for _ in range(2)]
    for call in calls:
        call.for_loop(loop)
    wake(calls)
    interruption = Interruption(at, OURS)
    raised = interruption.run(lambda: turn(loop))
    assert type(raised) is (KeyboardInterrupt if interruption.points == at > 0 else type(None))
    turn(loop)
    assert all(call.future.done() for call in calls), interruption.place
    return interruption


def test_whoever_awaits_is_woken_wherever_ctrl_c_comes() -> None:
    """Also where the loop's callback begins."""
    loop = asyncio.new_event_loop()
    points = woken(loop, 0).points
    assert points >= 4
    for at in range(1, points + 1):
        assert woken(loop, at).place != "nowhere"
    loop.close()


def test_a_callback_is_made_once_unless_it_is_interrupted() -> None:
    loop, made = asyncio.new_event_loop(), list[str]()
    loop.call_soon(never_lost(loop, made.append, "x"), None)
    turn(loop)
    turn(loop)
    assert made == ["x"]
    loop.call_later(1e-9, never_lost(loop, made.append, "y"), None).cancel()
    turn(loop)
    gc.collect()
    turn(loop)
    assert made == ["x"]
    loop.close()


def test_a_callback_that_fails_is_made_once_more_and_not_for_ever() -> None:
    loop, made = asyncio.new_event_loop(), list[int]()
    loop.set_exception_handler(lambda *_: None)

    def fail() -> None:
        made.append(1)
        raise TimeoutError  # an alarm's, too

    loop.call_soon(never_lost(loop, fail), None)
    for _ in range(5):
        turn(loop)
    assert len(made) == 2
    loop.close()
