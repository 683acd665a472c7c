"""What one continuation draws: what may be drawn, where it ends, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.backends.contract import ask
from lmpool.backends.engine import Request
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.backends.sampling import Continuation, Sampler, leave_out, sample_token
from lmpool.wants import Generate, Generation, Top

Row32 = npt.NDArray[np.float32]


def row(*probabilities: float) -> Row32:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32)


def left(logprobs: Row32, temperature: float = 1.0, **options: Any) -> list[int]:
    """The tokens that may be drawn."""
    chosen: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, **options}
    wide = logprobs.astype(np.float64)
    weights = np.exp((wide - wide.max()) / temperature)
    leave_out(weights, logprobs, **chosen)
    return np.flatnonzero(weights).tolist()


# --- what may be drawn -------------------------------------------------------------------------

SKEWED = row(0.05, 0.4, 0.1, 0.3, 0.15)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.99}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.7}, [1, 3]),
        ({"min_p": 0.26}, [1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        # Of those that min_p and top_k leave top_p takes its share: 0.4 / 0.7 of the mass.
        ({"top_k": 2, "top_p": 0.56}, [1]),
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
        ({"min_p": 0.7, "top_p": 0.56}, [1]),
        ({"min_p": 0.26, "top_k": 2}, [1, 3]),
        # A high temperature leaves more above min_p, and takes more tokens for a share.
        ({"min_p": 0.7, "temperature": 4.0}, [1, 2, 3, 4]),
        ({"top_p": 0.41, "temperature": 0.5}, [1]),
    ],
)
def test_what_is_left(options: dict[str, Any], expected: list[int]) -> None:
    assert left(SKEWED, **options) == expected


def test_those_as_likely_as_the_last_of_the_likeliest_are_left_too() -> None:
    assert left(row(0.3, 0.2, 0.2, 0.2, 0.1), top_k=2) == [0, 1, 2, 3]
    # Of equals the first come into the share of the mass.
    assert left(row(0.25, 0.25, 0.25, 0.25), top_p=0.4) == [0, 1]


PROBABILITIES = st.lists(st.floats(1e-6, 1), min_size=1, max_size=40)


@given(
    values=PROBABILITIES,
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 45),
    min_p=st.floats(0, 1),
)
def test_what_is_left_is_what_a_sort_says(
    values: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    logprobs = row(*values)
    weights = np.exp((logprobs.astype(np.float64) - float(logprobs.max())) / temperature)
    order = [i for i in np.argsort(-logprobs, kind="stable") if weights[i] >= min_p]
    if top_k:
        order = [i for i in order if np.count_nonzero(logprobs > logprobs[i]) < top_k]
    mass = np.cumsum(weights[order])
    before = np.concatenate([[0.0], mass[:-1]])
    unsure = np.abs(before - top_p * mass[-1]) < 1e-9 * mass[-1]
    expected = {int(i) for i, m in zip(order, before, strict=True) if m < top_p * mass[-1]}
    found = set(left(logprobs, temperature, top_p=top_p, top_k=top_k, min_p=min_p))
    assert found ^ expected <= {int(i) for i, near in zip(order, unsure, strict=True) if near}


@given(
    values=PROBABILITIES,
    seed=st.integers(0, 2**63),
    options=st.sampled_from(
        [
            {"top_p": 0.5},
            {"top_k": 3},
            {"min_p": 0.4},
            {"top_p": 0.8, "top_k": 4, "min_p": 0.1},
        ]
    ),
)
def test_nothing_else_is_drawn(values: list[float], seed: int, options: dict[str, Any]) -> None:
    logprobs = row(*values)
    assert sample_token(logprobs, 1.3, seed, 0, **options) in left(logprobs, 1.3, **options)
    assert sample_token(logprobs, 0.0, seed, 0, **options) == int(logprobs.argmax())


def test_what_is_left_is_drawn_by_its_share() -> None:
    count = 4000
    drawn = np.bincount(
        [sample_token(SKEWED, 1.0, 1, step, top_p=0.8) for step in range(count)], minlength=5
    )
    expected = np.array([0, 0.4, 0, 0.3, 0.15]) / 0.85
    bound = 4 * np.sqrt(count * expected * (1 - expected)) + 1e-9
    assert (np.abs(drawn - count * expected) < bound).all()


# --- where it ends -----------------------------------------------------------------------------


def generated(want: Generate, prompt: Sequence[int] = (1, 2), longest: int = 4096) -> Generation:
    """What the mock engine draws."""
    request = Request(b"0", np.array(prompt, np.uint32), want=want)
    (outcome,) = ask(MockEngine(max_prompt_tokens=longest), [request])
    assert isinstance(outcome.answer, Generation), outcome.error
    return outcome.answer


FREE = generated(Generate(12, (), 1.0, 8)).token_ids.tolist()
"""Twelve tokens that nothing ends, all different."""


def stopped(*stop: Sequence[int], **options: Any) -> tuple[list[int], int, str]:
    want = Generate(**{"max_tokens": 12, "eos_token_ids": (), "seed": 8, "stop": stop, **options})
    found = generated(want)
    return found.token_ids.tolist(), found.ending, found.finish_reason


def test_a_continuation_tells_what_ended_it() -> None:
    assert len(set(FREE)) == 12
    assert stopped() == (FREE, 0, "length")
    assert stopped(eos_token_ids=(FREE[4], 999)) == (FREE[:5], 1, "eos")
    assert stopped(FREE[2:3]) == (FREE[:3], 1, "stop")
    assert stopped(FREE[2:5]) == (FREE[:5], 3, "stop")
    assert stopped(FREE[:1]) == (FREE[:1], 1, "stop")
    assert stopped(FREE[9:]) == (FREE, 3, "stop")  # with its last token
    assert stopped(max_tokens=0) == ([], 0, "length")


def test_of_several_ends_the_first_counts_and_the_longest_of_one_place() -> None:
    assert stopped(FREE[6:8], FREE[2:4]) == (FREE[:4], 2, "stop")
    assert stopped(FREE[3:4], FREE[1:4], FREE[2:4]) == (FREE[:4], 3, "stop")
    assert stopped(FREE[2:4], eos_token_ids=(FREE[3],)) == (FREE[:4], 1, "eos")
    assert stopped(FREE[4:6], eos_token_ids=(FREE[3],)) == (FREE[:4], 1, "eos")


def test_what_nearly_comes_and_the_prompt_end_nothing() -> None:
    assert stopped([*FREE[2:4], FREE[5]], [FREE[3], FREE[2]]) == (FREE, 0, "length")
    assert stopped([2, FREE[0]], [1, 2], [1, 2, *FREE]) == (FREE, 0, "length")


def test_the_models_length_ends_it_and_says_so() -> None:
    want = Generate(100, (), 1.0, 7)
    found = generated(want, [1] * 5, longest=8)
    assert (found.token_ids.size, found.ending, found.finish_reason) == (4, 0, "context")
    assert generated(Generate(4, (), 1.0, 7), [1] * 5, longest=8).finish_reason == "length"
    assert generated(Generate(3, (), 1.0, 7), [1] * 5, longest=8).finish_reason == "length"


# --- what is told ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 3.0, "top_k": 2}])
def test_log_probabilities_are_the_models(options: dict[str, Any]) -> None:
    want = Generate(5, (), seed=3, logprobs=True, top_logprobs=4, **options)
    found, top = generated(want), Top(4)
    assert found.logprobs is not None
    assert found.top_logprobs is not None
    assert found.logprobs.dtype == np.float32
    assert found.top_logprobs.logprobs.shape == (5, 4)
    for step, token in enumerate(found.token_ids):
        before = mock_row([1, 2, *found.token_ids[:step]], 256)
        assert found.logprobs[step] == before[token]
        right = top.of_row(before)
        assert found.top_logprobs.token_ids[step].tolist() == right.token_ids.tolist()
        assert found.top_logprobs.logprobs[step].tolist() == right.logprobs.tolist()
        assert np.asarray(found.top_logprobs.rest)[step] == right.rest


def test_what_nobody_asked_for_is_not_told() -> None:
    plain = generated(Generate(3, (), seed=1))
    assert (plain.logprobs, plain.top_logprobs) == (None, None)
    nothing = generated(Generate(0, (), logprobs=True, top_logprobs=2))
    assert nothing.logprobs is not None
    assert nothing.top_logprobs is not None
    assert [array.shape for array in nothing.arrays()] == [(0,), (0,), (0, 2), (0, 2), (0,)]


def test_one_that_is_begun_anew_has_nothing_drawn() -> None:
    request = Request(b"0", np.array([1], np.uint32), want=Generate(3, (), 0.0, 0))
    first = Continuation(request, Sampler.of(request.want, 1, MockEngine().info))  # type: ignore[arg-type]
    first.take(mock_row([1], 256))
    again = first.anew()
    assert again.next_request().tokens.tolist() == [1]
    assert (again.drawn.size, again.finished, first.drawn.size) == (0, False, 1)
