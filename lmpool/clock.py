"""Time on the wire: whole milliseconds of the server's clock."""

from __future__ import annotations

import time
from collections.abc import Callable


def to_ms(seconds: float) -> int:
    """Seconds as whole milliseconds, never less than one."""
    return max(1, round(seconds * 1000))


class ServerClock:
    """The server's time, from its answer to ``TIME`` and this process's monotonic clock.

    Deadlines travel in the server's time, so that machines whose clocks disagree agree on them.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = time.time() - monotonic()

    def set(self, seconds: int, microseconds: int) -> None:
        """Take over the two numbers that ``TIME`` answered."""
        self._offset = seconds + microseconds / 1e6 - self._monotonic()

    def now_ms(self) -> int:
        """Milliseconds since the epoch, by the server's clock."""
        return int((self._monotonic() + self._offset) * 1000)
