"""Whether who tells a process to end means it a second time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

AT_ONCE: Final = 0.5
"""Seconds in which signals are one: ``timeout`` and others tell a process, and then its group."""


class Insistence:
    """Signals that tell a process to end, of which one that comes later hastens it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None

    def insists(self) -> bool:
        """A signal has come: whether it is another one than the first."""
        now = self._clock()
        if self._first is None:
            self._first = now
        return now - self._first >= AT_ONCE
