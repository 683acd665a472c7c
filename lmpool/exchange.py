"""Sending and reading on a connection in the thread of who asks.

A signal's handler runs in that thread, between any two steps, and may raise what it likes: so what
goes wrong here is no exception, and all that is raised comes from a handler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA

from lmpool.bell import Bell
from lmpool.connections import OneConnectionClient

NOTHING: Final = object()
"""In place of a reply: it did not come, or nobody waits for it any more."""
BESIDE: Final = object()
"""In place of a reply: there is something elsewhere."""
REPLY_BYTES: Final = 8 << 20
"""Read for one reply, at most: what is asked here is smaller."""


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
            if not _is_its_own(error):
                raise
            return False

    def reply(self, until: float, beside: Callable[[], int] | None = None) -> Any:
        """The next reply, which may be a refusal. `NOTHING` where it is not there as a whole by
        `until`, on the monotonic clock, the bell rang, or the connection ended or makes no sense.

        `BESIDE` where it is not there yet, and there is something in the pipe of the number that
        `beside` gives.
        """
        gets, came = self._reader.gets, 0
        while True:
            try:
                reply = gets()
            except (hiredis.HiredisError, ValueError) as error:
                if not _is_its_own(error):
                    raise
                return NOTHING
            if reply is not NOT_ENOUGH_DATA:
                return reply
            number = self._end.fileno()
            left = until - time.monotonic()
            if left <= 0 or number < 0 or came > REPLY_BYTES:
                return NOTHING
            if beside is None:
                if not self._bell.lets_wait(number, left):
                    return NOTHING
            else:
                pipe = beside()
                first = None if pipe < 0 else self._bell.first_of(left, number, pipe)
                if first is None:
                    return NOTHING
                if first == pipe:
                    return BESIDE
            try:
                count = os.readv(number, (self._buffer,))
            except OSError as error:
                if not _is_its_own(error):
                    raise
                count = 0
            if not count:
                return NOTHING
            came += count
            self._reader.feed(self._buffer, 0, count)


def _is_its_own(error: Exception) -> bool:
    """Whether the system, or hiredis, said so: a handler, which is Python's, leaves its frame."""
    raised_in = error.__traceback__
    return raised_in is not None and raised_in.tb_next is None


def pack(*commands: tuple[str | bytes, ...]) -> bytes:
    """Commands as they are sent together."""
    each: Any = hiredis.pack_command
    return b"".join(map(each, commands))
