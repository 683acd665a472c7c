"""Scoring texts on an MLX model: from hidden states to what is asked of their logits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from lmpool.backends.engine import Outcome, Request, Tokens
from lmpool.backends.mlx.model import Forward, mx
from lmpool.errors import PromptFailed
from lmpool.wants import Score

BLOCK_BYTES: Final = 16 << 20
"""Of logits in float32 that are there at once."""


def scored(forward: Forward, request: Request, states: Any, vocab_size: int) -> Outcome:
    """The outcome of a text, by the states [positions, hidden] before its scored tokens."""
    want, targets = score_of(request), request.tokens
    scores, start = want.blank(targets.size - want.start), want.start
    rows = max(1, BLOCK_BYTES // (4 * vocab_size))
    for at in range(start, targets.size, rows):
        stop = min(at + rows, targets.size)
        logits = forward.head(states[at - start : stop - start]).astype(mx.float32)
        mx.eval(logits)
        try:
            found = want.piece(at, stop).of_rows(np.array(logits), targets[at:stop])
        except PromptFailed as error:
            return Outcome(request.id, error=error)
        for whole, part in zip(scores.arrays(), found.arrays(), strict=True):
            whole[at - start : stop - start] = part
    return Outcome(request.id, answer=scores)


def score_of(request: Request) -> Score:
    """What is wanted of a text."""
    assert isinstance(request.want, Score)
    return request.want


def before(request: Request) -> int:
    """How many of a text's tokens may come without their states: those before the first row."""
    return score_of(request).start - 1


def problem_of_head(forward: Forward, prompt: Tokens, tolerance: float) -> str:
    """Why the head alone does not give the rows of a prompt's beginnings; '' where it does."""
    try:
        found = forward.head(forward.states_plainly([prompt])[0])
        right = mx.stack([forward.plainly([prompt[: n + 1]])[0] for n in range(prompt.size)])
        worst = float(mx.abs(found - right).max())
    except Exception as error:  # a model with a head of its own kind
        return f"{type(error).__name__}: {error}"
    return "" if worst <= tolerance else f"its logits differ by {worst:.2g}"
