"""A mock engine that computes when a test lets it; workers load it as a plug-in.

It touches a file as it begins, and goes on once another is there: a test knows that a batch is
being computed, and decides until when, without a clock. `tests.support.gate` is the test's side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lmpool.backends.engine import Outcome, Request
from lmpool.backends.mock import MockEngine


class GatedEngine(MockEngine):
    """As the mock engine; `gate` is the folder of those files."""

    def __init__(self, model: str, *, gate: str, **options: Any) -> None:
        self._gate = Path(gate)
        self._begun = 0
        self._pass("loading", "load")
        super().__init__(model, **options)

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        self._begun += 1
        self._pass(f"batch {self._begun} of {len(requests)}", "compute")
        return super().compute(requests)

    def _pass(self, what: str, may: str) -> None:
        (self._gate / f"{os.getpid()} {what}").touch()
        signs = (self._gate / f"all may {may}", self._gate / f"{os.getpid()} may {may}")
        while self._gate.is_dir() and not any(sign.exists() for sign in signs):
            time.sleep(0.005)
