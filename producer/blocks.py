"""Memory for blocks of rows, of which a large one is used again once its caller has dropped it.

What is as large is the system's as soon as it is free: its pages are filled with zeros anew for
each call, which takes as long as the rows' copying.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LEAST: Final = 32 << 20
"""Bytes from which memory goes back to the system at once; glibc keeps less by itself."""
MOST: Final = 128 << 20
"""Bytes that are kept for the next call, at most."""


def memory_of(needed: int) -> int:
    """Bytes that a block of so many holds on to, at most."""
    return needed if needed < LEAST else needed + needed // 8


class Blocks:
    """Makes blocks, for any thread; keeps the memory of one."""

    def __init__(self) -> None:
        self._spare: deque[npt.NDArray[np.uint8]] = deque(maxlen=1)
        self._lent: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8]]] = {}
        """What callers have, by number: how their dropping it is heard of, and the memory."""

    def empty(self, rows: int, size: int) -> npt.NDArray[np.float32]:
        """An array, float32 [rows, size], of any content."""
        needed = 4 * rows * size
        if not LEAST <= needed <= MOST:
            return np.empty((rows, size), np.float32)
        try:
            memory = self._spare.pop()  # no two threads get the same
        except IndexError:
            memory = None
        if memory is None or not needed <= memory.size <= memory_of(needed):
            memory = np.empty(needed, np.uint8)
        lent = memory[:needed]
        self._lent[id(memory)] = weakref.ref(lent, partial(self._take_back, id(memory))), memory
        # Whatever is made of the array holds on to this view of `lent`, and none to `memory`.
        return np.frombuffer(lent.data, np.float32).reshape(rows, size)

    def _take_back(self, number: int, _: object) -> None:
        self._spare.append(self._lent.pop(number)[1])
