"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T], timeout: float = 60.0, *, what: str = "", every: float = 0.01
) -> T:
    """What `condition` answers as soon as that is true; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"not within {timeout:g} s: {what or getattr(condition, '__name__', condition)}"
                f" (last answer {found!r})"
            )
        time.sleep(every)
