"""Which tokens `top_p`, `top_k` and `min_p` leave to be drawn, as far as rounding lets one say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.draws import Weights, heated
from lmpool.wants import Generate

Members = npt.NDArray[np.bool_]
Row = npt.NDArray[np.float32]

_ROUNDING: Final = 2e-6
"""Of sums of probabilities that an engine makes in float32."""


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a row at a temperature above 0.

    `may` are the tokens that may be left, bool [vocab], and `weights`, float64 [vocab], what they
    are drawn by, None where rounding decides which they are.
    """

    may: Members
    weights: Weights | None

    @classmethod
    def of(cls, row: Row, want: Generate, tolerance: float) -> Left:
        """That of a row, each of whose numbers is off by no more than `tolerance`."""
        weights, near = heated(row, want.temperature), 2 * tolerance
        must = may = np.ones(row.size, bool)
        if want.min_p > 0:
            below, slack = _below(row, want.temperature), near / want.temperature + 1e-9
            must = below >= math.log(want.min_p) + slack
            may = below >= math.log(want.min_p) - slack
        if want.top_k:
            must = must & (_likelier(row, row - near) <= want.top_k)  # of which it is one
            may = may & (_likelier(row, row + near) < want.top_k)
        if want.top_p < 1:
            must, may = _nucleus(row, weights, must, may, want, near)
        if not np.array_equal(must, may):
            return cls(may, None)
        weights[~may] = 0.0
        weights /= weights.sum()
        return cls(may, weights)


def _below(row: Row, temperature: float) -> Weights:
    """How far each is below the likeliest at a temperature."""
    logits = row.astype(np.float64)
    found: Weights = (logits - logits.max()) / temperature
    return found


def _likelier(row: Row, bounds: Row) -> npt.NDArray[np.intp]:
    """How many tokens lie above each of these bounds."""
    return row.size - np.searchsorted(np.sort(row), bounds, side="right")


def _nucleus(
    row: Row,
    weights: Weights,
    must: Members,
    may: Members,
    want: Generate,
    near: float,
) -> tuple[Members, Members]:
    """Of those left so far, the fewest that have `top_p` of the mass: those sure, and possible."""
    if not np.array_equal(must, may):
        return must & (row == row.max()), may
    kept = np.where(may, weights, 0.0)
    kept /= kept.sum()
    order = np.argsort(row, kind="stable")
    ascending = row[order]
    upto = np.concatenate([[0.0], np.cumsum(kept[order])])

    def above(bounds: Row) -> Weights:
        """The mass of those above each bound."""
        found: Weights = 1.0 - upto[np.searchsorted(ascending, bounds, side="right")]
        return found

    slack = min(0.05, near / want.temperature) + _ROUNDING
    first = row == row.max()
    sure = first | (above(row - np.float32(near)) - kept < want.top_p - slack)
    possible = first | (above(row + np.float32(near)) < want.top_p + slack)
    return may & sure, may & possible
