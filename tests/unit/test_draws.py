"""The law of what rows answer: draws follow their distribution, and the likeliest are those."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.backends.sampling import sample_token
from lmpool.errors import PromptFailed
from lmpool.uniforms import uniform
from lmpool.wants import Choice, Draw, Draws, OfRow, Tokens, Top
from lmpool.wants.distribution import Distribution
from tests.support.strategies import VOCABULARY, draws, token_bytes

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def row_of(size: int, seed: int = 0, spread: float = 2.0) -> F32:
    """A normalized row."""
    logits = np.random.default_rng(seed).normal(size=size) * spread
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def probabilities(*values: float) -> F32:
    """A row of these probabilities."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(values) / sum(values)).astype(np.float32)


def heated(row: F32, temperature: float, ids: Iterable[int] | None = None) -> F64:
    """The probabilities at a temperature, of these ids alone, in float64."""
    left = np.full(row.size, -np.inf)
    chosen = list(range(row.size) if ids is None else ids)
    left[chosen] = row[chosen].astype(np.float64) / temperature
    weights = np.exp(left - left.max())
    return weights / weights.sum()


def only(*ids: int) -> Choice:
    return Choice("only", token_bytes(*sorted(ids)))


# --- the distribution --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_hundred_thousand_draws_follow_the_distribution(temperature: float) -> None:
    """Pearson's chi-squared of bins of 20 draws and more."""
    row, count = row_of(2000), 0
    drawn = np.zeros(2000)
    for seed in range(25):
        answer = Draw(4000, seed, temperature).reduce(row)
        drawn += np.bincount(answer.token_ids, minlength=2000)
        count += 4000
    expected = heated(row, temperature) * count
    order = np.argsort(expected)
    bins = np.searchsorted(np.cumsum(expected[order]), np.arange(20, count, 20))
    starts = np.unique(np.concatenate([[0], bins]))
    observed = np.add.reduceat(drawn[order], starts)
    right = np.add.reduceat(expected[order], starts)
    freedom = starts.size - 1
    statistic = float(((observed - right) ** 2 / right).sum())
    assert freedom > 300
    # Wilson and Hilferty: near enough normal, and the seeds are fixed.
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(
        2 / (9 * freedom)
    )
    assert abs(normal) < 3.5


def _inclusion(weights: F64, n: int) -> F64:
    """The chance of each token to be among n that are drawn without replacement."""
    chances = np.zeros(weights.size)
    for order in itertools.permutations(range(weights.size), n):
        chance, left = 1.0, 1.0
        for token in order:
            chance *= weights[token] / left
            left -= weights[token]
        chances[list(order)] += chance
    return chances


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("allowed", [None, only(0, 2, 3, 5)])
def test_tokens_drawn_without_replacement_are_as_frequent_as_they_must_be(
    n: int, allowed: Choice | None
) -> None:
    row, trials = probabilities(0.5, 0.22, 0.02, 0.13, 0.1, 0.03), 4000
    ids = [i for i in range(6) if allowed is None or allowed.members(6)[i]]
    expected = _inclusion(heated(row, 0.8, ids)[ids], n)
    found = np.zeros(6)
    for seed in range(trials):
        answer = Draw(n, seed, 0.8, False, allowed).reduce(row)
        found[answer.token_ids] += 1
    bound = 4 * np.sqrt(trials * expected * (1 - expected)) + 1e-6
    assert (np.abs(found[ids] - trials * expected) < bound).all()
    assert found.sum() == n * trials == found[ids].sum()


def _slowly(want: Draw, row: F32) -> list[int]:
    """Draws in float64, all of the distribution summed up token by token for each."""
    assert want.seed is not None
    may = np.ones(row.size, bool) if want.allowed is None else want.allowed.members(row.size)  # type: ignore[union-attr]
    left = np.where(may, row, -np.inf).astype(np.float64)
    found: list[int] = []
    for i in range(want.n):
        weights = np.exp((left - left.max()) / want.temperature)
        cumulative = np.cumsum(weights)
        at = uniform(want.seed, i) * cumulative[-1]
        found.append(int(np.searchsorted(cumulative, at, side="right")))
        if not want.replacement:
            left[found[-1]] = -np.inf
    return found


@pytest.mark.parametrize("temperature", [0.02, 0.3, 1.0, 5.0, 1e30])
@pytest.mark.parametrize("n", [1, 5, 150, 400])
def test_draws_without_replacement_are_those_of_the_distribution_without_what_was_drawn(
    temperature: float, n: int
) -> None:
    row = row_of(400, spread=4.0)
    for seed in range(5):
        want = Draw(n, seed, temperature, False)
        assert want.reduce(row).token_ids.tolist() == _slowly(want, row)


@pytest.mark.parametrize("first", [1 - 1e-5, 1 - 1e-9, 1 - 1e-15, 1.0])
def test_what_is_left_of_nearly_nothing_is_drawn_as_it_must_be(first: float) -> None:
    """The mass that is left is a difference of nearly equal numbers, unless it is summed anew."""
    small = np.array([4, 3, 2, 1]) / 10 * max(1 - first, 1e-40)
    row = np.log(np.array([*small[:2], first, *small[2:]])).astype(np.float32)
    expected, trials = _inclusion(np.array([0.4, 0.3, 0.2, 0.1]), 2), 3000
    found = np.zeros(5)
    for seed in range(trials):
        answer = Draw(3, seed, 1.0, False).reduce(row)
        if first > 0.9999:
            assert answer.token_ids[0] == 2 or first < 1 - 1e-8
        found[answer.token_ids] += 1
    assert found[2] == trials
    bound = 4 * np.sqrt(trials * expected * (1 - expected))
    assert (np.abs(found[[0, 1, 3, 4]] - trials * expected) < bound).all()


@pytest.mark.parametrize("size", [1, 255, 256, 257, 2000, 32_000])
@pytest.mark.parametrize("replacement", [True, False])
def test_draws_are_at_their_places_of_the_cumulative_distribution(
    size: int, replacement: bool
) -> None:
    for seed in range(8):
        row, n = row_of(size, seed, 3.0), min(size, 12)
        row[np.random.default_rng(seed).random(size) < 0.3 * (seed % 3)] = -np.inf
        row[seed % size] = -1.0
        n = n if replacement else min(n, int((row > -np.inf).sum()))
        choice = None if seed % 2 else Choice.of(np.flatnonzero(row > -9), None, size)
        want = Draw(1 if choice is not None else n, seed, 0.9, replacement, choice)
        assert want.reduce(row).token_ids.tolist() == _slowly(want, row)


@pytest.mark.parametrize("size", [3, 300, 5000])
def test_the_last_place_is_the_last_token_that_may_be_drawn(size: int) -> None:
    """Sums of another order may round apart: nothing is led past it."""
    for seed in range(40):
        row = row_of(size, seed, 4.0)
        last = size - 1 - seed % size
        row[last + 1 :] = -np.inf
        almost = np.array([0.0, 1 - 2.0**-53, np.nextafter(1 - 2.0**-53, 2)])
        assert Distribution(row, 1.0).at(almost)[1:].tolist() == [last, last]
        for place in almost[1:].tolist():
            assert Distribution(row, 1.0).take(place)[0] == last


# --- seeds -------------------------------------------------------------------------------------


@given(
    seed=st.integers(-(2**63), 2**63 - 1), temperature=st.floats(0, 1e6), size=st.integers(2, 50)
)
def test_one_draw_is_the_first_token_of_a_continuation(
    seed: int, temperature: float, size: int
) -> None:
    row = row_of(size, size)
    answer = Draw(1, seed, temperature).reduce(row)
    assert answer.token_ids.tolist() == [sample_token(row, temperature, seed, 0)]
    once = Draw(1, seed, temperature, False).reduce(row)
    assert once.token_ids.tolist() == answer.token_ids.tolist()


@settings(max_examples=50)
@given(want=draws(), fewer=st.integers(1, 4096))
def test_the_first_of_many_draws_are_those_of_fewer(want: Draw, fewer: int) -> None:
    row, n = row_of(VOCABULARY, 1), min(want.n, 200)
    many = Draw(n, want.seed, want.temperature, want.replacement, want.allowed).reduce(row)
    fewer = min(fewer, n)
    few = Draw(fewer, want.seed, want.temperature, want.replacement, want.allowed).reduce(row)
    for name in ("token_ids", "logprobs", "proposal_logprobs"):
        assert getattr(few, name).tobytes() == getattr(many, name)[:fewer].tobytes()
    assert few.log_mass == many.log_mass


# --- temperatures ------------------------------------------------------------------------------


def test_temperature_0_draws_the_likeliest_and_by_ids_among_equals() -> None:
    row = probabilities(0.1, 0.3, 0.1, 0.3, 0.2)
    greedy = Draw(3, 7, 0.0).reduce(row)
    assert greedy.token_ids.tolist() == [1, 1, 1]
    assert greedy.proposal_logprobs.tolist() == [0, 0, 0]
    assert greedy.log_mass == 0
    once = Draw(5, 7, 0.0, False).reduce(row)
    assert once.token_ids.tolist() == [1, 3, 4, 0, 2]
    assert once.logprobs.tobytes() == row[[1, 3, 4, 0, 2]].tobytes()
    allowed = Draw(2, 7, 0.0, False, only(0, 2, 4)).reduce(row)
    assert allowed.token_ids.tolist() == [4, 0]
    assert allowed.log_mass == -np.inf


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300, 1e-30, 1e-3])
@pytest.mark.parametrize("replacement", [True, False])
def test_tiny_temperatures_draw_as_greedy_does(temperature: float, replacement: bool) -> None:
    row = row_of(50)
    for allowed in (None, only(3, 4, 5, 20, 21, 30, 31, 49)):
        tiny = Draw(6, 3, temperature, replacement, allowed).reduce(row)
        greedy = Draw(6, 3, 0.0, replacement, allowed).reduce(row)
        assert tiny.token_ids.tolist() == greedy.token_ids.tolist()
        assert tiny.logprobs.tobytes() == greedy.logprobs.tobytes()
        assert np.abs(tiny.proposal_logprobs).max() < 1e-3
        assert tiny.log_mass == greedy.log_mass or tiny.log_mass < -100


@pytest.mark.parametrize("temperature", [1e20, 1e300, 1.7e308])
def test_huge_temperatures_draw_evenly(temperature: float) -> None:
    row, trials = row_of(8, spread=10.0), 4000
    answer = Draw(trials, 1, temperature).reduce(row)
    found = np.bincount(answer.token_ids, minlength=8)
    assert (np.abs(found - trials / 8) < 4 * math.sqrt(trials * 7 / 64)).all()
    assert np.allclose(answer.proposal_logprobs, -math.log(8))
    half = Draw(8, 1, temperature, True, only(0, 1, 2, 3)).reduce(row)
    assert half.log_mass == pytest.approx(math.log(0.5))


# --- what cannot be drawn ----------------------------------------------------------------------

HOLES = probabilities(0.0, 0.3, 0.0, 0.6, 0.1, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-3, 1.0, 1e300])
def test_what_has_no_probability_is_not_drawn(temperature: float) -> None:
    for seed in range(50):
        many = Draw(20, seed, temperature).reduce(HOLES)
        assert set(many.token_ids.tolist()) <= {1, 3, 4}
        once = Draw(3, seed, temperature, False).reduce(HOLES)
        assert sorted(once.token_ids.tolist()) == [1, 3, 4]
    with pytest.raises(PromptFailed, match="3 of the tokens that may be drawn have a probability"):
        Draw(4, 1, temperature, False).reduce(HOLES)
    with pytest.raises(PromptFailed, match="0 of the tokens"):
        Draw(1, 1, temperature, True, only(0, 2)).reduce(HOLES)


def test_a_row_without_any_probability_has_no_draw() -> None:
    with pytest.raises(PromptFailed, match="0 of the tokens"):
        Draw(1, 1).reduce(np.full(5, -np.inf, np.float32))


@settings(max_examples=40)
@given(want=draws(), seed=st.integers(0, 50), spread=st.floats(0.01, 60), holes=st.floats(0, 1))
def test_any_row_is_answered_or_refused(want: Draw, seed: int, spread: float, holes: float) -> None:
    row = row_of(VOCABULARY, seed, spread)
    row[np.random.default_rng(seed).random(VOCABULARY) < holes] = -np.inf
    try:
        answer = want.reduce(row)
    except PromptFailed:
        return
    may = np.ones(VOCABULARY, bool)
    if isinstance(want.allowed, Choice):
        may = want.allowed.members(VOCABULARY)
    ids = answer.token_ids
    assert may[ids].all()
    assert (row[ids] > -np.inf).all()
    assert want.replacement or np.unique(ids).size == ids.size == want.n
    assert (answer.proposal_logprobs <= 0).all()
    assert answer.log_mass <= 0


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("size", [3, 40, 1900])
def test_masses_and_proposals_are_those_of_float64(temperature: float, size: int) -> None:
    row = row_of(2000, size)
    ids = np.sort(np.random.default_rng(size).choice(2000, size, replace=False))
    choice = Choice.of(ids, None, 2000)
    share = math.log(heated(row, temperature)[ids].sum())
    weights = heated(row, temperature, ids)
    answer = Draw(100, 3, temperature, True, choice).reduce(row)
    assert np.isin(answer.token_ids, ids).all()
    assert answer.log_mass == pytest.approx(share, abs=1e-6, rel=1e-6)
    assert np.allclose(answer.proposal_logprobs, np.log(weights[answer.token_ids]), atol=2e-6)
    assert answer.logprobs.tobytes() == row[answer.token_ids].tobytes()
    once = Draw(min(size, 100), 3, temperature, False, choice).reduce(row)
    for token, proposal in zip(once.token_ids, once.proposal_logprobs, strict=True):
        assert proposal == pytest.approx(math.log(weights[token] / weights.sum()), abs=1e-5)
        weights[token] = 0.0
    assert once.log_mass == answer.log_mass


def test_everything_has_all_the_mass() -> None:
    row = row_of(100)
    for replacement in (True, False):
        assert Draw(2, 1, 0.7, replacement).reduce(row).log_mass == 0


# --- the likeliest -----------------------------------------------------------------------------


def _sorted(row: F32, k: int) -> list[int]:
    return sorted(range(row.size), key=lambda token: (-row[token], token))[:k]


@given(
    levels=st.lists(st.integers(0, 4) | st.just(99), min_size=1, max_size=40), k=st.integers(1, 40)
)
def test_the_likeliest_come_first_and_by_ids_among_equals(levels: list[int], k: int) -> None:
    row = np.array([-np.inf if level == 99 else -level for level in levels], np.float32)
    k = min(k, row.size)
    answer = Top(k).reduce(row)
    assert answer.token_ids.dtype == np.int32
    assert answer.token_ids.tolist() == _sorted(row, k)
    assert answer.logprobs.tobytes() == row[_sorted(row, k)].tobytes()
    others = np.delete(row, answer.token_ids).astype(np.float64)
    mass = np.exp(others).sum()
    assert answer.rest == (pytest.approx(math.log(mass), rel=1e-6, abs=1e-6) if mass else -np.inf)
    assert row.flags.writeable  # and it was not written
    assert row.tobytes() == np.array([-np.inf if n == 99 else -n for n in levels], "f4").tobytes()


@pytest.mark.parametrize("k", [1, 20, 1000, 1990, 1999])
def test_rest_is_summed_over_the_tail(k: int) -> None:
    """1 less the mass of the others would be mostly rounding."""
    row = row_of(2000, 5, 8.0)
    answer = Top(k).reduce(row)
    tail = np.delete(row, answer.token_ids).astype(np.float64)
    right = tail.max() + math.log(np.exp(tail - tail.max()).sum())
    assert answer.rest == pytest.approx(right, abs=1e-5)
    assert answer.rest.dtype == np.float32


def test_of_all_tokens_there_is_no_rest() -> None:
    row = row_of(30)
    answer = Top(30).reduce(row)
    assert answer.token_ids.tolist() == _sorted(row, 30)
    assert answer.rest == -np.inf


@given(
    ids=st.lists(st.integers(0, 29), min_size=1, max_size=60),
    seed=st.integers(0, 5),
)
def test_tokens_come_in_their_order_as_often_as_they_are_given(ids: list[int], seed: int) -> None:
    row = row_of(30, seed)
    answer = Tokens(token_bytes(*ids)).reduce(row)
    assert answer.tobytes() == row[ids].tobytes()
    assert answer.base is None  # it keeps no row


def test_answers_keep_no_row_alive() -> None:
    row = row_of(1000)
    wants: list[OfRow[Any]] = [Top(5), Draw(5, 1), Draw(5, 1, 1.0, False), Draw(5, 1, 0.0)]
    for want in wants:
        answer = want.reduce(row)
        assert isinstance(answer, Draws) or answer.logprobs.base is None
        for part in (answer.token_ids, answer.logprobs):
            assert part.base is None or part.base.nbytes < 200
