"""The head of SGLang's model, tried in its own forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lmpool.backends.engine import Tokens
from lmpool.backends.head_fit import NoHead, fitted, numbers_of
from lmpool.backends.torch_head import F32, HeadMatrix, as_numbers
from lmpool.head_form import HeadForm

_SAME = 1e-3
"""By how much a state that is given out may differ from what the head saw."""


class ModelHead:
    """The head of a model: its form, and its matrix."""

    def __init__(self, form: HeadForm, matrix: HeadMatrix) -> None:
        self.form = form
        self.matrix = matrix


class HeadTrial:
    """Looks at what the head sees and makes while prompts run, and fits it.

    Relies on `_get_logits` of a `LogitsProcessor`, which is given states, the head's layer (or what
    wraps it for adapters) and what belongs to the batch, and returns logits.
    """

    def __init__(self, logits_processor: Any, vocab_size: int, config: Mapping[str, Any]) -> None:
        self._processor = logits_processor
        self._vocab_size = vocab_size
        self._known = numbers_of(config)
        self._seen: list[tuple[F32, ModelHead]] = []
        self._error: Exception | None = None

    def run(self, prompts: Iterable[Tokens], state_of: Callable[[Tokens], F32]) -> ModelHead:
        """The head, by prompts of which `state_of` computes each alone.

        Raises `NoHead` where it has none that others may apply.
        """
        for prompt in prompts:
            with self._watching():
                state = state_of(prompt)
            if self._error is not None:
                raise self._error
            states = self._seen[-1][0]
            largest = np.abs(states).max()
            if states.shape != (1, state.size) or np.abs(states[0] - state).max() > _SAME * largest:
                raise NoHead("its hidden states are not what its head sees")
        if len({head.form for _, head in self._seen}) != 1:
            raise NoHead("its head is not the same for all prompts")
        return self._seen[-1][1]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        compute = self._processor._get_logits

        def watched(states: torch.Tensor, layer: Any, *given: Any, **named: Any) -> torch.Tensor:
            logits: torch.Tensor = compute(states, layer, *given, **named)
            try:
                self._fit(states, layer, logits, lambda s, own: compute(s, own, *given))
            except Exception as error:  # SGLang would break of it
                self._error = error
            return logits

        self._processor._get_logits = watched
        try:
            yield
        finally:
            self._processor._get_logits = compute

    def _fit(
        self,
        states: torch.Tensor,
        layer: Any,
        logits: torch.Tensor,
        compute: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> None:
        base = getattr(layer, "base_layer", layer)
        matrix = HeadMatrix(base, self._vocab_size)

        def model(made: F32) -> tuple[F32, F32]:
            placed = torch.from_numpy(made).to(states.device, states.dtype)
            found = compute(placed, base)[:, : self._vocab_size]
            return as_numbers(found), as_numbers(placed)

        real, rows = as_numbers(states), as_numbers(logits[:, : self._vocab_size])
        form = fitted(real, rows, matrix.products, model, self._known, matrix.numbers, bias=False)
        self._seen.append((real, ModelHead(form, matrix)))
