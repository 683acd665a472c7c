"""Drawing tokens on the worker, so that a continuation costs one round trip instead of many.

A draw depends on the row, the temperature, the seed and the step alone: one seed and prompt give
one continuation, whatever else the engine computes meanwhile and in whatever order.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import EngineInfo, Request
from lmpool.uniforms import uniform
from lmpool.wants import Generate, Row


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


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the tokens of one continuation are drawn: a `Generate` with all that it leaves open.

    `max_tokens` is 0 where the prompt leaves no room.
    """

    max_tokens: int
    eos_token_ids: frozenset[int]
    temperature: float
    seed: int

    @classmethod
    def of(cls, want: Generate, prompt_tokens: int, info: EngineInfo) -> Sampler:
        """That of a prompt of so many tokens."""
        # The last row an engine can compute is that of its longest prompt.
        room = info.max_prompt_tokens - prompt_tokens + 1
        eos = info.eos_token_ids if want.eos_token_ids is None else want.eos_token_ids
        return cls(
            max_tokens=max(0, min(want.max_tokens, room)),
            eos_token_ids=frozenset(eos),
            temperature=want.temperature,
            seed=secrets.randbits(63) if want.seed is None else want.seed,
        )

    def draw(self, logprobs: npt.NDArray[np.float32], step: int) -> tuple[int, bool]:
        """The token after `step` others, and whether it ends the continuation and is no part of it.

        Raises `ValueError` for a row that has none to draw.
        """
        token = sample_token(logprobs, self.temperature, self.seed, step)
        return token, token in self.eos_token_ids


class Continuation:
    """One continuation on its way: the prompt, and the tokens drawn so far."""

    def __init__(self, request: Request, sampler: Sampler) -> None:
        self._request = replace(request, want=Row())
        self._sampler = sampler
        self._prompt_tokens = request.tokens.size
        self._drawn = 0
        self._tokens = np.empty(self._prompt_tokens + sampler.max_tokens, dtype=np.uint32)
        self._tokens[: self._prompt_tokens] = request.tokens
        self.finished = sampler.max_tokens == 0

    @property
    def id(self) -> bytes:
        """That of its request."""
        return self._request.id

    @property
    def adapter(self) -> str | None:
        """That of its request."""
        return self._request.adapter

    @property
    def drawn(self) -> npt.NDArray[np.uint32]:
        """The tokens drawn so far, uint32 [drawn], without the prompt."""
        start = self._prompt_tokens
        return self._tokens[start : start + self._drawn]

    def next_request(self) -> Request:
        """What to ask of the engine now: the row after the prompt and the tokens drawn so far."""
        return replace(self._request, tokens=self._tokens[: self._prompt_tokens + self._drawn])

    def take(self, logprobs: npt.NDArray[np.float32]) -> None:
        """Draw the next token from its row; `finished` tells whether it was the last."""
        token, ends = self._sampler.draw(logprobs, self._drawn)
        if ends:
            self.finished = True
            return
        self._tokens[self._prompt_tokens + self._drawn] = token
        self._drawn += 1
        self.finished = self._drawn == self._sampler.max_tokens
