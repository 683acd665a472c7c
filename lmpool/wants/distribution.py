"""Drawing from what a row says, by inverting its cumulative distribution in the order of ids.

To sum up a whole vocabulary in float64 for each draw would cost more than all else that is done
with a row. The weights are summed by blocks, and only the block that a draw leads to is summed up
token by token.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from lmpool.wants.answers import Logprobs, TokenArray

BLOCK: Final = 256
FAINT: Final = 1e-6
"""The mass, beside the likeliest token's as 1, under which what is left is weighed anew."""
_MOST_TEMPERATURE: Final = 1e30

Weights = npt.NDArray[np.float64]


class Distribution:
    """The tokens of a row, float32 [vocab], at a temperature above 0.

    Weights are float32, that of the likeliest is 1. Their sums are float64.
    """

    def __init__(self, row: Logprobs, temperature: float) -> None:
        self._row = row
        self._heat = scale(temperature)
        self._taken: list[int] = []
        self._weigh()

    def _weigh(self) -> None:
        row, blocks = self._row, -(-self._row.size // BLOCK)
        self._top = float(row.max())
        flat = np.zeros(blocks * BLOCK, np.float32)
        weights = flat[: row.size]
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(row, np.float32(self._top), out=weights)
            if self._heat != 1.0:
                weights /= np.float32(self._heat)
            np.exp(weights, out=weights)
        self._weights = flat.reshape(blocks, BLOCK)
        self._masses = self._weights.sum(1, np.float64)

    @property
    def mass(self) -> float:
        """That of all tokens, beside the likeliest as 1."""
        return float(self._masses.sum())

    def logprobs(self, ids: TokenArray) -> Weights:
        """The log-probability of each of these tokens, at the temperature."""
        found: Weights = (self._row[ids].astype(np.float64) - self._top) / self._heat
        return found - math.log(self.mass)

    def at(self, places: Weights) -> TokenArray:
        """The tokens, int32 [n], at `places`, [n] in [0, 1), of the cumulative distribution."""
        cumulative = self._masses.cumsum()
        at = places * cumulative[-1]
        blocks = cumulative.searchsorted(at, side="right")
        if blocks.max() == cumulative.size:  # a product may round up to the total
            blocks = np.minimum(blocks, np.flatnonzero(self._masses)[-1])
        left = at - np.where(blocks > 0, cumulative[blocks - 1], 0.0)
        weights = self._weights[blocks]
        found = (weights.cumsum(1, np.float64) <= left[:, None]).sum(1)
        # Nor is anything led to past the last token of a block: sums of another order round apart.
        last = BLOCK - 1 - (weights[:, ::-1] > 0).argmax(1)
        ids: TokenArray = (blocks * BLOCK + np.minimum(found, last)).astype(np.int32)
        return ids

    def take(self, place: float) -> tuple[int, float]:
        """Take out the token at a place in [0, 1); with its log-probability before that."""
        cumulative = self._masses.cumsum()
        mass = float(cumulative[-1])
        if mass < FAINT:
            self._renew()
            return self.take(place)
        at = place * mass
        block = int(cumulative.searchsorted(at, side="right"))
        if block == cumulative.size:
            block = int(np.flatnonzero(self._masses)[-1])
        weights = self._weights[block]
        left = at - float(cumulative[block - 1]) if block else at
        found = int(weights.cumsum(dtype=np.float64).searchsorted(left, side="right"))
        if found == BLOCK:
            found = int(np.flatnonzero(weights)[-1])
        token = block * BLOCK + found
        weights[found] = 0.0
        self._masses[block] = weights.sum(dtype=np.float64)
        self._taken.append(token)
        return token, (float(self._row[token]) - self._top) / self._heat - math.log(mass)

    def _renew(self) -> None:
        """Weigh what is left beside the likeliest of it: it may be all that there is now."""
        self._row = self._row.copy()
        self._row[self._taken] = -np.inf
        self._weigh()


def scale(temperature: float) -> float:
    """A temperature within what float32 can divide by: beyond, rows are as flat or as steep."""
    return min(max(temperature, 1 / _MOST_TEMPERATURE), _MOST_TEMPERATURE)
