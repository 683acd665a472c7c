"""The want of tokens drawn from what follows a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import numpy as np

from lmpool.checks import as_integer, quoted
from lmpool.errors import JobFormatError, PromptError, PromptFailed
from lmpool.model_info import ModelInfo
from lmpool.uniforms import uniforms
from lmpool.wants import packing
from lmpool.wants.answers import Draws, Logprobs, TokenArray
from lmpool.wants.choice import MAX_IDS, Choice, TokenSet
from lmpool.wants.distribution import Distribution, Weights
from lmpool.wants.drawing import checked_seed, checked_temperature, seeds_of
from lmpool.wants.held import hold
from lmpool.wants.of_row import OfRow
from lmpool.wants.top import likeliest

MAX_DRAWS: Final = 4096
_ADDED: Final = np.array([-np.inf, 0.0], np.float32)
"""To the log-probability of what may not be drawn, and of what may."""


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

    def __post_init__(self) -> None:
        hold(self, allowed=MAX_IDS, excluded=MAX_IDS)

    def checked(self, info: ModelInfo) -> Draw:
        """With every default but the seed resolved for a model. Raises `PromptError`."""
        n = as_integer(self.n)
        if n is None or not 1 <= n <= MAX_DRAWS:
            raise PromptError(f"n={quoted(self.n)}: write an integer from 1 to {MAX_DRAWS}")
        seed, temperature = checked_seed(self.seed), checked_temperature(self.temperature)
        if type(self.replacement) is not bool:
            raise PromptError(f"replacement={quoted(self.replacement)}: write True or False")
        choice = self._choice(info.vocab_size)
        most = info.vocab_size if choice is None else int(choice.members(info.vocab_size).sum())
        if n > most and not self.replacement:
            raise PromptError(f"n={n} without replacement: {most} tokens may be drawn")
        return Draw(n, seed, temperature, self.replacement, choice)

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
        return [replace(self, seed=seed) for seed in seeds_of(self.seed, count)]

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about."""
        return 12 * self.n

    def travelling_bytes(self) -> int:
        """That of what may be drawn."""
        return len(self.allowed.data) if isinstance(self.allowed, Choice) else 0

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
        if not self.replacement and self.n > vocab_size:
            return f"n={self.n} without replacement: {vocab_size} tokens may be drawn"
        return self.allowed.misfit(vocab_size) if isinstance(self.allowed, Choice) else None

    def of_row(self, logprobs: Logprobs) -> Draws:
        """That of a row, float32 [vocab_size].

        Raises `PromptFailed` where too few of the tokens that may be drawn have a probability.
        """
        assert self.seed is not None
        may = self.allowed
        row = logprobs
        if isinstance(may, Choice):
            # To pick by what no processor can foresee would take five times as long.
            row = logprobs + _ADDED.take(may.members(logprobs.size).view(np.uint8))
        if self.replacement or self.n == 1:  # one is enough
            self.check_possible(int(row.max() > -np.inf))
        else:
            self.check_possible(int(np.count_nonzero(row > -np.inf)))
        if self.temperature == 0.0:
            ids, proposals, mass = self._likeliest(row, logprobs)
        else:
            ids, proposals, mass = self._drawn(row, logprobs)
        with np.errstate(over="ignore"):  # at a tiny temperature
            share = np.float32(mass)
        # Rounding may lead above 0.
        return Draws(ids, logprobs[ids], np.minimum(proposals, 0.0).astype(np.float32), share)

    def check_possible(self, possible: int) -> None:
        """Raise `PromptFailed` where so many tokens with a probability are too few."""
        if possible < (1 if self.replacement else self.n):
            raise PromptFailed(f"{possible} of the tokens that may be drawn have a probability")

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
        mass = 0.0 if row[ids[0]] == logprobs.max() else -math.inf
        return np.resize(ids, self.n), np.zeros(self.n), mass

    def _drawn(self, row: Logprobs, logprobs: Logprobs) -> tuple[TokenArray, Weights, float]:
        assert self.seed is not None
        some = Distribution(row, self.temperature)
        mass = 0.0
        if row is not logprobs:
            everything = Distribution(logprobs, self.temperature).mass
            below = (float(row.max()) - float(logprobs.max())) / self.temperature
            mass = min(0.0, math.log(some.mass) + below - math.log(everything))
        places = uniforms(self.seed, self.n)
        if self.replacement:
            ids = some.at(places)
            return ids, some.logprobs(ids), mass
        drawn = [some.take(place) for place in places.tolist()]
        ids = np.array([token for token, _ in drawn], np.int32)
        return ids, np.array([logprob for _, logprob in drawn]), mass
