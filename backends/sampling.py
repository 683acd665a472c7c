"""Drawing tokens on the worker, so that a continuation costs one round trip instead of many.

A draw depends on the row, the temperature, the seed and the step alone: one seed and prompt give
one continuation, whatever else the engine computes meanwhile and in whatever order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lmpool.backends.engine import Request, Sampling

_MASK64 = (1 << 64) - 1


def uniform(seed: int, step: int) -> float:
    """The draw in [0, 1) of `step` under `seed` (any int; equal modulo 2**64 draw alike).

    Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", SC 2011): any step can be drawn without the ones before it.
    """
    key = (seed & _MASK64) | ((step & _MASK64) << 64)
    raw = int(np.random.Philox(key=key).random_raw())
    return (raw >> 11) * 2.0**-53


def sample_token(
    logprobs: npt.NDArray[np.float32], temperature: float, seed: int, step: int
) -> int:
    """Draw the token that continues a prompt, by inverting the cumulative distribution.

    `logprobs` is float32 [vocab], natural log; it need not be normalized. `temperature` 0 takes
    the likeliest token, the lowest id among equals. A token of probability 0 is never drawn.

    Raises `ValueError` for a row with NaN or without any possible token, and for a temperature
    that is negative or not finite.
    """
    if not 0.0 <= temperature < np.inf:
        raise ValueError(f"temperature={temperature!r}: a finite number, 0 or more, expected")
    best = int(np.argmax(logprobs))  # the first NaN, if there is one
    top = float(logprobs[best])
    if not np.isfinite(top):
        raise ValueError(f"a row whose largest log-probability is {top} has no token to draw")
    if temperature == 0.0:
        return best
    with np.errstate(over="ignore"):
        weights = np.exp((logprobs.astype(np.float64) - top) / temperature)
    cumulative = np.cumsum(weights)
    target = uniform(seed, step) * cumulative[-1]
    drawn = int(np.searchsorted(cumulative, target, side="right"))
    # The product may round up to the total, past every token.
    return drawn if drawn < weights.size else int(np.flatnonzero(weights)[-1])


class Continuation:
    """One sampling request on its way: the prompt, and the tokens drawn so far."""

    def __init__(self, request: Request, sampling: Sampling, max_prompt_tokens: int) -> None:
        self._request = request
        self._sampling = sampling
        self._prompt_tokens = request.tokens.size
        # The last row an engine can compute is that of its longest prompt.
        room = max_prompt_tokens - self._prompt_tokens + 1
        self._limit = max(0, min(sampling.max_tokens, room))
        self._drawn = 0
        self._tokens = np.empty(self._prompt_tokens + self._limit, dtype=np.uint32)
        self._tokens[: self._prompt_tokens] = request.tokens
        self.finished = self._limit == 0

    @property
    def drawn(self) -> npt.NDArray[np.uint32]:
        """The tokens drawn so far, uint32 [drawn], without the prompt."""
        start = self._prompt_tokens
        return self._tokens[start : start + self._drawn]

    def next_request(self) -> Request:
        """What to ask of the engine now: the row after the prompt and the tokens drawn so far."""
        tokens = self._tokens[: self._prompt_tokens + self._drawn]
        return replace(self._request, tokens=tokens, want=None)

    def take(self, logprobs: npt.NDArray[np.float32]) -> None:
        """Draw the next token from its row; `finished` tells whether it was the last."""
        sampling = self._sampling
        token = sample_token(logprobs, sampling.temperature, sampling.seed, self._drawn)
        if token in sampling.eos_token_ids:
            self.finished = True
            return
        self._tokens[self._prompt_tokens + self._drawn] = token
        self._drawn += 1
        self.finished = self._drawn == self._limit
