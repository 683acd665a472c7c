"""Who reads the next jobs: the intake's thread or, where batches come one by one, the engine's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lmpool.bell import CAN_WAIT, Bell


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
        self._has_rung = False
        """Since the bell was last quiet."""

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
        if self._has_rung:  # which takes a system call to find out
            self._has_rung = False
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
            self._has_rung = True
            self._bell.ring()

    def _give_back(self) -> None:
        if self._reader is not None:
            self._reader = None
            self._returned.notify_all()
