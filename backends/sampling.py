"""Drawing tokens on the worker, so that a continuation costs one round trip instead of many.

A draw depends on the row, on how the want has it drawn, the seed and the step alone: one seed and
prompt give one continuation, whatever else the engine computes meanwhile and in whatever order.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import EngineInfo, NextToken, Request
from lmpool.uniforms import uniform
from lmpool.wants import FinishReason, Generate, Generation, Row, Top, TopLogprobs

Row32 = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]


def sample_token(
    logprobs: Row32,
    temperature: float,
    seed: int,
    step: int,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> int:
    """Draw the token that continues a prompt, by inverting the cumulative distribution.

    `logprobs` is float32 [vocab], natural log; it need not be normalized. `temperature` 0 takes
    the likeliest token, the lowest id among equals. What `top_p`, `top_k` and `min_p` leave of the
    tokens is said at `Generate`. A token of probability 0 is never drawn.

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
    leave_out(weights, logprobs, top_p, top_k, min_p)
    cumulative = np.cumsum(weights)
    target = uniform(seed, step) * cumulative[-1]
    drawn = int(np.searchsorted(cumulative, target, side="right"))
    # The product may round up to the total, past every token.
    return drawn if drawn < weights.size else int(np.flatnonzero(weights)[-1])


def leave_out(weights: Weights, logprobs: Row32, top_p: float, top_k: int, min_p: float) -> None:
    """Set the weights of tokens to 0 that may not be drawn; that of the likeliest is 1."""
    if min_p > 0.0:
        weights[weights < min_p] = 0.0
    if 0 < top_k < weights.size:
        least = np.partition(logprobs, weights.size - top_k)[weights.size - top_k]
        weights[logprobs < least] = 0.0
    if top_p < 1.0:
        total = float(weights.sum())
        # Those below have less than the rest of the mass together: they need no sorting.
        likely = np.flatnonzero(weights * weights.size >= (1.0 - top_p) * total)
        order = likely[np.argsort(-logprobs[likely], kind="stable")]
        sorted_weights = weights[order]
        before = np.cumsum(sorted_weights) - sorted_weights
        kept = before < top_p * total
        weights[:] = 0.0
        weights[order[kept]] = sorted_weights[kept]


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the tokens of one continuation are drawn: a `Generate` with all that it leaves open.

    After `max_tokens` it ends, by the reason `bound`. A stop sequence that is the end of another
    one is found when that other is not: `stop` has the longest first.
    """

    max_tokens: int
    bound: FinishReason
    eos_token_ids: frozenset[int]
    temperature: float
    seed: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[tuple[int, ...], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    @classmethod
    def of(cls, want: Generate, prompt_tokens: int, info: EngineInfo) -> Sampler:
        """That of a prompt of so many tokens."""
        # The last row an engine can compute is that of its longest prompt.
        room = max(0, info.max_prompt_tokens - prompt_tokens + 1)
        eos = info.eos_token_ids if want.eos_token_ids is None else want.eos_token_ids
        return cls(
            max_tokens=min(want.max_tokens, room),
            bound="length" if want.max_tokens <= room else "context",
            eos_token_ids=frozenset(eos),
            temperature=want.temperature,
            seed=secrets.randbits(63) if want.seed is None else want.seed,
            top_p=want.top_p,
            top_k=want.top_k,
            min_p=want.min_p,
            stop=tuple(sorted(want.stop_sequences, key=len, reverse=True)),
            logprobs=want.logprobs,
            top_logprobs=want.top_logprobs,
        )

    def draw(self, logprobs: Row32, step: int) -> int:
        """The token after `step` others. Raises `ValueError` for a row that has none to draw."""
        return sample_token(
            logprobs,
            self.temperature,
            self.seed,
            step,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )

    def next_token(self, step: int) -> NextToken:
        """How the token after `step` others is drawn."""
        left = (self.top_p, self.top_k, self.min_p)
        return NextToken(self.seed, step, self.temperature, *left, self.top_logprobs)

    def end(self, drawn: Sequence[int] | npt.NDArray[np.uint32]) -> tuple[FinishReason, int] | None:
        """Why these tokens, without the prompt, are all, and how many of them are the ending."""
        if len(drawn) and int(drawn[-1]) in self.eos_token_ids:
            return "eos", 1
        for ids in self.stop:
            if len(drawn) >= len(ids) and tuple(drawn[-len(ids) :]) == ids:
                return "stop", len(ids)
        return (self.bound, 0) if len(drawn) >= self.max_tokens else None


class Continuation:
    """One continuation on its way: the prompt, and the tokens drawn so far."""

    def __init__(self, request: Request, sampler: Sampler) -> None:
        self.sampler = sampler
        self._request = replace(request, want=Row(), begun=())
        self._prompt_tokens = request.tokens.size
        self._drawn = 0
        self._tokens = np.empty(self._prompt_tokens + sampler.max_tokens, dtype=np.uint32)
        self._tokens[: self._prompt_tokens] = request.tokens
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._end = sampler.end(())
        self._begun = request.begun
        for part in request.begun:
            self.go_on(part)

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

    @property
    def left(self) -> int:
        """How many more it may have."""
        return self.sampler.max_tokens - self._drawn

    @property
    def finished(self) -> bool:
        """Whether it has its last token."""
        return self._end is not None

    def anew(self) -> Continuation:
        """The same with nothing drawn yet but what was begun elsewhere."""
        prompt = self._tokens[: self._prompt_tokens]
        return Continuation(replace(self._request, tokens=prompt, begun=self._begun), self.sampler)

    def next_request(self) -> Request:
        """What to ask of the engine now: the row after the prompt and the tokens drawn so far."""
        tokens = self._tokens[: self._prompt_tokens + self._drawn]
        return replace(self._request, tokens=tokens, next=self.next_token())

    def next_token(self) -> NextToken:
        """How its next token is drawn."""
        return self.sampler.next_token(self._drawn)

    def take(self, logprobs: Row32) -> int:
        """Draw the next token from its row, and return it; `finished` tells whether it is the last.

        Raises `ValueError` for a row that has none to draw.
        """
        token = self.sampler.draw(logprobs, self._drawn)
        top = Top(self.sampler.top_logprobs).of_row(logprobs) if self.sampler.top_logprobs else None
        self.add(token, float(logprobs[token]), top)
        return token

    def add(
        self, token: int, logprob: float = math.nan, top_logprobs: TopLogprobs | None = None
    ) -> None:
        """Go on with a token that was drawn, and what was asked for of its row."""
        self._tokens[self._prompt_tokens + self._drawn] = token
        self._drawn += 1
        if self.sampler.logprobs:
            self._logprobs.append(logprob)
        if top_logprobs is not None:
            self._top_logprobs.append(top_logprobs)
        self._end = self.sampler.end(self.drawn)

    def go_on(self, part: Generation) -> None:
        """Go on with tokens that were drawn elsewhere, up to the last one."""
        top = part.top_logprobs
        for place, token in enumerate(part.token_ids.tolist()):
            if not self.finished:
                logprob = math.nan if part.logprobs is None else float(part.logprobs[place])
                self.add(token, logprob, None if top is None else _at(top, place))

    def answer(self) -> Generation:
        """What was drawn, of one that is finished."""
        assert self._end is not None
        reason, ending = self._end
        return self._answer(0, reason, ending)

    def behind(self, start: int) -> Generation:
        """What was drawn behind the first `start` tokens, as an answer that has these alone."""
        return self._answer(start, self.sampler.bound, 0)

    def _answer(self, start: int, reason: FinishReason, ending: int) -> Generation:
        logprobs = np.array(self._logprobs[start:], np.float32) if self.sampler.logprobs else None
        drawn = self.drawn[start:].astype(np.int32)
        return Generation(drawn, ending, reason, logprobs, self._top(start))

    def _top(self, start: int) -> TopLogprobs | None:
        k = self.sampler.top_logprobs
        if not k:
            return None
        steps = self._top_logprobs[start:]
        return TopLogprobs(
            np.array([each.token_ids for each in steps], np.int32).reshape(-1, k),
            np.array([each.logprobs for each in steps], np.float32).reshape(-1, k),
            np.array([each.rest for each in steps], np.float32),
        )


def _at(top: TopLogprobs, place: int) -> TopLogprobs:
    """The likeliest tokens of one step."""
    rest = np.asarray(top.rest, np.float32)
    return TopLogprobs(top.token_ids[place], top.logprobs[place], rest[place])
