"""Answers that a device reduces, beside those that NumPy makes of the same rows."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Outcome, Request
from lmpool.backends.contract.drawn import DrawReference
from lmpool.backends.contract.operations import Asked
from lmpool.backends.contract.reduced import (
    ReducedReference,
    TokensReference,
    TopReference,
    Within,
)
from lmpool.backends.contract.want_reference import Answered
from lmpool.errors import PromptFailed
from lmpool.wants import Choice, Draw, OfRow, Tokens, Top


def compare(
    found: Outcome, row: npt.NDArray[np.float32], want: OfRow[Any], tolerance: float = 1e-5
) -> None:
    """That this is the answer of a row."""
    if found.error is not None:
        with pytest.raises(PromptFailed) as failed:
            want.reduce(row)
        assert str(found.error) == str(failed.value)
        return
    for one, other in zip(numbers(found.answer), numbers(want.reduce(row)), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.allclose(one, other, rtol=1e-6, atol=tolerance), (want, one, other)


_REFERENCES: dict[type, type[ReducedReference[Any]]] = {
    Top: TopReference, Tokens: TokensReference, Draw: DrawReference,
}  # fmt: skip


def judge(found: Outcome, request: Request, row: npt.NDArray[np.float32]) -> None:
    """That this is the answer of a row, which was computed in other company."""
    asked = Asked(0, tuple(request.tokens.tolist()), request.adapter, request.want)
    assert found.error is None, (found.error, asked)
    reference = _REFERENCES[type(request.want)]()
    reference.judge_one(Answered(asked, None, found), row.astype(np.float64), Within(1e-4, 2e-5))


def numbers(answer: Any) -> list[Any]:
    """All parts of an answer."""
    return [answer] if isinstance(answer, np.ndarray) else list(astuple(answer))


def random_wants(random: np.random.Generator, size: int, count: int) -> list[OfRow[Any]]:
    """Some of every kind, of which many are reduced together, by rows of this `size`."""
    some = random.random(size) < random.choice([0.02, 0.5, 0.98])
    choice = Choice.of(np.flatnonzero(some), None, size) if some.any() else None
    kinds: list[OfRow[Any]] = [
        Top(1), Top(min(20, size)), Top(size),
        Tokens(random.integers(0, size, 5).astype("<u4").tobytes()),
    ]  # fmt: skip
    for temperature in (0.0, 1e-300, 0.5, 1.0, 3.0, 1e300):
        n = int(random.choice([1, 3, min(size, 70)]))
        kinds.append(Draw(n, int(random.integers(9999)), temperature))
        kinds.append(Draw(n, int(random.integers(9999)), temperature, True, choice))
        few = min(n, int(some.sum()) or size)
        kinds.append(Draw(few, int(random.integers(9999)), temperature, False, choice))
    return [kinds[int(n)] for n in random.integers(0, len(kinds), count)]
