"""Holding the mock engine of workers in the test's own process, instead of making it slow."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Self
from unittest.mock import patch

from lmpool.backends.engine import Outcome, Request
from lmpool.backends.mock import MockEngine

LONGEST = 150.0
"""Seconds after which a batch goes on, so that a test that failed can end."""


class Hold:
    """Batches that begin while the block runs are computed from `open` on, or from its end: those
    of one engine, if it is given, and not the first `after`.

    The engines of processes that a test starts are held by `tests.support.gate`.
    """

    def __init__(self, only: MockEngine | None = None, *, after: int = 0) -> None:
        self._opened = threading.Event()
        self.begun = threading.Event()
        """A batch is held."""
        compute = MockEngine.compute

        def held(engine: MockEngine, requests: Sequence[Request]) -> Iterable[Outcome]:
            nonlocal after
            after -= 1
            if after < 0 and (only is None or engine is only):
                self.begun.set()
                self._opened.wait(LONGEST)
            return compute(engine, requests)

        self._patch = patch.object(MockEngine, "compute", held)

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        self.open()

    def open(self) -> None:
        """Let them all compute, at their own pace."""
        self._opened.set()

    def close(self) -> None:
        """Hold what begins from now on."""
        self._opened.clear()
