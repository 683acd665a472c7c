"""How one call waits: for how long, how urgent it is, and whether it shows a bar."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from lmpool.checks import is_number
from lmpool.errors import SettingsError
from lmpool.keys import Priority
from lmpool.settings import ClientOptions

LONGEST_WAIT: Final = 86_400.0 * 365
"""Seconds beyond which a timeout is none."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """`timeout` in seconds and the `deadline` (monotonic) it comes to; both None: without end."""

    timeout: float | None
    deadline: float | None
    priority: Priority
    progress: bool

    @classmethod
    def checked(
        cls,
        defaults: ClientOptions,
        timeout: float | None,
        priority: Priority | None,
        progress: bool = False,
    ) -> CallOptions:
        """What a caller gave, from now on; what was left out is as the client's `defaults` say.

        Raises `SettingsError` for what cannot be used.
        """
        if priority is None:
            priority = defaults.priority
        elif priority not in ("interactive", "batch"):
            raise SettingsError(f"priority={priority!r:.60}: write 'interactive' or 'batch'")
        if timeout is None:
            timeout = defaults.request_timeout
        if timeout is None:
            return cls(None, None, priority, progress)
        if not is_number(timeout) or not timeout > 0:
            raise SettingsError(f"timeout={timeout!r}: write a positive number of seconds, or None")
        if timeout > LONGEST_WAIT:
            return cls(None, None, priority, progress)
        limit = float(timeout)
        return cls(limit, time.monotonic() + limit, priority, progress)

    def left(self) -> float | None:
        """Seconds until the deadline; None waits without end."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
