"""Memory for blocks of rows, which is used again once its caller has dropped it.

New memory has to be given by the system, filled with zeros page by page: that takes longer than the
rows' copying, and what is freed goes back to the system, as it is large.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LEAST: Final = 1 << 20
"""Bytes of a block that is worth it."""
MOST: Final = 128 << 20
"""Bytes that are kept for the next calls, all together."""


def memory_of(needed: int) -> int:
    """Bytes that a block of so many holds on to, at most."""
    return needed if needed < LEAST else needed + needed // 8


class Blocks:
    """Makes blocks, for any thread; keeps the memory of those that were dropped last."""

    def __init__(self) -> None:
        # No lock: blocks are dropped in the midst of anything, this here among it.
        self._spare: deque[npt.NDArray[np.uint8]] = deque()
        self._lent: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8]]] = {}
        """What callers have, by number: how their dropping it is heard of, and the memory."""

    def empty(self, rows: int, size: int) -> npt.NDArray[np.float32]:
        """An array, float32 [rows, size], of any content."""
        needed = 4 * rows * size
        if not LEAST <= needed <= MOST:
            return np.empty((rows, size), np.float32)
        memory = self._spare_of(needed)
        if memory is None:
            memory = np.empty(needed, np.uint8)
        lent = memory[:needed]
        self._lent[id(memory)] = weakref.ref(lent, partial(self._take_back, id(memory))), memory
        # Whatever is made of the array holds on to this view of `lent`, and none to `memory`.
        return np.frombuffer(lent.data, np.float32).reshape(rows, size)

    def _spare_of(self, needed: int) -> npt.NDArray[np.uint8] | None:
        """Memory of about that size, which is taken from what is spare: no two threads get the
        same."""
        spare = self._spare
        for _ in range(len(spare)):
            try:
                memory = spare.pop()  # what was dropped last is likely to be at hand
            except IndexError:
                break
            if needed <= memory.size <= memory_of(needed):
                return memory
            spare.appendleft(memory)
        return None

    def _take_back(self, number: int, _: object) -> None:
        spare = self._spare
        spare.append(self._lent.pop(number)[1])
        # A list, not a tuple: making one of those may collect garbage, blocks among it, on the way.
        left = sum(memory.size for memory in [*spare]) - MOST
        with suppress(IndexError):  # another thread may take some meanwhile
            while left > 0:
                left -= spare.popleft().size
