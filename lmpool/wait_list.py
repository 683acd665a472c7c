"""What a client waits for, in memory that the workers of its machine read.

Nobody locks it, and nothing is taken out: a slot says which answer was asked for last, of those
that fall there. Of what is written over no worker knows that anybody near waits: it comes from the
server, as all else. What has come is computed no more, and so nobody looks for it.

A file: magic, and behind 64 bytes uint64 for each slot: the second half of a digest whose first
half falls there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.wants import Digest

MAGIC: Final = b"lmpool waits 1\0\0"
SLOTS: Final = 1 << 14
"""A multiple of the large rows that a client waits for at one time."""
FRONT: Final = 64
SIZE: Final = FRONT + 8 * SLOTS

_HALF: Final = np.dtype("<u8")


class WaitListError(Exception):
    """A file that is no list of this release."""


class WaitList:
    """The list of one client, which writes it: for any threads."""

    def __init__(self, file: int) -> None:
        """A new one in an empty file. Raises `OSError` where there is no room for it."""
        os.posix_fallocate(file, 0, SIZE)
        memory = mmap.mmap(file, SIZE)
        memory[: len(MAGIC)] = MAGIC
        self._slots: Any = np.frombuffer(memory, _HALF, SLOTS, FRONT)

    def add(self, digests: Sequence[Digest]) -> None:
        """These are waited for, from before they are asked for."""
        # Whole numbers that lie in one piece are written in one step.
        halves = halves_of(digests)
        self._slots[halves[:, 0] % SLOTS] = halves[:, 1]


class WaitListReader:
    """The list of a client, to a worker: for any threads."""

    def __init__(self, file: int) -> None:
        """Raises `WaitListError` for a file that is none, `OSError` where it cannot be mapped."""
        size, head = os.fstat(file).st_size, os.pread(file, len(MAGIC), 0)
        if head != MAGIC or size != SIZE:
            raise WaitListError(f"{size} bytes that begin with {head!r}")
        memory = mmap.mmap(file, SIZE, access=mmap.ACCESS_READ)
        self._slots: Any = np.frombuffer(memory, _HALF, SLOTS, FRONT)

    def has(self, halves: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of these digests are waited for, as `halves_of` gives them: bool [digests]."""
        found: npt.NDArray[np.bool_] = self._slots[halves[:, 0] % SLOTS] == halves[:, 1]
        return found


def halves_of(digests: Sequence[Digest]) -> npt.NDArray[np.uint64]:
    """The halves of each digest as numbers: uint64 [digests, 2]."""
    return np.frombuffer(b"".join(digests), _HALF).reshape(-1, 2)
