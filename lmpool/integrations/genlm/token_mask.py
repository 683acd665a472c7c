"""Sets of tokens as `Draw` takes them in their shortest form."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def packed_mask(token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Token ids as a packed mask, int32 [1, ceil(vocab_size / 32)]; see `lmpool.wants.Draw`."""
    members = np.zeros((vocab_size + 31) // 32 * 32, bool)
    members[np.fromiter(token_ids, np.int64)] = True
    return np.packbits(members, bitorder="little").view("<i4").astype(np.int32)[None]
