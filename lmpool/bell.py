"""Waiting for a connection and for another thread at once."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from typing import Final

CAN_WAIT: Final = hasattr(select, "poll")
"""Whether this system can wait for a connection and a bell at once."""


class Bell:
    """Calls a thread away from a socket that it waits for."""

    def __init__(self) -> None:
        self._ear, self._rope = socket.socketpair()
        self._ear.setblocking(False)
        self._rope.setblocking(False)

    def ring(self) -> None:
        """For any thread; never waits."""
        with suppress(OSError):  # it rings already, or nobody is there any more
            self._rope.send(b"!")

    def quiet(self) -> None:
        """Forget that it rang."""
        with suppress(BlockingIOError):
            while self._ear.recv(64):
                pass

    def lets_wait(self, number: int, seconds: float) -> bool:
        """Wait for the socket of this number. Whether there is something to be read there, or its
        end, and the bell has not rung."""
        return self.first_of(seconds, number) is not None

    def first_of(self, seconds: float, *numbers: int) -> int | None:
        """Wait for any of these sockets and pipes: the first in which there is something to be
        read, or its end. None after so many seconds, or where the bell has rung."""
        poll = select.poll()  # one that is kept might keep a number which is another's later
        poll.register(self._ear, select.POLLIN)
        for number in numbers:
            poll.register(number, select.POLLIN)
        found = poll.poll(1000 * seconds)
        if len(found) == 1 and found[0][0] in numbers:  # mostly
            return found[0][0]
        there = [place for place, _ in found]
        if self._ear.fileno() in there:
            return None
        return next((number for number in numbers if number in there), None)

    def close(self) -> None:
        """Both ends."""
        self._ear.close()
        self._rope.close()
