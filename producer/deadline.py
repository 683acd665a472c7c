"""Until when a call may wait: one deadline goes through all of its waits."""

from __future__ import annotations

import math
import time
from typing import Final

from lmpool.checks import as_number, quoted
from lmpool.errors import PoolTimeout, SettingsError

LONGEST_WAIT: Final = 86_400.0 * 365
"""Seconds beyond which a timeout is none."""


class Deadline:
    """`timeout` in seconds from when it `began`, and the moment `at` (both monotonic) it comes to;
    None: never."""

    __slots__ = ("at", "began", "timeout")
    at: float | None

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        if timeout is None:  # nobody is ever late: when it began is not looked up
            self.began, self.at = math.inf, None
        else:
            self.began = time.monotonic()
            self.at = self.began + timeout

    @classmethod
    def checked(cls, timeout: object, default: float | None) -> Deadline:
        """What a caller gave as `timeout`, from now on; the `default` if that is None.

        Raises `SettingsError` for what cannot be used.
        """
        if timeout is None:
            timeout = default
        if timeout is None:
            return cls(None)
        seconds = as_number(timeout)
        if seconds is None or not seconds > 0:
            raise SettingsError(
                f"timeout={quoted(timeout)}: write a positive number of seconds, or None"
            )
        return cls(None if seconds > LONGEST_WAIT else seconds)

    def left(self) -> float | None:
        """Seconds until then, 0 or more; None waits without end."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def at_least(self, seconds: float) -> float | None:
        """Those left, or so many where there are fewer."""
        left = self.left()
        return None if left is None else max(left, seconds)

    def error(
        self, missing: str, more: str = "", kind: type[PoolTimeout] = PoolTimeout
    ) -> PoolTimeout:
        """The error of who waited until then: what was missing, and what else there is to say. It
        says the same whoever saw first that the time is over: of a worker, `kind` is `JobExpired`.
        """
        if self.timeout is None:
            return kind(f"{missing}{more}")
        # Who passes on what is left of a time of its own says 14.9998.
        seconds = f"{self.timeout:.3g}" if self.timeout < 100 else f"{self.timeout:.0f}"
        return kind(f"{missing} after {seconds} s{more}")
