"""A coroutine that waits for connections and pipes, gone on with by an event loop itself: a task
would take as long again, and another thread longer still."""

from __future__ import annotations

import asyncio
import logging
import math
import selectors
import threading
import time
import types
from asyncio.events import _get_running_loop
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

from lmpool.interrupts import frees
from lmpool.producer.waits import never_lost

logger = logging.getLogger(__name__)

LATE: Final = 1.0
"""Seconds after which a timer is taken for lost."""


def can_hear(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this kind of loop tells when there is something to be read. That of Windows does not,
    and ``select`` not of descriptors beyond its first 1,024, which breaks the loop."""
    if isinstance(getattr(loop, "_selector", None), selectors.SelectSelector):
        return False
    return type(loop).add_reader is not asyncio.AbstractEventLoop.add_reader


class LoopEar:
    """Goes on with one coroutine at a time, in the thread of its loop. What is to be read is told
    again and again until it is: so Ctrl-C may end any step, and the loop may run on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.RLock()
        """Of who goes on with the coroutine or ends it, which any thread may while the loop is at
        rest. Who has the session's lock does not wait for it."""
        self._running: Coroutine[Any, Any, Any] | None = None
        self._end: Callable[[Any, bool], object] = _nothing
        self._numbers: tuple[int, ...] = ()
        """What the loop listens to."""
        self._until = math.inf
        self._rings_at = -math.inf
        """When the loop looks at the time, which it does for many coroutines at once."""

    @property
    def is_busy(self) -> bool:
        """Whether a coroutine waits by it."""
        return self._running is not None

    @property
    def is_here(self) -> bool:
        """Whether the loop runs in this thread: then it may be spoken to."""
        return _get_running_loop() is self.loop

    def take(self, running: Coroutine[Any, Any, Any], end: Callable[[Any, bool], object]) -> None:
        """Take on a coroutine that waits by this ear alone. Once it is over, `end` is called with
        what came of it, and whether it came to its end: where it was called away, or something was
        raised, that is None. `end` is to `leave`."""
        self._running, self._end = running, end

    def begin(self) -> None:
        """Begin with what was taken on."""
        self._go_on(None)

    @types.coroutine
    def first_of(self, seconds: float, *numbers: int) -> Generator[None, int | None, int | None]:
        """As `Bell.first_of`."""
        if numbers != self._numbers:
            try:
                self._listen_to(numbers)
            except Exception as error:  # of any loop's own: it hears no more, or never did
                logger.debug("%r does not tell what is to be read: %s", self.loop, error)
                return None
        now = time.monotonic()
        self._until = now + seconds
        if not now - LATE < self._rings_at <= self._until:
            self._ring_in(seconds)
        return (yield)

    def call_away(self) -> None:
        """End what is gone on with, soon where the loop runs. For any thread."""
        running = self._running
        if running is None or self.stop_at_rest():
            return
        try:
            self.loop.call_soon_threadsafe(never_lost(self.loop, self._stop, running), None)
        except RuntimeError:  # it was closed since
            self.stop_at_rest()

    def stop_at_rest(self) -> bool:
        """End what is gone on with, unless the loop runs, or another thread ends it. Whether it did
        so. For any thread; waits for nobody who goes on with it."""
        is_mine: list[bool] = []
        try:
            # In one step: Ctrl-C that came between would leave it held.
            is_mine.extend(map(self._lock.acquire, (False,)))
            running = self._running
            if not is_mine[0] or running is None or self.loop.is_running():
                return False
            self._stop(running)
            return True
        finally:
            if any(is_mine):
                self._lock.release()

    def leave(self) -> None:
        """Listen to nothing, and forget what was taken on, in this order: what is not busy has
        nothing to be closed. Where `is_here`, or as it ends."""
        self._listen_to(())
        self._running, self._end = None, _nothing

    def _listen_to(self, numbers: tuple[int, ...]) -> None:
        loop, before = self.loop, self._numbers
        self._numbers = tuple({*before, *numbers})  # also where Ctrl-C comes between
        if not loop.is_closed():
            for number in before:
                if number not in numbers:
                    loop.remove_reader(number)
            for at, number in enumerate(numbers):
                try:
                    loop.add_reader(number, self._heard, number)
                except Exception:
                    self._numbers = numbers[:at]
                    raise
        self._numbers = numbers

    def _heard(self, number: int) -> None:
        if number in self._numbers:
            self._go_on(number)

    @frees("_lock")
    def _go_on(self, first: int | None) -> None:
        with self._lock:
            running, end = self._running, self._end
            if running is None:
                return
            try:
                running.send(first)
            except StopIteration as stop:
                self._finish(end, stop.value, True)
            except BaseException:
                self._finish(end, None, False)
                raise
            if self._running is None:  # a signal's handler has left it, in the midst
                self._listen_to(())

    @frees("_lock")
    def _stop(self, running: Coroutine[Any, Any, Any]) -> None:
        with self._lock:
            if self._running is running:
                self._finish(self._end, None, False)

    def _finish(
        self, end: Callable[[Any, bool], object], found: Any, came_to_its_end: bool
    ) -> None:
        try:
            end(found, came_to_its_end)
        except BaseException:
            end(None, False)
            raise

    def _ring_in(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.loop.call_later(seconds, never_lost(self.loop, self._ring, at), None)
        self._rings_at = at  # in this order: Ctrl-C may come between

    def _ring(self, at: float) -> None:
        if at != self._rings_at:
            return  # another rings before
        self._rings_at = -math.inf
        if self._running is not None:
            left = self._until - time.monotonic()
            if left > 0:
                self._ring_in(left)
            else:
                self._go_on(None)


def _nothing(found: object, came_to_its_end: bool) -> None:
    """Nobody waits."""
