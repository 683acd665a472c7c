"""Waiting for other threads, for threads that Ctrl-C may come to.

What is made of a `threading.Condition`, as are `threading.Event` and `concurrent.futures.Future`,
takes its lock in a function of Python's: Ctrl-C that comes before that returns leaves the lock held
for ever, and with it the thread that is about to wake somebody.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Generic, Literal, TypeVar, cast

from lmpool.interrupts import frees

T = TypeVar("T")


def never_lost(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object
) -> Callable[[object], object]:
    """A function as a callback of this loop's, which is called with one value that is not used.
    Where Ctrl-C ends it, also at its beginning, and the loop runs on, it is called once more.
    """

    def steps(is_first: bool) -> Iterator[None]:
        try:
            yield  # what comes as it goes on from here is raised within this block
            function(*arguments)
        except GeneratorExit:  # it never was called
            raise
        except BaseException:
            if is_first:
                loop.call_soon(begun(False), None)
            raise
        yield

    def begun(is_first: bool) -> Callable[[object], object]:
        generator: Any = steps(is_first)
        next(generator)
        callback: Callable[[object], object] = generator.send
        return callback

    return begun(True)


class Event:
    """As `threading.Event`, without a lock: to set it waits for nobody."""

    def __init__(self) -> None:
        self._is_set = False
        self._asleep: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def set(self) -> None:
        """Wake all who wait, and let nobody wait from now on."""
        self._is_set = True
        for asleep in tuple(self._asleep):
            with suppress(RuntimeError):  # another thread woke it
                asleep.release()

    def clear(self) -> None:
        """Let those wait who come from now on."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for `timeout` seconds at most. Returns whether it was."""
        if self.is_set():
            return True
        asleep = threading.Lock()
        asleep.acquire()
        self._asleep.append(asleep)
        try:
            if self.is_set():  # since it was looked at
                return True
            longest = threading.TIMEOUT_MAX
            left = longest if timeout is None else max(0.0, min(timeout, longest))
            return asleep.acquire(timeout=left) or self.is_set()
        finally:
            self._asleep.remove(asleep)


class Future(Generic[T]):
    """As `concurrent.futures.Future`, as far as it goes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._state: Literal["pending", "running", "cancelled", "done"] = "pending"
        self._result: T | None = None
        self._error: BaseException | None = None
        self._over = Event()
        self._callbacks: list[Callable[[Future[T]], object]] = []

    def cancelled(self) -> bool:
        """Whether it was taken back before it had begun."""
        return self._state == "cancelled"

    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._state in ("cancelled", "done")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, for `timeout` seconds at most. Returns whether it is."""
        return self.done() or self._over.wait(timeout) or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What was raised instead of a result, once that is known. Raises `CancelledError` where it
        was taken back, and `TimeoutError` after `timeout` seconds."""
        self.wait(timeout)
        if self._state == "cancelled":
            raise CancelledError
        if self._state != "done":
            raise TimeoutError
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """What it brought. Raises as `exception`, and what was raised instead."""
        error = self.exception(timeout)
        if error is None:
            return cast(T, self._result)
        try:
            raise error
        finally:
            del error  # its traceback holds on to this

    @frees("_lock")
    def add_done_callback(self, function: Callable[[Future[T]], object]) -> None:
        """Have a function called once it is done, by the thread that this is done by; at once where
        it is done. It raises nothing."""
        with self._lock:
            if not self.done():
                self._callbacks.append(function)
                return
        function(self)

    @frees("_lock")
    def cancel(self) -> bool:
        """Take it back, unless it has begun. Returns whether it is."""
        with self._lock:
            if self._state == "pending":
                self._state = "cancelled"
        if self._state == "cancelled":
            self._wake()
        return self._state == "cancelled"

    def set_running_or_notify_cancel(self) -> bool:
        """Begin. Returns whether it is still wanted."""
        with self._lock:
            if self._state == "pending":
                self._state = "running"
        return self._state == "running"

    def set_result(self, result: T) -> None:
        """Bring what is waited for."""
        self._end(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Bring an error instead."""
        self._end(None, error)

    def _end(self, result: T | None, error: BaseException | None) -> None:
        with self._lock:
            if not self.done():
                self._result, self._error = result, error
                self._state = "done"
        self._wake()

    def _wake(self) -> None:
        self._over.set()
        while self._callbacks:
            try:
                function = self._callbacks.pop(0)
            except IndexError:  # another thread took it
                return
            function(self)
