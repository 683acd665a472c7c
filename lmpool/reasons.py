"""What is logged of an outage: each reason once, however long it lasts and how often it is met."""

from __future__ import annotations

import re
from typing import Final

MOST: Final = 20
"""Reasons of one outage that are told apart; more are nonsense, which must not fill a log."""


class Reasons:
    """The reasons met since all was well."""

    def __init__(self) -> None:
        self._met: set[tuple[type[BaseException], str]] = set()

    def is_new(self, error: BaseException) -> bool:
        """Whether this was not met before. Other numbers (ports, slots, seconds) make no other
        reason."""
        reason = type(error), re.sub("[0-9]+", "", str(error))
        if reason in self._met or len(self._met) >= MOST:
            return False
        self._met.add(reason)
        return True

    def clear(self) -> None:
        """All is well again."""
        self._met.clear()
