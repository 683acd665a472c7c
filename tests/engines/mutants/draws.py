"""Engines that draw from another distribution than the one that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Request
from lmpool.backends.sampling import Sampler, sample_token
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.seeds import PLAIN, Asked
from tests.engines.mutants.witnesses import (
    ask_rightly,
    continuations,
    prompts_of,
    request,
    requests_of,
    scenario,
)


def _tall(engine: Engine) -> None:
    ask_rightly(engine, requests_of(prompts_of(6), want=Generate(30, (), 1.5, 9)))


@mutant("the-same-draw-every-step", continuations(PLAIN), forms=BOTH)
class SameDrawEveryStep(Sampler):
    """Each step has a draw of its own."""

    def draw(self, logprobs: F32, step: int) -> int:
        return super().draw(logprobs, 0)


@mutant("draws-repeat-after-16-tokens", continuations(replace(PLAIN, max_tokens=20)), subtle=True)
class DrawsRepeat(Sampler):
    """Each step has a draw of its own, also the 17th."""

    def draw(self, logprobs: F32, step: int) -> int:
        return super().draw(logprobs, step % 16)


@mutant("draws-counted-by-the-context", continuations(PLAIN))
class DrawsCountedFromOne(Sampler):
    """The first token is drawn at step 0."""

    def draw(self, logprobs: F32, step: int) -> int:
        return super().draw(logprobs, step + 1)


class _Tempered(Sampler):
    """Draws at another temperature."""

    def at(self, step: int) -> float:
        return self.temperature

    def draw(self, logprobs: F32, step: int) -> int:
        return sample_token(logprobs, self.at(step), self.seed, step)


@mutant(
    "temperature-for-the-first-token-alone",
    continuations(replace(PLAIN, temperature=0.4)),
    forms=BOTH,
)
class TemperatureForTheFirstToken(_Tempered):
    """A temperature holds for every token."""

    def at(self, step: int) -> float:
        return self.temperature if step == 0 else 1.0


@mutant(
    "temperature-below-0.3-is-greedy",
    continuations(replace(PLAIN, temperature=0.29, max_tokens=30)),
    forms=BOTH,
)
class LowTemperatureIsGreedy(_Tempered):
    """Temperature 0 alone is greedy."""

    def at(self, step: int) -> float:
        return 0.0 if self.temperature < 0.3 else self.temperature


@mutant(
    "temperature-over-2-is-2",
    continuations(replace(PLAIN, temperature=4.0, max_tokens=30)),
    subtle=True,
)
class HighTemperatureIsTwo(_Tempered):
    """A temperature may be any finite number."""

    def at(self, step: int) -> float:
        return min(self.temperature, 2.0)


@mutant("temperature-0-is-1", continuations(replace(PLAIN, temperature=0.0)))
class GreedyDraws(_Tempered):
    """Temperature 0 takes the likeliest token."""

    def at(self, step: int) -> float:
        return self.temperature or 1.0


@mutant(
    "temperature-in-whole-tenths",
    continuations(replace(PLAIN, temperature=0.84, max_tokens=40)),
    subtle=True,
)
class TemperatureRounded(_Tempered):
    """A temperature is taken as it is."""

    def at(self, step: int) -> float:
        return round(self.temperature, 1)


@mutant(
    "temperature-twice-for-adapters",
    continuations(replace(PLAIN, temperature=0.6), adapter="a"),
    forms=BOTH,
)
class TemperatureTwiceForAdapters(Asked):
    """A temperature is applied once, with an adapter, too."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return want if request.adapter is None else replace(want, temperature=want.temperature**2)


@mutant(
    "temperature-of-the-first-of-a-batch-for-all",
    scenario(
        lambda engine: ask_rightly(
            engine,
            [
                request(n, [n], None, replace(PLAIN, temperature=t))
                for n, t in enumerate((1.0, 0.1))
            ],
        )
    ),
)
class TemperatureOfTheFirst(Wrapper):
    """Continuations that are submitted at once have temperatures of their own."""

    def submit(self, requests: Sequence[Request]) -> None:
        first = next((r.want.temperature for r in requests if isinstance(r.want, Generate)), 1.0)
        super().submit(
            [
                replace(r, want=replace(r.want, temperature=first))
                if isinstance(r.want, Generate)
                else r
                for r in requests
            ]
        )


def _first(drawing: F32, most: int | float) -> F32:
    """The row with all but the likeliest left out: so many, or so much of the mass."""
    order = np.argsort(-drawing, kind="stable")
    if isinstance(most, float):
        mass = np.cumsum(np.exp(drawing[order].astype(np.float64)))
        most = int(np.searchsorted(mass, most)) + 1
    cut = np.full_like(drawing, -np.inf)
    cut[order[:most]] = drawing[order[:most]]
    return cut


@mutant("top-p-0.95", scenario(_tall), forms=BOTH)
class TopP(Sampler):
    """Every token of the vocabulary may be drawn: there is no top-p."""

    def draw(self, logprobs: F32, step: int) -> int:
        return super().draw(_first(logprobs, 0.95), step)


@mutant("top-k-50", scenario(_tall))
class TopK(Sampler):
    """Every token of the vocabulary may be drawn: there is no top-k."""

    def draw(self, logprobs: F32, step: int) -> int:
        return super().draw(_first(logprobs, 50), step)


@mutant(
    "one-token-continuations-are-greedy",
    continuations(replace(PLAIN, max_tokens=1), prompts=prompts_of(20)),
    subtle=True,
)
class OneTokenIsGreedy(Asked):
    """One token is drawn as the first of many is."""

    def instead(self, want: Generate, request: Request) -> Generate:
        return replace(want, temperature=0.0) if want.max_tokens == 1 else want
