"""The head of an engine under test, as the engine says it itself.

What it makes of each hidden state must be the row of the prompt: so nobody needs to know what a
model's states are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.asking import ask, request_for
from lmpool.backends.contract.breaches import expect
from lmpool.backends.engine import Engine
from lmpool.head_form import HeadForm
from lmpool.wants import HeadBytes, HeadPart
from lmpool.wants.hidden import widened

States = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ReadHead:
    """An engine's head as it said it itself: its `parts`, and what they make of states."""

    form: HeadForm
    parts: Sequence[bytes]
    weight: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float64] | None

    def logprobs(self, states: States) -> npt.NDArray[np.float64]:
        """The rows [n, vocab] of states [n, hidden_size]."""
        logits = states.astype(np.float64) @ self.weight.T
        if self.bias is not None:
            logits += self.bias
        logits *= self.form.scale
        if self.form.cap is not None:
            logits = self.form.cap * np.tanh(logits / self.form.cap)
        logits -= logits.max(axis=1, keepdims=True)
        found: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return found


def read_head(engine: Engine) -> ReadHead | None:
    """The head of an engine that has hidden states. Raises `BrokenPromise`."""
    form, vocab = engine.info.head, engine.info.vocab_size
    if form is None:
        return None
    wants = [HeadPart(number) for number in range(form.parts(vocab))]
    outcomes = ask(engine, [request_for([0], want=want) for want in wants])
    parts = []
    for want, outcome in zip(wants, outcomes, strict=True):
        answer, size = outcome.answer, form.part_bytes(want.number, vocab)
        expect(
            isinstance(answer, HeadBytes) and answer.data.nbytes == size,
            "an engine with info.head has each part of it",
            f"part {want.number}: {outcome.error or type(answer)}",
        )
        assert isinstance(answer, HeadBytes)
        parts.append(answer.data.tobytes())
    matrix = b"".join(parts[: form.weight_parts(vocab)])
    weight = widened(form.numbers, matrix).reshape(vocab, form.hidden_size).astype(np.float64)
    bias = np.frombuffer(parts[-1], "<f4").astype(np.float64) if form.bias else None
    return ReadHead(form, parts, weight, bias)
