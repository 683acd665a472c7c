"""What an engine says of its start, which may take minutes.

An engine calls `stage` as it comes to one: ``weights``, ``compile``, ``capture``, ``trial``. Who
loads it listens on the same thread; where nobody does, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Final

_LISTENER: Final[ContextVar[Callable[[str], None] | None]] = ContextVar("listener", default=None)


def stage(name: str) -> None:
    """The start has come to this stage."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(name)


class Listening:
    """While it is entered, `listener` hears the stages of engines loaded on this thread."""

    def __init__(self, listener: Callable[[str], None]) -> None:
        self._listener = listener
        self._token: Token[Callable[[str], None] | None] | None = None

    def __enter__(self) -> None:
        self._token = _LISTENER.set(self._listener)

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            _LISTENER.reset(self._token)
