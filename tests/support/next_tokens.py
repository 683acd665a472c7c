"""Next tokens of continuations, as a device draws them, beside those that NumPy draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lmpool.backends import Outcome, Request
from lmpool.backends.contract import ask
from lmpool.backends.engine import NextToken
from lmpool.backends.sampling import sample_token
from lmpool.wants import Generate, Generation, Top
from tests.support.small_answers import numbers


def random_next(random: np.random.Generator, size: int) -> NextToken:
    """How one may be drawn from a row of this `size`, in all that `Generate` knows."""
    temperature = float(random.choice([0.0, 1e-300, 0.3, 0.7, 1.0, 1.0, 3.0, 1e300]))
    left: dict[str, Any] = {}
    if random.random() < 0.5:
        left["top_p"] = float(random.choice([1e-6, 0.2, 0.5, 0.8, 0.95, 0.999]))
    if random.random() < 0.5:
        left["top_k"] = int(random.choice([1, 2, 5, 20, size - 1, size, 2**20]))
    if random.random() < 0.5:
        left["min_p"] = float(random.choice([1e-4, 0.05, 0.3, 0.9, 1.0]))
    top = int(random.choice([0, 0, 1, 3, size]))
    seed, step = int(random.integers(2**62)), int(random.integers(50))
    return NextToken(seed, step, temperature, **left, top_logprobs=top)


def check_next(found: Outcome, row: npt.NDArray[np.float32], want: NextToken) -> bool:
    """That this is what is drawn from a row; whether it is the very token that NumPy draws."""
    answer: Any = found.answer
    assert isinstance(answer, Generation), found
    assert answer.token_ids.dtype == np.int32
    (token,) = answer.token_ids.tolist()
    assert answer.logprobs is not None
    assert abs(answer.logprobs[0] - row[token]) < 1e-5
    assert (answer.top_logprobs is not None) == (want.top_logprobs > 0)
    if answer.top_logprobs is not None:
        top = Top(want.top_logprobs).of_row(row)
        for one, other in zip(numbers(answer.top_logprobs), numbers(top), strict=True):
            assert one.shape == (1, *other.shape)
            assert np.allclose(one[0], other, rtol=1e-6, atol=1e-5)
    left = {"top_p": want.top_p, "top_k": want.top_k, "min_p": want.min_p}
    return token == sample_token(row, want.temperature, want.seed, want.step, **left)  # type: ignore[arg-type]


def check_generations(engine: Any, prompts: Sequence[npt.NDArray[np.uint32]], size: int) -> None:
    """That an engine, told to reduce, gives the continuations that it draws from rows.

    `engine` has a `_reduce`; `size` is that of its rows. Rounding may lead some elsewhere.
    """
    random, requests = np.random.default_rng(len(prompts)), []
    for number in range(40):
        token = random_next(random, size)
        want = Generate(
            5, (), token.temperature, token.seed, token.top_p, token.top_k, token.min_p,
            logprobs=number % 2 == 0, top_logprobs=min(token.top_logprobs, 20),
        )  # fmt: skip
        requests.append(Request(b"%d" % number, prompts[number % len(prompts)], None, want))
    answers = []
    for engine._reduce in (False, True):
        answers.append([outcome.answer for outcome in ask(engine, requests)])
    same = [
        (by_rows, there)
        for by_rows, there in zip(*answers, strict=True)
        if np.array_equal(by_rows.token_ids, there.token_ids)
    ]
    assert len(same) >= 38
    for by_rows, there in same:
        assert by_rows.finish_reason == there.finish_reason == "length"
        for one, other in zip(by_rows.arrays(), there.arrays(), strict=True):
            assert one.dtype == other.dtype
            assert np.allclose(one, other, atol=1e-4)
