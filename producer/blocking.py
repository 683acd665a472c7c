"""One way to write a method that waits, for event loops and for threads.

A coroutine that awaits nothing but what stands here (and other such coroutines) can be awaited in
an event loop, where it waits as coroutines do, and can be run by `run_blocking`, where each of its
waits blocks the thread: then it never suspends, and its first step is its last. So a blocking
method is made of an async one, and works inside a running event loop too.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from asyncio.events import _get_running_loop
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from lmpool.errors import LmpoolError
from lmpool.producer.deadline import Deadline
from lmpool.producer.waits import Future, never_lost

P = ParamSpec("P")
SelfT = TypeVar("SelfT")
T = TypeVar("T")


_NOWHERE: Final = object()


class _Thread(threading.local):
    blocks_in: object = _NOWHERE
    """The event loop that ran when a blocking call began, which may be None. One that something
    in it begins, such as an iterable of prompts or a signal handler, waits as event loops do."""


_thread = _Thread()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in this thread, which blocks wherever the coroutine waits."""
    before, _thread.blocks_in = _thread.blocks_in, _get_running_loop()
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        _thread.blocks_in = before
    coroutine.close()
    raise RuntimeError("a blocking call awaited what only an event loop can wait for")


def blocking(
    method: Callable[Concatenate[SelfT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SelfT, P], T]:
    """The blocking twin of a method of the same class."""

    @functools.wraps(method)
    def twin(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(method(self, *args, **kwargs))

    return twin


def is_blocking() -> bool:
    """Whether the running coroutine may block this thread, and must not suspend."""
    return _thread.blocks_in is _get_running_loop()


def loop_or_blocking() -> asyncio.AbstractEventLoop | None:
    """The event loop to wait in; None where this thread may block. Raises `LmpoolError` where there
    is neither."""
    loop = _get_running_loop()  # a system call
    return None if _thread.blocks_in is loop else loop or running_loop()


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop to wait in. Raises `LmpoolError` where there is none."""
    loop = _get_running_loop()
    if loop is None:
        raise LmpoolError(
            "awaited without an asyncio event loop: lmpool waits in asyncio alone. With trio, call "
            "the methods of lm.sync by trio.to_thread.run_sync"
        )
    return loop


def result(future: Future[T], deadline: Deadline, missing: str, *, shared: bool = False) -> T:
    """What a future of another thread brings, while this thread blocks; see `outcome`."""
    try:
        if not future.wait(deadline.left()):
            raise deadline.error(missing)
        return _brought(future, shared)
    finally:
        if not shared:
            future.cancel()  # nothing, once it is done


async def outcome(
    future: Future[T], deadline: Deadline, missing: str, *, shared: bool = False
) -> T:
    """What a future of another thread brings.

    Raises `PoolTimeout`, which says what is `missing`, at the deadline. Who stops waiting takes it
    back, if it has not begun; one that is `shared` others wait for too: it goes on.
    """
    if is_blocking():
        return result(future, deadline, missing, shared=shared)
    loop = running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    def wake_loop(_: Future[T]) -> None:
        try:
            loop.call_soon_threadsafe(never_lost(loop, wake), None)
        except RuntimeError:
            pass  # a loop that was closed has nobody left who waits

    left = deadline.left()
    timer = None if left is None else loop.call_later(left, never_lost(loop, wake), None)
    future.add_done_callback(wake_loop)
    try:
        await ready
    finally:
        if timer is not None:
            timer.cancel()
        if not shared:
            future.cancel()  # nothing, once it is done
    if future.done() and not future.cancelled():
        return _brought(future, shared)
    raise deadline.error(missing)


def _brought(future: Future[T], shared: bool) -> T:
    error = future.exception() if shared else None
    if isinstance(error, LmpoolError):
        # To raise it would add to the traceback that all who wait have of it.
        raise error.of(error.index) from error.__cause__
    return future.result()


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a thread of its own, which who stops waiting leaves behind."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


async def pause(seconds: float) -> None:
    """Sleep."""
    if is_blocking():
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop
    else:
        running_loop()
        await asyncio.sleep(seconds)
