"""The want of tokens drawn from what follows a prompt."""

from __future__ import annotations

import math
import secrets
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from lmpool.checks import as_integer, as_number, quoted
from lmpool.errors import JobFormatError, PromptError, PromptFailed
from lmpool.model_info import ModelInfo
from lmpool.uniforms import uniform
from lmpool.wants import packing
from lmpool.wants.answers import Draws, Logprobs, TokenArray
from lmpool.wants.choice import Choice, TokenSet
from lmpool.wants.generate import MAX_SEED
from lmpool.wants.of_row import OfRow
from lmpool.wants.top import likeliest

MAX_DRAWS: Final = 4096
_CANCELS: Final = 1e-6
"""The share of all weight under which what is left of it is summed anew."""
_TAKEN_MOST: Final = 64
"""Drawn tokens that are stepped over; with more, what is left is summed anew, too."""

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draw(OfRow[Draws]):
    """`n` tokens drawn at a `temperature` (0: the likeliest), with or without `replacement`.

    Draw i inverts the cumulative distribution, in the order of ids, at the i-th uniform number of
    the `seed`; without replacement what was drawn is taken out first. So draws of a seed are the
    same on every engine, but within rounding, and the first of more are those of fewer. Without a
    seed every ask draws anew; in a batch, prompt i has `seed` + i.

    Only what is `allowed`, and not `excluded`, is drawn: see `TokenSet`. Of a checked want
    `allowed` holds both, as a `Choice`.
    """

    kind: ClassVar[str] = "draw"
    answer_type: ClassVar[type[Draws]] = Draws
    cached: ClassVar[bool] = False
    form: ClassVar[int] = 4

    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    replacement: bool = True
    allowed: TokenSet | Choice | None = None
    excluded: TokenSet | None = None

    def checked(self, info: ModelInfo) -> Draw:
        """With every default but the seed resolved for a model. Raises `PromptError`."""
        n, seed = as_integer(self.n), None if self.seed is None else as_integer(self.seed)
        if n is None or not 1 <= n <= MAX_DRAWS:
            raise PromptError(f"n={quoted(self.n)}: write an integer from 1 to {MAX_DRAWS}")
        if seed is None and self.seed is not None:
            raise PromptError(f"seed={quoted(self.seed)}: write an integer, or None")
        temperature = as_number(self.temperature)
        if temperature is None or not 0 <= temperature < math.inf:
            raise PromptError(
                f"temperature={quoted(self.temperature)}: write a number of 0 (greedy) or more"
            )
        if type(self.replacement) is not bool:
            raise PromptError(f"replacement={quoted(self.replacement)}: write True or False")
        choice = self._choice(info.vocab_size)
        most = info.vocab_size if choice is None else int(choice.members(info.vocab_size).sum())
        if n > most and not self.replacement:
            raise PromptError(f"n={n} without replacement: {most} tokens may be drawn")
        seed = None if seed is None else seed & MAX_SEED
        return Draw(n, seed, packing.plain_zero(temperature), self.replacement, choice)

    def _choice(self, size: int) -> Choice | None:
        if self.allowed is None and self.excluded is None:
            return None
        if not isinstance(self.allowed, Choice):
            return Choice.of(self.allowed, self.excluded, size)
        if self.excluded is not None:
            raise PromptError("allowed: a Choice says what is excluded, too")
        return self.allowed.checked(size)

    @property
    def repeats(self) -> bool:
        """False: in a batch each prompt has a seed of its own."""
        return False

    def each(self, count: int) -> Sequence[Self]:
        """This want for `count` prompts: by a seed and those that follow, or by fresh ones."""
        if self.seed is None:
            return [replace(self, seed=secrets.randbits(63)) for _ in range(count)]
        return [replace(self, seed=(self.seed + i) & MAX_SEED) for i in range(count)]

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about."""
        return 12 * self.n

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        choice = self.allowed
        form = [None, None] if choice is None else [choice.form, choice.data]  # type: ignore[union-attr]
        return [self.n, self.seed, self.temperature, self.replacement, *form]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Draw:
        """Read `fields`. Raises `JobFormatError`."""
        n, seed, temperature, replacement, form, data = packing.expect(cls.kind, fields, 6)
        if type(seed) is not int:
            raise JobFormatError(f"seed={seed!r:.40}: an integer expected")
        if type(replacement) is not bool:
            raise JobFormatError(f"replacement={replacement!r:.40}: true or false expected")
        return cls(
            packing.expect_integer("n", n, 1, MAX_DRAWS),
            seed,
            packing.expect_number("temperature", temperature),
            replacement,
            Choice.read(form, data),
        )

    def misfit(self, vocab_size: int) -> str | None:
        """Why rows of this size cannot answer it; None where they can."""
        return self.allowed.misfit(vocab_size) if isinstance(self.allowed, Choice) else None

    def of_row(self, logprobs: Logprobs) -> Draws:
        """That of a row, float32 [vocab_size].

        Raises `PromptFailed` where too few of the tokens that may be drawn have a probability.
        """
        assert self.seed is not None
        may = self.allowed
        row = logprobs
        if isinstance(may, Choice):
            row = np.where(may.members(logprobs.size), logprobs, np.float32(-np.inf))
        possible = int(np.count_nonzero(row > -np.inf))
        if possible < (1 if self.replacement else self.n):
            raise PromptFailed(f"{possible} of the tokens that may be drawn have a probability")
        if self.temperature == 0.0:
            ids, proposals, mass = self._likeliest(row, logprobs)
        else:
            ids, proposals, mass = self._drawn(row, logprobs)
        with np.errstate(over="ignore"):  # at a tiny temperature
            share = np.float32(mass)
        # Rounding may lead above 0.
        return Draws(ids, logprobs[ids], np.minimum(proposals, 0.0).astype(np.float32), share)

    def pack(self, answer: Draws, vocab_size: int) -> bytes:
        """An answer as it is stored."""
        return packing.pack(
            self.form,
            packing.floats(answer.log_mass),
            packing.floats(answer.logprobs),
            packing.floats(answer.proposal_logprobs),
            packing.ids(answer.token_ids, vocab_size),
        )

    def decode(self, data: bytes, info: ModelInfo) -> Draws:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""
        numbers, n = packing.unpack(self.form, data, "draws"), self.n
        packing.expect_size(numbers, 4 + n * (8 + packing.id_bytes(info.vocab_size)), "draws")
        found = packing.read_floats(numbers, 0, 1 + 2 * n)
        ids = packing.read_ids(numbers, 4 + 8 * n, n, info.vocab_size)
        return Draws(ids, found[1 : 1 + n], found[1 + n :], found[0])

    def _likeliest(self, row: Logprobs, logprobs: Logprobs) -> tuple[TokenArray, Weights, float]:
        ids = likeliest(row, 1 if self.replacement else self.n)
        mass = 0.0 if row.max() == logprobs.max() else -math.inf
        return np.resize(ids, self.n), np.zeros(self.n), mass

    def _drawn(self, row: Logprobs, logprobs: Logprobs) -> tuple[TokenArray, Weights, float]:
        assert self.seed is not None
        if self.replacement:
            ids, proposals = _with_replacement(row, self.temperature, self.n, self.seed)
        else:
            ids, proposals = _without_replacement(row, self.temperature, self.n, self.seed)
        mass = 0.0 if row is logprobs else _log_share(row, logprobs, self.temperature)
        return ids, proposals, mass


def _log_share(row: Logprobs, logprobs: Logprobs, temperature: float) -> float:
    """The log of what `row` has of all the mass at a temperature."""
    some = float(np.exp(_scaled(row, temperature)).sum())
    everything = float(np.exp(_scaled(logprobs, temperature)).sum())
    below = (float(row.max()) - float(logprobs.max())) / temperature
    return min(0.0, math.log(some) + below - math.log(everything))


def _scaled(row: Logprobs, temperature: float) -> Weights:
    """Log-probabilities at a temperature, 0 of the likeliest."""
    with np.errstate(over="ignore"):
        scaled: Weights = (row.astype(np.float64) - float(row.max())) / temperature
    return scaled


def _with_replacement(
    row: Logprobs, temperature: float, n: int, seed: int
) -> tuple[TokenArray, Weights]:
    """`n` ids, and the log-probability of each."""
    scaled = _scaled(row, temperature)
    weights = np.exp(scaled)
    cumulative = np.cumsum(weights)
    total = float(cumulative[-1])
    at = np.array([uniform(seed, i) for i in range(n)]) * total
    found = np.searchsorted(cumulative, at, side="right")
    # The product may round up to the total, past every token.
    ids = np.minimum(found, int(np.flatnonzero(weights)[-1])).astype(np.int32)
    return ids, scaled[ids] - math.log(total)


def _without_replacement(
    row: Logprobs, temperature: float, n: int, seed: int
) -> tuple[TokenArray, Weights]:
    """`n` ids, each drawn from what the ones before left, and the log-probability of each then."""
    ids, proposals = np.empty(n, np.int32), np.empty(n)
    row, drawn = row.copy(), 0
    while drawn < n:
        # Summed anew, beside the likeliest that is left: what is unlikely now may be all there is.
        scaled = _scaled(row, temperature)
        weights = np.exp(scaled)
        cumulative = np.cumsum(weights)
        total = left = float(cumulative[-1])
        taken: list[int] = []
        while drawn < n and len(taken) < _TAKEN_MOST and left > _CANCELS * total:
            token = _token_at(uniform(seed, drawn) * left, weights, cumulative, taken)
            ids[drawn], proposals[drawn] = token, scaled[token] - math.log(left)
            left -= float(weights[token])
            insort(taken, token)
            drawn += 1
        row[taken] = -np.inf
    return ids, proposals


def _token_at(at: float, weights: Weights, cumulative: Weights, taken: Sequence[int]) -> int:
    """The token at this place of the cumulative distribution without those taken, ascending."""
    for token in taken:
        if at < cumulative[token] - weights[token]:
            break
        at += float(weights[token])
    found = int(np.searchsorted(cumulative, at, side="right"))
    if found < weights.size and weights[found] > 0.0 and found not in taken:
        return found
    # Rounding led to one that cannot be drawn: the next one that can.
    left = weights.copy()
    left[list(taken)] = 0.0
    possible = np.flatnonzero(left)
    return int(possible[min(int(np.searchsorted(possible, found)), possible.size - 1)])
