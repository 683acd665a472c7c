"""Random numbers that any process computes alike: draws of a seed are the same on every engine."""

from __future__ import annotations

import numpy as np

_MASK64 = (1 << 64) - 1


def uniform(seed: int, step: int) -> float:
    """The draw in [0, 1) of `step` under `seed` (any int; equal modulo 2**64 draw alike).

    Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", SC 2011): any step can be drawn without the ones before it.
    """
    key = (seed & _MASK64) | ((step & _MASK64) << 64)
    raw = int(np.random.Philox(key=key).random_raw())
    return (raw >> 11) * 2.0**-53
