"""Log-probabilities as answers have them; `prompt_logprobs_json.py` writes many."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lmpool.gateway.prompt_logprobs_json import IMPOSSIBLE
from lmpool.wants import TextScores, TopLogprobs
from lmpool.wants.answers import Logprobs, TokenArray


def finite(logprob: float) -> float:
    """A number that JSON has: `IMPOSSIBLE` for what is not finite."""
    return float(logprob) if math.isfinite(logprob) else IMPOSSIBLE


def joined(
    first: tuple[TokenArray, TextScores] | None,
    ids: Sequence[int],
    logprobs: Logprobs | None,
    top: TopLogprobs | None,
) -> tuple[TokenArray, Logprobs, TopLogprobs | None]:
    """A prompt's scores, if it is echoed, and those of what was drawn after it, as one.

    The first token of a prompt, which nothing gives a probability, has nan.
    """
    drawn = np.asarray(ids, np.int32)
    of_drawn = np.zeros(0, np.float32) if logprobs is None else logprobs
    if first is None:
        return drawn, of_drawn, top
    tokens, scores = first
    numbers = np.concatenate([[np.float32(np.nan)], scores.logprobs, of_drawn]).astype(np.float32)
    parts = [part for part in (scores.top_logprobs, top) if part is not None]
    likely = None
    if parts:
        k = parts[0].token_ids.shape[1]
        likely = TopLogprobs(
            np.concatenate([np.zeros((1, k), np.int32), *(p.token_ids for p in parts)]),
            np.concatenate([np.zeros((1, k), np.float32), *(p.logprobs for p in parts)]),
            np.zeros(0, np.float32),
        )
    return np.concatenate([tokens, drawn]), numbers, likely
