"""The mock engine with hidden states: made up so that a head of every part makes its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lmpool.backends import Outcome, Request
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.head_form import HeadForm
from lmpool.wants import Hidden

F32 = npt.NDArray[np.float32]

SCALE = 0.5
CAP = 64.0


class HiddenEngine(MockEngine):
    """Its head is the unit matrix, with a bias, a scale and a cap."""

    def __init__(self, model: str = "mock", **options: Any) -> None:
        super().__init__(model, **options)
        form = HeadForm(self.info.vocab_size, "f32", SCALE, CAP, bias=True)
        self.info = replace(self.info, head=form)

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        states = [request for request in requests if isinstance(request.want, Hidden)]
        others = [request for request in requests if not isinstance(request.want, Hidden)]
        yield from super().compute(others)
        for request in states:
            yield Outcome(request.id, answer=self.state(request))

    def state(self, request: Request) -> F32:
        """What the head makes the row of."""
        row = mock_row(request.tokens, self.info.vocab_size, request.adapter).astype(np.float64)
        found: F32 = (CAP * np.arctanh(row / CAP) / SCALE - self.head_bias()).astype(np.float32)
        return found

    def head_weights(self, rows: slice) -> F32:
        self._check_open()
        size = self.info.vocab_size
        return np.eye(size, dtype=np.float32)[rows]

    def head_bias(self) -> F32:
        self._check_open()
        return np.linspace(-1, 1, self.info.vocab_size, dtype=np.float32)
