"""Whether tokens were drawn from a distribution, by what is drawn together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.breaches import expect

Weights = npt.NDArray[np.float64]

_SIGMAS: Final = 5.5
_ENOUGH: Final = 24
_UNLIKELY: Final = -25.0
"""Log-probability of a continuation that two seeds do not both draw by chance."""


def heated(row: npt.NDArray[np.float32], temperature: float) -> Weights:
    """The probabilities float64 [vocab] at a temperature above 0."""
    logits = row.astype(np.float64)
    logits = (logits - logits.max()) / temperature
    weights: Weights = np.exp(logits)
    weights /= weights.sum()
    return weights


@dataclass(slots=True)
class _Sum:
    """A sum of what has the expectation 0 each, and its variance.

    `step` is how far one of them goes where that is much and rare, as with what happens or does
    not: then a single one is no sign (Bernstein's inequality).
    """

    step: float = 0.0
    count: int = 0
    total: float = 0.0
    variance: float = 0.0

    def add(self, value: float, variance: float) -> None:
        self.count += 1
        self.total += value
        self.variance += variance

    @property
    def sigmas(self) -> float:
        if self.count < _ENOUGH or self.variance < 1e-9:
            return 0.0
        return abs(self.total) / math.sqrt(self.variance + abs(self.total) * self.step / 3)


@dataclass(slots=True)
class Draws:
    """All draws that one engine made."""

    _sums: dict[str, _Sum] = field(default_factory=dict)
    _streams: dict[object, dict[int | None, tuple[list[int], float]]] = field(default_factory=dict)
    _before: tuple[float, int] | None = None

    def begin(self) -> None:
        """Another continuation begins."""
        self._before = None

    def draw(self, weights: Weights, token: int, what: str, seeded: bool) -> float:
        """A token was drawn of these; its log-probability."""
        with np.errstate(divide="ignore"):
            logs = np.log(weights)
        finite = weights > 0
        mean = float(weights[finite] @ logs[finite])
        variance = float(weights[finite] @ (logs[finite] - mean) ** 2)
        logprob = float(logs[token])
        expect(logprob > -60, "tokens are drawn from the model's row", f"{what} is impossible")
        if variance > 1e-6:
            self._add(f"log-probabilities {what}", logprob - mean, variance)
        place = float(weights[:token].sum() + weights[token] / 2)
        if self._before is not None and seeded:
            before, last = self._before
            if float(weights.max()) < 0.5:
                self._add("draws of one step and the next", (place - 0.5) * (before - 0.5), 1 / 144)
            chance = float(weights[last])
            self._event("tokens drawn twice", token == last, chance)
        self._before = (place, token)
        return logprob

    def end(self, weights: Weights, ids: frozenset[int], ended: bool) -> None:
        """A token was drawn that was one of the end tokens `ids`, or was not."""
        chance = min(1.0, float(weights[list(ids)].sum()))
        self._event("continuations that ended", ended, chance)

    def _event(self, what: str, happened: bool, chance: float) -> None:
        self._add(what, happened - chance, chance * (1 - chance), step=1.0)

    def _add(self, what: str, value: float, variance: float, step: float = 0.0) -> None:
        self._sums.setdefault(what, _Sum(step)).add(value, variance)

    def stream(self, key: object, seed: int | None, tokens: list[int], logprob: float) -> None:
        """One seed's continuation of what `key` stands for."""
        known = self._streams.setdefault(key, {})
        for other, (others, _) in known.items():
            common = min(len(tokens), len(others))
            alike = common > 0 and tokens[:common] == others[:common]
            same = seed == other and seed is not None
            expect(
                same or not alike or max(logprob, known[other][1]) > _UNLIKELY,
                "unlike seeds draw unlike",
                f"the seeds {other} and {seed} draw {tokens}",
            )
        if seed not in known or len(known[seed][0]) < len(tokens):
            known[seed] = tokens, logprob

    def check(self) -> None:
        """See to it that the draws so far follow the model."""
        for what, each in self._sums.items():
            expect(
                each.sigmas < _SIGMAS,
                "tokens are drawn from the model's row at the temperature asked for",
                f"{what} of {each.count} draws are {each.sigmas:.1f} standard deviations off",
            )
