from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.backends.sampling import sample_token
from lmpool.uniforms import uniform, uniforms

SEEDS = st.integers(-(2**70), 2**70)


def row(*probabilities: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32)


def test_temperature_0_takes_the_likeliest_and_the_first_of_equals() -> None:
    assert sample_token(row(0.2, 0.4, 0.4), 0.0, seed=3, step=5) == 1


@given(seed=SEEDS, step=st.integers(0, 2**40))
def test_a_draw_is_in_the_unit_interval_and_repeats(seed: int, step: int) -> None:
    drawn = uniform(seed, step)
    assert 0.0 <= drawn < 1.0
    assert drawn == uniform(seed, step)
    assert uniform(seed + 2**64, step) == drawn


def test_draws_are_the_same_in_every_release_and_on_every_machine() -> None:
    assert [uniform(7, step) for step in range(3)] == [
        0.8720734548204873,
        0.29536538151378355,
        0.4200976785072422,
    ]


@given(seed=SEEDS, count=st.integers(1, 50), step=st.integers(0, 49))
def test_many_draws_at_once_are_those_of_each_step(seed: int, count: int, step: int) -> None:
    step %= count
    assert uniforms(seed, count)[step] == uniform(seed, step)


def test_seeds_and_steps_draw_apart() -> None:
    draws = {uniform(seed, step) for seed in range(30) for step in range(30)}
    assert len(draws) == 900


@given(seed=SEEDS, step=st.integers(0, 1000), temperature=st.floats(1e-300, 1e6))
def test_impossible_tokens_are_never_drawn(seed: int, step: int, temperature: float) -> None:
    logprobs = row(0.0, 0.3, 0.0, 0.7, 0.0)
    assert sample_token(logprobs, temperature, seed, step) in (1, 3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    expected = probabilities ** (1 / temperature)
    expected /= expected.sum()
    logprobs = row(*probabilities)
    count = 4000
    drawn = np.bincount(
        [sample_token(logprobs, temperature, 1, step) for step in range(count)], minlength=4
    )
    # Four standard deviations of a binomial count; the draws are fixed, so this cannot flicker.
    bound = 4 * np.sqrt(count * expected * (1 - expected))
    assert (np.abs(drawn - count * expected) < bound).all()


@given(seed=SEEDS, step=st.integers(0, 100))
def test_a_row_that_differs_by_rounding_gives_the_same_token(seed: int, step: int) -> None:
    logprobs = row(*np.full(16, 1 / 16))
    moved = logprobs + np.tile(np.float32([1e-6, -1e-6]), 8)
    assert sample_token(logprobs, 1.0, seed, step) == sample_token(moved, 1.0, seed, step)


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_bad_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature="):
        sample_token(row(0.5, 0.5), temperature, 0, 0)


@pytest.mark.parametrize("values", [[0.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_rows_without_a_token_to_draw_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="no token to draw"):
        sample_token(np.array(values, dtype=np.float32), 1.0, 0, 0)
