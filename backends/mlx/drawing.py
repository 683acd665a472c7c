"""Drawing from rows where MLX has them, by the law of `lmpool.wants.distribution`."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.mlx.model import mx
from lmpool.backends.mlx.reduction import block_sums, blocks_of, processor
from lmpool.wants.distribution import BLOCK, FAINT

_PLACES: Final = 64
"""Of a row that are found at once: each has a block of its own in float64."""


def places_of(uniforms: npt.NDArray[np.float64]) -> Any:
    """Places [rows, n] in [0, 1), as float64."""
    with processor():
        return mx.array(uniforms, mx.float64)


class Weights:
    """The weights of tokens, float32 [rows, vocab]; sums of their blocks are float64.

    Of a row without any weight nothing means anything.
    """

    def __init__(self, weights: Any) -> None:
        self._flat = blocks_of(weights).reshape(-1, BLOCK)
        self._masses = block_sums(self._flat.reshape(len(weights), -1, BLOCK))

    @property
    def masses(self) -> Any:
        """Those of all tokens, float64 [rows, 1]."""
        with processor():
            return self._masses.sum(axis=1, keepdims=True)

    def at(self, places: Any) -> Any:
        """The tokens, int32 [rows, n], at `places`, float64 [rows, n] in [0, 1)."""
        with processor():
            cumulative = mx.cumsum(self._masses, axis=1)
            total, last = cumulative[:, -1:], _last(self._masses)
            before = mx.pad(cumulative, [(0, 0), (1, 0)])
            parts = []
            for start in range(0, places.shape[1], _PLACES):
                at = places[:, start : start + _PLACES] * total
                block = (cumulative[:, None] <= at[:, :, None]).sum(axis=2)
                block = mx.minimum(block, last)  # a product may round up to the total
                left = at - mx.take_along_axis(before, block, axis=1)
                weights = self._block(block)
                found = (mx.cumsum(weights, axis=2) <= left[:, :, None]).sum(axis=2)
                # Nor is anything led to past a block's last token: sums of another order round
                # apart.
                parts.append(block * BLOCK + mx.minimum(found, _last(weights)[:, :, 0]))
            return mx.concatenate(parts, axis=1).astype(mx.int32)

    def take_out(self, ids: Any) -> None:
        """Leave these tokens out, int32 [rows, 1]."""
        with processor():
            rows, blocks = self._masses.shape
            block, nothing = ids // BLOCK, mx.array(0.0)
            at = mx.arange(rows)[:, None] * blocks + block
            self._flat[at[:, 0], (ids % BLOCK)[:, 0]] = nothing
            sums = self._block(block).sum(axis=2)
            self._masses = mx.put_along_axis(self._masses, block, sums, axis=1)

    def put(self, some: Any, others: Weights) -> None:
        """Take the weights of `others` in some rows, bool [rows, 1]."""
        rows, blocks = self._masses.shape
        each = mx.repeat(some, blocks, axis=1).reshape(rows * blocks, 1)
        self._flat = mx.where(each, others._flat, self._flat)
        with processor():
            self._masses = mx.where(some, others._masses, self._masses)

    def _block(self, block: Any) -> Any:
        """The weights of these blocks [rows, n] as float64 [rows, n, `BLOCK`]."""
        rows, blocks = self._masses.shape
        at = mx.arange(rows)[:, None] * blocks + block
        return mx.take(self._flat, at, axis=0).astype(mx.float64)


class Distributions:
    """Rows, float32 [rows, vocab], at a temperature above 0 that float32 can divide by.

    The weight of a row's likeliest is 1. Of a row without any probability nothing means anything.
    """

    def __init__(self, rows: Any, heat: float) -> None:
        self._rows = rows
        self._heat = heat
        self._tops = rows.max(axis=1, keepdims=True)
        self._weights = Weights(mx.exp((rows - self._tops) / heat))

    def log_mass(self) -> Any:
        """The log of the mass of all tokens, float32 [rows], beside the likeliest as 1."""
        with processor():
            return mx.log(self._weights.masses).astype(mx.float32)[:, 0]

    def logprobs(self, ids: Any) -> Any:
        """The log-probability of each of these tokens [rows, n], at the temperature."""
        found = (mx.take_along_axis(self._rows, ids, axis=1) - self._tops) / self._heat
        with processor():
            return (found - mx.log(self._weights.masses)).astype(mx.float32)

    def at(self, places: Any) -> Any:
        """The tokens, int32 [rows, n], at `places`, float64 [rows, n] in [0, 1)."""
        return self._weights.at(places)

    def without_replacement(self, places: Any) -> tuple[Any, Any]:
        """The tokens [rows, n] at `places`, each taken out before the next is drawn.

        With the log-probability of each before it was. Nothing else may be drawn afterwards.
        """
        drawn: list[Any] = []
        logprobs: list[Any] = []
        for n in range(places.shape[1]):
            with processor():
                faint = self._weights.masses < FAINT
                place = places[:, n : n + 1]
            if drawn and bool(faint.any()):  # what is left may be all that there is now
                self._weigh_anew(faint, mx.concatenate(drawn, axis=1))
            ids = self.at(place)
            logprobs.append(self.logprobs(ids))
            self._weights.take_out(ids)
            drawn.append(ids)
        return mx.concatenate(drawn, axis=1), mx.concatenate(logprobs, axis=1)

    def _weigh_anew(self, faint: Any, taken: Any) -> None:
        """Weigh what is left of some rows beside the likeliest of it."""
        rows = mx.put_along_axis(self._rows, taken, mx.array(-mx.inf), axis=1)
        left = Distributions(rows, self._heat)
        self._tops = mx.where(faint, left._tops, self._tops)
        self._weights.put(faint, left._weights)


def _last(weights: Any) -> Any:
    """The last place with any weight along the last dimension, which is kept."""
    places = mx.arange(weights.shape[-1])
    return mx.where(weights > 0, places, 0).max(axis=-1, keepdims=True)
