"""What is asked of logits, reduced where MLX has them: the answer is copied, and not the row.

All that goes through whole rows is in float32. Sums of its blocks, and keys that are ordered, have
64 bits: there are few of them, and they are the processor's, as Apple's GPUs have no float64.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lmpool.backends.mlx.model import mx
from lmpool.wants.distribution import BLOCK, scale

_MAXIMA: Final = 64
"""Places of which first the greatest alone is looked at."""
_FEW: Final = 16
_LOWER: Final = (1 << 32) - 1


class Scores(NamedTuple):
    """Scores of T rows, as `TextScores` has them and in its order, and the rows' `logsumexp` [T].

    Where that is not finite, the others mean nothing.
    """

    logprobs: Any
    ranks: Any
    token_logprobs: Any
    top_ids: Any
    top_logprobs: Any
    rest: Any
    logsumexp: Any


def processor() -> Any:
    """Within it MLX computes on the processor, which shares its memory with an Apple GPU."""
    return mx.stream(mx.cpu)


def to_host(array: Any) -> npt.NDArray[Any]:
    """A copy of what MLX has computed, or computes now."""
    found: npt.NDArray[Any] = np.array(array)
    found.flags.writeable = False
    return found


def integers(array: npt.NDArray[Any]) -> Any:
    """Indices, such as token ids, as int32."""
    return mx.array(array.astype(np.int32))


def score_logits(
    logits: Any, targets: Any, *, token_ids: Any = None, top: int = 0, temperature: float = 1.0
) -> Scores:
    """The scores of `targets` int32 [T] by logits float32 [T, vocab].

    `token_ids` is int32 [T, n].
    """
    heat = scale(temperature)
    given = _at(logits, targets[:, None])
    ranks = (logits >= given).sum(axis=1)
    largest = logits.max(axis=1, keepdims=True)
    log_mass = _log_mass(logits, largest, heat)
    best = likeliest(logits, top) if top else None

    def logprobs(ids: Any) -> Any:
        return (_at(logits, ids) - largest) / heat - log_mass

    return Scores(
        logprobs(targets[:, None])[:, 0],
        ranks,
        None if token_ids is None else logprobs(token_ids),
        best,
        None if best is None else logprobs(best),
        None if best is None else _rest(logits, best, largest, heat) - log_mass[:, 0],
        (largest + log_mass)[:, 0],
    )


def top_of(rows: Any, k: int) -> tuple[Any, Any, Any]:
    """The parts of a `TopLogprobs` of each row of log-probabilities, float32 [rows, vocab]."""
    ids = likeliest(rows, k)
    return ids, _at(rows, ids), _rest(rows, ids, mx.zeros((len(rows), 1)), 1.0)


def _at(values: Any, ids: Any) -> Any:
    return mx.take_along_axis(values, ids, axis=1)


def _log_mass(values: Any, largest: Any, heat: float) -> Any:
    """The log of the sum of each row's weights beside that of its largest value [rows, 1]."""
    sums = block_sums(blocks_of(mx.exp((values - largest) / heat)))
    with processor():
        return mx.log(sums.sum(axis=1, keepdims=True)).astype(mx.float32)


def _rest(values: Any, ids: Any, largest: Any, heat: float) -> Any:
    """The log of the mass of all but `ids` [rows], beside `largest` [rows, 1] as 1.

    Summed beside the largest of those left: they may be too small to be summed beside that.
    """
    others = mx.put_along_axis(values, ids, mx.array(-mx.inf, values.dtype), axis=1)
    most = others.max(axis=1, keepdims=True)
    found = (most - largest) / heat + _log_mass(others, most, heat)
    return mx.where(most == -mx.inf, most, found)[:, 0]


def blocks_of(weights: Any) -> Any:
    """Weights float32 [rows, vocab] as [rows, blocks, `BLOCK`], nothing behind the last."""
    rows, size = weights.shape
    return mx.pad(weights, [(0, 0), (0, -size % BLOCK)]).reshape(rows, -1, BLOCK)


def block_sums(blocks: Any) -> Any:
    """The sum of each block, float64 [rows, blocks], on the processor."""
    # Of few at a time: of more numbers at once float32 loses a digit.
    sums = blocks.reshape(*blocks.shape[:2], _FEW, BLOCK // _FEW).sum(axis=3).sum(axis=2)
    with processor():
        return sums.astype(mx.float64)


def likeliest(values: Any, k: int) -> Any:
    """The places of the `k` greatest of each row, int32 [rows, k], equal ones by their place.

    They lie in the `k` blocks of the greatest maxima, equal ones by their place, or in the tail.
    """
    rows, size = values.shape
    blocks = size // _MAXIMA
    if 2 * k >= blocks:
        return _greatest(values, mx.arange(size), k)
    whole = blocks * _MAXIMA
    maxima = values[:, :whole].reshape(rows, blocks, _MAXIMA).max(axis=2)
    chosen = _greatest(maxima, mx.arange(blocks), k)[:, :, None]
    inside = (chosen * _MAXIMA + mx.arange(_MAXIMA)).reshape(rows, -1)
    tail = mx.broadcast_to(mx.arange(whole, size), (rows, size - whole))
    places = mx.concatenate([inside, tail], axis=1)
    return _greatest(_at(values, places), places, k)


def _greatest(values: Any, places: Any, k: int) -> Any:
    """The places [rows, k] of the `k` greatest of float32 [rows, n], equal ones by their place.

    Each of `values` lies at its one of `places`, int32 [rows, n] or [n].
    """
    with processor():
        bits = (values + 0.0).view(mx.int32)  # there is one zero
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of these numbers
        keys = (ordered.astype(mx.int64) << 32) + (_LOWER - places.astype(mx.int64))
        if k < keys.shape[1]:
            keys = -mx.partition(-keys, k - 1, axis=1)[:, :k]
        keys = -mx.sort(-keys, axis=1)
        return (_LOWER - (keys & _LOWER)).astype(mx.int32)
