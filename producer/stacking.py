"""One block for a call's rows: received there, or put there by who waits, while others come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Generic, cast

import numpy as np

from lmpool.producer.blocks import memory_of
from lmpool.producer.cache import Together
from lmpool.producer.frameworks import Framework, RowT_co
from lmpool.rows import EncodedRow
from lmpool.wants import Answer

STACKED: Final = EncodedRow("f32", 0, 0.0, np.empty(0, "<f4"))
"""Stands where a row was that is in its place, or on its way there."""
IS_NATIVE: Final = np.dtype("<f4").isnative
"""Whether rows lie in memory as they travel."""


class Stack(Generic[RowT_co]):
    """The block of one call, float32 [rows, vocab_size]."""

    def __init__(self, framework: Framework[RowT_co], rows: int, vocab_size: int) -> None:
        self._framework = framework
        self._shape = rows, vocab_size
        self.nbytes = 4 * rows * vocab_size
        # Now: two threads may put the first rows there at the same moment.
        self._block: Any = framework.empty(rows, vocab_size)
        self.kept = Together(memory_of(self.nbytes))
        """Those of its rows that the local cache has."""
        self._lent: set[int] = set()
        """Places that somebody receives a row into."""
        self._landed: deque[tuple[int, EncodedRow]] = deque()
        self._crossed: list[tuple[int, EncodedRow]] = []
        """What came by another way than the one that its place is lent to."""

    @property
    def is_shared(self) -> bool:
        """Whether nobody will write to the block, so that others may have rows of it."""
        return self._framework.is_shared

    def lend(self, place: int, size: int) -> memoryview | None:
        """Memory for the numbers of a row in f32 that nobody has yet, until it is given back; None
        where it is to be received elsewhere. Under the client's lock, as all else but `take_in` and
        `whole`."""
        if not IS_NATIVE or size != 4 * self._shape[1] or place in self._lent:
            return None
        self._lent.add(place)
        return cast(memoryview, self._block[place].data.cast("B"))

    def give_back(self, place: int) -> None:
        """Nobody writes there any more."""
        self._lent.discard(place)

    def land(self, place: int, row: EncodedRow) -> bool:
        """A row came that is not in its place. Whether who waits knows of no other yet."""
        if place in self._lent:
            self._crossed.append((place, row))
            return False
        self._landed.append((place, row))
        return len(self._landed) == 1

    def take_in(self) -> None:
        """Put what came in its place: for who waits."""
        landed = self._landed
        while landed:
            place, row = landed.popleft()
            row.logprobs_into(self._block[place])

    def whole(self, rows: Sequence[Answer]) -> RowT_co:
        """The block of a call that is done, with its answers."""
        self.take_in()
        block = self._block
        if self._crossed:  # there is somebody who may write to it yet
            block = self._framework.empty(*self._shape)
            block[:] = self._block
        for place, row in (*self._crossed, *enumerate(rows)):
            if row is not STACKED:
                cast(EncodedRow, row).logprobs_into(block[place])
        return self._framework.whole(block)


class Stacks(Generic[RowT_co]):
    """Makes the stack of a call: another one where that is asked anew."""

    def __init__(self, framework: Framework[RowT_co]) -> None:
        self._framework = framework
        self._stack: Stack[RowT_co] | None = None

    def begin(self, rows: int, vocab_size: int) -> Stack[RowT_co]:
        """One for so many rows."""
        self._stack = Stack(self._framework, rows, vocab_size)
        return self._stack

    def whole(self, rows: Sequence[Answer]) -> RowT_co:
        """The last one's block, once the call is done, with its answers."""
        assert self._stack is not None
        return self._stack.whole(rows)
