"""Hidden states after prompts, and the head that makes rows of them, inside vLLM's model runner.

A request's state is kept whose sampling parameters carry an id under `HIDDEN` that begins with its
owner's secret, as `capture` has it, and the position of its prompt's last token under `LAST`. It is
kept, and taken, as rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.head_fit import NoHead, fitted
from lmpool.backends.text_scores import Head
from lmpool.backends.torch_head import F32, HeadMatrix, as_numbers
from lmpool.backends.vllm import internals
from lmpool.backends.vllm.hidden_states import Spans, adapters_off_the_head, head_layer, watch
from lmpool.backends.vllm.row_store import HostCopy, RowStore
from lmpool.head_form import HeadForm

HIDDEN: Final = "lmpool_hidden"
"""The key of `SamplingParams.extra_args` whose value, a str, asks for a state and names it."""

LAST: Final = "lmpool_last"
"""The key of the position whose state it is."""

Asking = Callable[[], Iterable[tuple[int, str, Mapping[str, Any]]]]
"""The requests that ask for states: the place of each, its name, and its `extra_args`."""


class StateBlock:
    """The states that were computed in one step, on their way to the host.

    `states` is [rows, hidden], and nobody writes it.
    """

    def __init__(self, states: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        wide = states.float()
        self.nbytes = wide.nbytes
        self._copy = HostCopy([wide, wide.abs().amax(dim=-1)], stream)

    def read(self) -> tuple[F32, F32]:
        """The states on the host, and the largest number of each. Waits for the copy."""
        states, largest = self._copy.read()
        return states, largest


class States:
    """Puts the states that somebody asks for into `rows`, the store of the owner's rows."""

    def __init__(self, rows: Callable[[], RowStore], asking: Asking) -> None:
        self._rows = rows
        self._asking = asking
        self._stream: torch.cuda.Stream | None = None

    def see(self, hidden: torch.Tensor, spans: Spans, head: Head) -> None:
        """Keep what a step has computed of the states asked for."""
        asking = list(self._asking())
        if not asking:
            return
        where, names, rows = spans([place for place, _, _ in asking]), [], []
        for place, name, extra in asking:
            span = where.get(place)
            if span is not None and 0 <= (after := extra[LAST] - span.first) < span.count:
                names.append(name)
                rows.append(span.offset + after)
        if rows:
            if self._stream is None and hidden.is_cuda:
                self._stream = torch.cuda.Stream(hidden.device)
            self._rows().put(names, StateBlock(hidden[rows], self._stream))


class WorkersHead:
    """The head of the model that a runner has, tried by what the runner makes of states.

    Raises `NoHead` where it is no plain matrix.
    """

    def __init__(self, model_runner: Any) -> None:
        self._model: Any = model_runner.get_model()
        self._vocab_size = int(model_runner.model_config.get_vocab_size())
        with torch.inference_mode(), adapters_off_the_head(self._model):
            layer, bias = head_layer(self._model, model_runner.model_config)
        self.matrix = HeadMatrix(layer, self._vocab_size, bias)
        self._dtype = model_runner.model_config.dtype

    @property
    def form(self) -> HeadForm:
        """What it is where nothing lies behind its matrix."""
        return HeadForm(self.matrix.hidden_size, self.matrix.numbers, bias=self.matrix.biased)

    def fit(self, states: F32, rows: F32, known: Sequence[float]) -> HeadForm:
        """What it is, by states and the rows (log-probabilities) after the same prompts.

        Raises `NoHead` where its matrix does not make these rows of the states.
        """
        with torch.inference_mode(), adapters_off_the_head(self._model):
            # A row as logits: what it lacks is one number.
            own = torch.from_numpy(self._logits(states)[0]).logsumexp(dim=-1, keepdim=True)
            logits = rows[:, : self._vocab_size] + own.numpy()
            matrix = self.matrix
            return fitted(
                states,
                logits,
                matrix.products,
                self._logits,
                known,
                matrix.numbers,
                bias=matrix.biased,
            )

    def _logits(self, states: F32) -> tuple[F32, F32]:
        placed = torch.from_numpy(states).to(self.matrix.device, self._dtype)
        logits = self._model.compute_logits(placed)
        return as_numbers(logits[:, : self._vocab_size]), as_numbers(placed)


class HeadWorker:
    """What vLLM's workers are extended by for hidden states, wherever the worker runs."""

    model_runner: Any
    _lmpool_head: WorkersHead

    def lmpool_attach_states(self) -> dict[str, Any] | str:
        """Keep the states that the capture's owner asks for.

        Returns what the head's matrix is, as `HeadForm.of` reads it, or why there is none.
        """
        capture = internals.find_capture(self.model_runner)
        if capture is None:
            return "its model runner has no place for lmpool's logits processor"
        try:
            self._lmpool_head = WorkersHead(self.model_runner)
        except NoHead as error:
            return str(error)
        if not capture.gives_states:
            states = States(lambda: capture.rows, lambda: capture.asking_for(HIDDEN))
            if not watch(self.model_runner, states.see):
                return "its model runner shows no hidden states"
            capture.gives_states = True
        return asdict(self._lmpool_head.form)

    def lmpool_fit_head(
        self, states: bytes, rows: bytes, known: Sequence[float]
    ) -> dict[str, Any] | str:
        """What the head is, or why there is none, by float32 states and rows of prompts."""
        own = np.frombuffer(states, np.float32).reshape(-1, self._lmpool_head.matrix.hidden_size)
        right = np.frombuffer(rows, np.float32).reshape(len(own), -1)
        try:
            return asdict(self._lmpool_head.fit(own.copy(), right, known))
        except NoHead as error:
            return str(error)

    def lmpool_head_weights(self, start: int, stop: int) -> bytes:
        """The bytes of these rows of the matrix."""
        return self._lmpool_head.matrix.weights(slice(start, stop)).tobytes()

    def lmpool_head_bias(self) -> bytes:
        """The bytes of the bias, float32."""
        bias: npt.NDArray[np.float32] = self._lmpool_head.matrix.bias()
        return bias.tobytes()
