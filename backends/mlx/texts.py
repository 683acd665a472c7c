"""Scoring texts on an MLX model: from hidden states to what is asked of their logits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import Outcome, Request, Tokens
from lmpool.backends.mlx.model import Forward, mx
from lmpool.backends.mlx.reduction import integers, score_logits, to_host
from lmpool.errors import PromptFailed
from lmpool.wants import Score

BLOCK_BYTES: Final = 16 << 20
"""Of logits in float32 that are there at once."""


def scored(
    forward: Forward, request: Request, states: Any, vocab_size: int, *, reduce: bool
) -> Outcome:
    """The outcome of a text, by the states [positions, hidden] before its scored tokens.

    With `reduce` logits are reduced where MLX has them, else by NumPy.
    """
    want, targets = score_of(request), request.tokens
    scores, start = want.blank(targets.size - want.start), want.start
    rows = max(1, BLOCK_BYTES // (4 * vocab_size))
    reduced = _by_mlx if reduce else _by_numpy
    for at in range(start, targets.size, rows):
        stop = min(at + rows, targets.size)
        logits = forward.head(states[at - start : stop - start]).astype(mx.float32)
        mx.eval(logits)
        try:
            found = reduced(want.piece(at, stop), logits, targets[at:stop])
        except PromptFailed as error:
            return Outcome(request.id, error=error)
        for whole, part in zip(scores.arrays(), found, strict=True):
            whole[at - start : stop - start] = part
    return Outcome(request.id, answer=scores)


def _by_numpy(want: Score, logits: Any, targets: Tokens) -> list[npt.NDArray[Any]]:
    return want.of_rows(np.array(logits), targets).arrays()


def _by_mlx(want: Score, logits: Any, targets: Tokens) -> list[npt.NDArray[Any]]:
    ids = want.ids_of(targets.size)
    *parts, logsumexp = score_logits(
        logits,
        integers(targets),
        token_ids=None if ids is None else integers(ids),
        top=want.top_logprobs,
        temperature=want.temperature,
    )
    mx.eval(parts, logsumexp)
    for scale in logsumexp.tolist():
        error = Outcome.of_row(b"", np.empty(0, np.float32), scale).error
        if error is not None:
            raise error
    return [to_host(part) for part in parts if part is not None]


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
