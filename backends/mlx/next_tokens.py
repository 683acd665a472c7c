"""The next tokens of continuations, drawn where MLX has the rows, as `sample_token` draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lmpool.backends.engine import NextToken
from lmpool.backends.mlx.drawing import Weights, places_of
from lmpool.backends.mlx.model import mx
from lmpool.backends.mlx.reduction import block_sums, blocks_of, integers, likeliest, processor
from lmpool.wants.distribution import scale


def next_tokens(rows: Any, wants: Sequence[NextToken]) -> Any:
    """The token that follows each row, float32 [rows, vocab], as its want has it: int32 [rows, 1].

    Of a row without any probability it means nothing.
    """
    greedy = likeliest(rows, 1)
    if all(want.temperature == 0.0 for want in wants):
        return greedy
    tops = rows.max(axis=1, keepdims=True)
    heats = _each([scale(want.temperature) for want in wants])
    weights = mx.where(rows == tops, 1.0, mx.exp((rows - tops) / heats))
    drawn = Weights(_left(weights, rows, wants)).at(
        places_of(np.array([[want.place] for want in wants]))
    )
    return mx.where(mx.array([[want.temperature > 0.0] for want in wants]), drawn, greedy)


def _left(weights: Any, rows: Any, wants: Sequence[NextToken]) -> Any:
    """The weights of what may be drawn, 0 of all else; that of the likeliest is 1."""
    size = rows.shape[1]
    if any(want.min_p > 0.0 for want in wants):
        weights = mx.where(weights < _each([want.min_p for want in wants]), 0.0, weights)
    bounds = [want.top_k if 0 < want.top_k < size else size for want in wants]
    if min(bounds) < size:
        last = integers(np.array([[size - bound] for bound in bounds]))
        least = mx.take_along_axis(mx.sort(rows, axis=1), last, axis=1)
        weights = mx.where(rows < least, 0.0, weights)
    if any(want.top_p < 1.0 for want in wants):
        weights = _likely(weights, rows, wants)
    return weights


def _likely(weights: Any, rows: Any, wants: Sequence[NextToken]) -> Any:
    """The weights of the fewest tokens, likeliest first, that have `top_p` of the mass."""
    order = mx.argsort(-rows, axis=1)
    blocks = blocks_of(mx.take_along_axis(weights, order, axis=1))
    sums = block_sums(blocks)
    # Above 0 in float32, too: of a tiny share the likeliest is left.
    shares = [max(want.top_p, 1e-30) if want.top_p < 1.0 else np.inf for want in wants]
    with processor():
        total = sums.sum(axis=1, keepdims=True)
        bounds = mx.array(np.array(shares)[:, None], mx.float64) * total
        room = (bounds - (mx.cumsum(sums, axis=1) - sums)).astype(mx.float32)
    before = mx.cumsum(blocks, axis=2) - blocks
    kept = mx.where(before < room[:, :, None], blocks, 0.0).reshape(len(rows), -1)
    return mx.put_along_axis(weights, order, kept[:, : rows.shape[1]], axis=1)


def _each(numbers: Sequence[float]) -> Any:
    return mx.array([[number] for number in numbers], mx.float32)
