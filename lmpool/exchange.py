"""Sending and reading on a connection in the thread of who asks.

A signal's handler runs in that thread, between any two steps, and may raise what it likes: so what
goes wrong here is no exception, and all that is raised comes from a handler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA

from lmpool.bell import Bell
from lmpool.connections import OneConnectionClient
from lmpool.interrupts import is_its_own

NOTHING: Final = object()
"""In place of a reply: it did not come, or nobody waits for it any more."""
BESIDE: Final = object()
"""In place of a reply: there is something elsewhere."""
REPLY_BYTES: Final = 8 << 20
"""Read for one reply, at most: what is asked here is smaller."""


T = TypeVar("T")


class Ear(Protocol):
    """What hears that something came, where the thread does not wait for that."""

    def first_of(self, seconds: float, *numbers: int) -> Awaitable[int | None]:
        """As `Bell.first_of`."""
        ...


class Exchange:
    """One connection, which its own thread leaves alone. Whatever goes wrong spoils it: who owns it
    ends it then."""

    def __init__(self, server: OneConnectionClient, bell: Bell) -> None:
        pool: Any = server.connection_pool
        connection = pool._one
        self._end: Any = connection._sock
        self._reader: Any = connection._parser._reader
        self._buffer: Any = connection._parser._buffer
        self._bell = bell

    def send(self, packed: bytes) -> bool:
        """Send commands, without waiting. Whether all of them left."""
        try:
            return os.write(self._end.fileno(), packed) == len(packed)
        except OSError as error:
            if not is_its_own(error):
                raise
            return False

    async def replies(
        self,
        count: int,
        until: float,
        ear: Ear | None = None,
        beside: Callable[[], int] | None = None,
    ) -> list[Any]:
        """The next `count` replies, which may be refusals. `NOTHING` stands for those that are not
        there as a whole by `until`, on the monotonic clock, or before the bell rang, or the
        connection ended or made no sense.

        `BESIDE` comes first where one is not there yet, and there is something in the pipe of the
        number that `beside` gives. Without an `ear` the thread waits.
        """
        gets, came = self._reader.gets, 0
        found: list[Any] = []
        while True:
            try:
                reply = gets()
            except (hiredis.HiredisError, ValueError) as error:
                if not is_its_own(error):
                    raise
                break
            if reply is not NOT_ENOUGH_DATA:
                found.append(reply)
                if len(found) == count:
                    return found
                continue
            number = self._end.fileno()
            left = until - time.monotonic()
            if left <= 0 or number < 0 or came > REPLY_BYTES:
                break
            numbers: tuple[int, ...] = (number,)
            if beside is not None:
                numbers = number, beside()
                if numbers[1] < 0:
                    break
            if ear is None:
                first = self._bell.first_of(left, *numbers)
            else:
                first = await ear.first_of(left, *numbers)
            if first is None:
                break
            if first != number:
                found.append(BESIDE)
                break
            try:
                read = os.readv(number, (self._buffer,))
            except OSError as error:
                if not is_its_own(error):
                    raise
                if isinstance(error, BlockingIOError):
                    continue  # a loop that Ctrl-C ended tells of the same once more
                read = 0
            if not read:
                break
            came += read
            self._reader.feed(self._buffer, 0, read)
        return found + [NOTHING] * (count - len(found))


def waited_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """What comes of a coroutine of these, for which the thread waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("it waits by an ear")


def pack(command: tuple[str | bytes, ...]) -> bytes:
    """A command as it is sent."""
    each: Any = hiredis.pack_command
    packed: bytes = each(command)
    return packed
