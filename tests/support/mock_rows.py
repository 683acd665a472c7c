"""The mock engine's rows, which tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmpool.backends.mock import mock_row

VOCAB = 256


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Different prompts of 1 to 9 tokens."""
    random = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(random.integers(0, VOCAB, random.integers(1, 10)).tolist())] = None
    return [list(prompt) for prompt in found]


def rows_of(prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """The row of each prompt."""
    return np.stack([mock_row(prompt, VOCAB) for prompt in prompts])
