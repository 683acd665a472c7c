"""Who reads the next jobs: the intake's thread or, where batches come one by one, the engine's."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

CAN_WAIT: Final = hasattr(select, "poll")
"""Whether this system can wait for a connection and a bell at once."""


class Bell:
    """Calls a thread away from a socket that it waits for."""

    def __init__(self) -> None:
        self._ear, self._rope = socket.socketpair()
        self._ear.setblocking(False)
        self._rope.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._ear, select.POLLIN)

    def ring(self) -> None:
        """For any thread; never waits."""
        with suppress(BlockingIOError):  # it rings already
            self._rope.send(b"!")

    def quiet(self) -> None:
        """Forget that it rang."""
        with suppress(BlockingIOError):
            while self._ear.recv(64):
                pass

    def lets_wait(self, number: int, seconds: float) -> bool:
        """Wait for the socket of this number. Whether there is something to be read there, or its
        end, and the bell has not rung."""
        self._poll.register(number, select.POLLIN)
        try:
            found = self._poll.poll(1000 * seconds)
        finally:
            self._poll.unregister(number)
        return [place for place, _ in found] == [number]

    def close(self) -> None:
        """Both ends."""
        self._ear.close()
        self._rope.close()


class Reader(Protocol):
    """An intake, to the engine's thread."""

    def read_for_engine(self, bell: Bell) -> bool:
        """Read what comes next into the batcher, until the bell rings. Whether to go on so: what
        came leaves at once, and is all that there was."""
        ...


class Baton:
    """Whose turn it is to read, under the batcher's lock.

    What comes to an idle worker would wake the intake's thread, which wakes the engine's, which
    wakes it again at both ends of the batch: as long, together, as a small model computes. So an
    intake that sees no company of what it read passes the baton on and sleeps, and the engine's
    thread, once it has nothing to do, reads with the intake's connection, until there is more than
    a batch takes, something waited while it was at work, or it is called away.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._returned = threading.Condition(lock)
        self._reader: Reader | None = None
        """The intake that sleeps."""
        self._reading: int | None = None
        """The thread that reads in its place."""
        self._is_called_back = False
        """Whether it goes back once reading is over, whatever that brings."""
        self._bell: Bell | None = None

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """Meanwhile the calling thread, which is the engine's, takes it where it is offered."""
        if not CAN_WAIT:
            yield
            return
        bell = Bell()
        with self._lock:
            self._bell = bell
        try:
            yield
        finally:
            with self._lock:
                self._bell = None
                self._give_back()
            bell.close()

    @property
    def is_accepted(self) -> bool:
        """Whether an engine's thread takes it."""
        return self._bell is not None

    def pass_on(self, reader: Reader) -> None:
        """Sleep until the baton is back; for the intake, under the lock."""
        if self._bell is None:
            return
        self._reader = reader
        while self._reader is reader:
            self._returned.wait()

    def take(self) -> tuple[Reader, Bell] | None:
        """Whoever sleeps, for the engine's thread to read in its place. Under the lock."""
        if self._reader is None or self._bell is None:
            return None
        self._reading = threading.get_ident()
        self._bell.quiet()
        return self._reader, self._bell

    def put_down(self, keeps: bool) -> None:
        """Reading is over; unless the engine's thread `keeps` the baton it goes back."""
        with self._lock:
            called_back, self._is_called_back = self._is_called_back, False
            self._reading = None
            if called_back or not keeps:
                self._give_back()

    def call_back(self) -> None:
        """Have the intake read again, soon. For any thread, under the lock."""
        if self._reading is None:
            self._give_back()
        else:
            self._is_called_back = True
            self.ring()

    def ring(self) -> None:
        """Call the engine's thread away from reading, for another one, under the lock."""
        if self._bell is not None and self._reading not in (None, threading.get_ident()):
            self._bell.ring()

    def _give_back(self) -> None:
        if self._reader is not None:
            self._reader = None
            self._returned.notify_all()
