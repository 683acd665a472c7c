"""Continuations whose tokens leave the engine as they are drawn."""

from __future__ import annotations

from collections.abc import Collection

from lmpool.backends.engine import Part
from lmpool.backends.sampling import Continuation


class Streaming:
    """Those of an engine that run, and how many tokens of each have left it."""

    def __init__(self) -> None:
        self._running: dict[bytes, Continuation] = {}
        self._left: dict[bytes, int] = {}

    def begin(self, continuation: Continuation) -> None:
        """Begin with one, what was begun of it elsewhere left out."""
        self._running[continuation.id] = continuation
        self._left[continuation.id] = continuation.drawn.size

    def end(self, ids: Collection[bytes]) -> None:
        """Forget those of these ids, of which some may not be known."""
        for ended in ids:
            self._running.pop(ended, None)
            self._left.pop(ended, None)

    def parts(self) -> list[Part]:
        """What each drew since this was last asked, unless it is finished."""
        parts = []
        for running, continuation in list(self._running.items()):
            if continuation.finished:
                self.end([running])
                continue
            start, upto = self._left[running], continuation.drawn.size
            if upto > start:
                parts.append(Part(running, start, continuation.behind(start)))
                self._left[running] = upto
        return parts

    def __bool__(self) -> bool:
        return bool(self._running)
