"""What is right of tokens that are drawn from one row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.generating import TEMPERATURES, random_seed
from lmpool.backends.contract.operations import Asked, Prompt
from lmpool.backends.contract.prompts import Random
from lmpool.backends.contract.reduced import (
    SAME,
    Probabilities,
    ReducedReference,
    TokenArray,
    Within,
    check_likeliest,
    check_values,
    checked_ids,
    checked_numbers,
    log_sum,
)
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.engine import EngineInfo
from lmpool.uniforms import uniform
from lmpool.wants import Choice, Draw, Draws

Members = npt.NDArray[np.bool_]

_ALLOWED: Final = "only what may be drawn is drawn"
_FOLLOWS: Final = "tokens are drawn from the row, at its temperature, by their seed"
_GREEDY: Final = "temperature 0 draws the likeliest token"
_ANEW: Final = "without replacement a token is drawn once"
_PROPOSALS: Final = "proposal_logprobs are those of what was drawn from"
_MASS: Final = "log_mass is the mass of what may be drawn"
_ROUNDING: Final = 4e-6
"""Of numbers in float32, and of sums of many, for each nat."""


class DrawReference(ReducedReference[Draw]):
    """Tokens at the places of the cumulative distribution that a seed gives."""

    answer_type = Draws
    bad = 0.08

    def draw(self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> Draw:
        vocab = truth.info.vocab_size
        temperature = min(float(random.choice(TEMPERATURES)), truth.suite.most_temperature)
        n = int(random.choice((1, 1, 2, 3, 8, 30)))
        replacement, given = bool(random.random() < 0.6), random_seed(random)
        seed = 0 if given is None else given
        if random.random() < self.bad:
            return _bad(random, vocab, Draw(n, seed, temperature, replacement))
        choice = _choice(random, vocab)
        if not replacement:
            n = min(n, _sound_size(choice, vocab))
        return Draw(n, seed, temperature, replacement, choice)

    def refuses(self, want: Draw, info: EngineInfo) -> bool:
        size = _sound_size(want.allowed, info.vocab_size)
        return size < (1 if want.replacement else want.n)

    def check(self, asked: Asked, answer: Any, row: Probabilities, within: Within) -> None:
        want = asked.want
        assert isinstance(want, Draw)
        ids = checked_ids(answer.token_ids, want.n, row.size, asked)
        logprobs = checked_numbers(answer.logprobs, want.n, asked)
        proposals = checked_numbers(answer.proposal_logprobs, want.n, asked)
        expect(type(answer.log_mass) is np.float32, "log_mass is a float32", asked)
        may = members(want.allowed, row.size)
        expect(bool(may[ids].all()), _ALLOWED, ids[~may[ids]], asked)
        once = want.replacement or np.unique(ids).size == ids.size
        expect(once, _ANEW, ids, asked)
        check_values(logprobs, row[ids], within.values, SAME, asked)
        some = np.where(may, row, -np.inf)
        if want.temperature == 0.0:
            _check_greedy(ids, some, within, asked)
            right, mass = np.zeros(want.n), _greedy_masses(some, row, within)
        else:
            right = _followed(ids, some, within, asked)
            mass = [log_sum(some / want.temperature) - log_sum(row / want.temperature)]
        warmth = want.temperature or np.inf
        slack = 2 * within.values / warmth + _ROUNDING * (1 + np.abs(right))
        check_values(proposals, right, slack, _PROPOSALS, asked)
        found = float(answer.log_mass)
        bound = 2 * within.values / warmth + _ROUNDING * (1 + abs(mass[0]))
        expect(
            any(found == each or abs(found - each) <= bound for each in mass),
            _MASS,
            f"{found} instead of {mass}:",
            asked,
        )


def _check_greedy(ids: TokenArray, some: Probabilities, within: Within, asked: Asked) -> None:
    want = asked.want
    assert isinstance(want, Draw)
    if want.replacement:
        expect(bool((ids == ids[0]).all()), _GREEDY, ids, asked)
        likely = float(some[ids[0]]) >= float(some.max()) - within.order
        expect(likely, _GREEDY, ids[0], asked)
    else:
        check_likeliest(ids, some, within.order, asked)


def _greedy_masses(some: Probabilities, row: Probabilities, within: Within) -> list[float]:
    """What may be said of the mass where all of it is the likeliest token's."""
    below = float(row.max()) - float(some.max())
    if below == 0.0 and np.count_nonzero(row >= row.max() - within.order) == 1:
        return [0.0]
    return [-np.inf] if below > within.order else [0.0, -np.inf]


def _followed(ids: TokenArray, some: Probabilities, within: Within, asked: Asked) -> Probabilities:
    """The log-probability of each when it was drawn, after seeing it at its place."""
    want = asked.want
    assert isinstance(want, Draw)
    assert want.seed is not None
    right = np.empty(ids.size)
    left = some / want.temperature
    slack = min(0.05, within.order / want.temperature)
    for i, token in enumerate(ids.tolist()):
        weights = np.exp(left - left.max())
        cumulative = np.cumsum(weights) / weights.sum()
        share, place = weights[token] / weights.sum(), uniform(want.seed, i)
        kept = cumulative[token] - share - slack <= place <= cumulative[token] + slack
        expect(bool(kept), _FOLLOWS, f"token {token}, the {i}th:", asked)
        right[i] = left[token] - log_sum(left)
        if not want.replacement:
            left[token] = -np.inf
    return right


# --- which may be drawn ------------------------------------------------------------------------


def members(choice: object, vocab: int) -> Members:
    """Which tokens a choice means, bool [vocab]."""
    if choice is None:
        return np.ones(vocab, bool)
    assert isinstance(choice, Choice)
    if choice.form == "mask":
        words = np.frombuffer(choice.data, "<u4")
        ids = np.arange(vocab)
        return (words[ids // 32] >> (ids % 32) & 1).astype(bool)
    named = np.isin(np.arange(vocab), np.frombuffer(choice.data, "<u4"))
    return named if choice.form == "only" else ~named


def _sound_size(choice: object, vocab: int) -> int:
    """How many tokens it means, 0 where it is none of this vocabulary."""
    if isinstance(choice, Choice):
        if choice.form == "mask" and len(choice.data) != 4 * -(-vocab // 32):
            return 0
        if choice.form != "mask" and np.frombuffer(choice.data, "<u4").max() >= vocab:
            return 0
    return int(members(choice, vocab).sum())


def _choice(random: Random, vocab: int) -> Choice | None:
    """All tokens, few, all but few, and half of them."""
    kind = random.random()
    if kind < 0.35:
        return None
    if kind < 0.75:
        some = random.choice(vocab, int(random.choice((1, 2, 5, 40))), replace=False)
        if kind < 0.6:
            return Choice.of(some.tolist(), None, vocab)
        return Choice.of(None, some.tolist(), vocab)
    return Choice.of(np.flatnonzero(random.random(vocab) < 0.5).tolist(), None, vocab)


def _bad(random: Random, vocab: int, want: Draw) -> Draw:
    """One that no engine can answer: of no set of this vocabulary's tokens, or of too few."""
    words, every = -(-vocab // 32), np.arange(vocab, dtype="<u4")
    last, none = every[-1:].tobytes(), (every[-1:] + 1).tobytes()
    choices = [
        Choice("only", last + none),
        Choice("but", none),
        Choice("but", every.tobytes()),
        Choice("mask", b"\xff" * 4 * (words + 1)),
        Choice("mask", b"\xff" * 4 * (words - 1)),
        Choice("mask", b"\0" * 4 * words),
        Choice("only", last),
        Choice("only", last),
    ]
    choice = choices[int(random.integers(len(choices)))]
    if choice == choices[-1]:
        return replace(want, n=want.n + 1, replacement=False, allowed=choice)
    return replace(want, allowed=choice)
