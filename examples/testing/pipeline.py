"""A small pipeline, as a user may have one: which of several words a model would go on with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import lmpool
from lmpool.errors import PromptFailed
from lmpool.wants import Score

SURE = 0.5
"""The share of the likeliest word below which there is no answer."""


async def choose(
    lm: lmpool.PooledLM[lmpool.NumpyRows],
    prompt: Sequence[int],
    words: Sequence[Sequence[int]],
    timeout: float = 30.0,
) -> int | None:
    """The number of the word that is likeliest behind the prompt; None where no word stands out.

    Words and prompt are token ids. A prompt that fails is asked once more. Raises what the pool
    raises then, and `lmpool.errors.PoolTimeout`.
    """
    asks = [([*prompt, *word], Score(start=len(prompt))) for word in words]
    try:
        scores = await lm.ask_many(asks, timeout=timeout)
    except PromptFailed:
        scores = await lm.ask_many(asks, timeout=timeout)
    totals = np.array([score.total for score in scores])
    shares = np.exp(totals - np.logaddexp.reduce(totals))
    best = int(shares.argmax())
    return best if shares[best] >= SURE else None
