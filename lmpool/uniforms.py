"""Random numbers that any process computes alike: draws of a seed are the same on every engine.

Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011): keyed by the seed, any of its numbers can be had without the ones before it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_MASK64: Final = (1 << 64) - 1
_AT_ONCE: Final = 4
"""Numbers that the generator makes of one value of its counter."""


def uniform(seed: int, step: int) -> float:
    """The draw in [0, 1) of `step` under `seed` (any int; equal modulo 2**64 draw alike)."""
    counter, place = divmod(step & _MASK64, _AT_ONCE)
    raw = _keyed(seed).advance(counter).random_raw(place + 1)
    return float(_in_unit_interval(raw[-1:])[0])


def uniforms(seed: int, count: int) -> npt.NDArray[np.float64]:
    """The first `count` of them, float64 [count]."""
    return _in_unit_interval(_keyed(seed).random_raw(count))


def _keyed(seed: int) -> np.random.Philox:
    return np.random.Philox(key=seed & _MASK64)


def _in_unit_interval(raw: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return (raw >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
