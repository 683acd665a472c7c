"""A call's rows while others come: received in one block, put there by who waits, or converted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeAlias, cast

import numpy as np

from lmpool.errors import LmpoolError
from lmpool.model_info import ModelInfo
from lmpool.producer.blocks import memory_of
from lmpool.producer.cache import Together
from lmpool.producer.frameworks import Framework, RowT_co
from lmpool.rows import ENTRY_BYTES, EncodedRow
from lmpool.wants import Answer, Row
from lmpool.wire import Job

LARGE: Final = 32 << 10
"""Bytes from which a row is received into memory of its own: less is copied as quickly."""
STACKED: Final = EncodedRow("f32", 0, 0.0, np.empty(0, "<f4"))
"""Stands where a row was that is in its place, or on its way there."""
IS_NATIVE: Final = np.dtype("<f4").isnative
"""Whether rows lie in memory as they travel."""

Taking: TypeAlias = "Stack[Any] | Conversion[Any]"
"""What takes the rows of a call as they come."""
GoesOn: TypeAlias = Callable[[], bool]
"""Whether who waits still does: it is not over time, and nothing failed."""


def are_stacked(jobs: Sequence[Job], info: ModelInfo) -> bool:
    """Whether the rows of these jobs are worth being put in their place as they come."""
    return len(jobs) > 1 and jobs[0].want.stored_bytes(info) >= LARGE


def are_converted(jobs: Sequence[Job], info: ModelInfo) -> bool:
    """Whether any rows of these jobs are worth being converted as they come."""
    if len(jobs) < 2 or ENTRY_BYTES["bf16"] * info.vocab_size < LARGE:
        return False  # of small rows no job is looked at
    return any(isinstance(job.want, Row) and job.want.encoding != "f32" for job in jobs)


def always() -> bool:
    """Of a call that is done: all that came is wanted."""
    return True


class _Landing:
    """Rows that came, until who waits takes them in, or who brought them."""

    def __init__(self) -> None:
        self._landed: deque[tuple[int, EncodedRow]] = deque()
        self._helping = threading.Lock()
        """Held while another thread than that of who waits has some in hand."""

    def land(self, place: int, row: EncodedRow) -> bool:
        """A row came that it takes. Whether who waits knows of no other yet. Under the client's
        lock."""
        self._landed.append((place, row))
        return len(self._landed) == 1

    def take_in(self, goes_on: GoesOn = always) -> None:
        """Put what came where it belongs, as long as the call `goes_on`: for who waits."""
        while self._landed and goes_on():
            self._take_one()

    def help(self, goes_on: GoesOn) -> None:
        """The same for a thread that has nothing else to do: who waits may still have to wake up,
        or be at rows that came before. One helps at a time."""
        # Without waiting: Ctrl-C may have left it held by who waits.
        if not self._helping.acquire(blocking=False):
            return
        try:
            self.take_in(goes_on)
        finally:
            self._helping.release()

    def _take_one(self) -> None:
        try:
            landed = self._landed.popleft()
        except IndexError:  # the other was quicker
            return
        try:
            self._put(*landed)
        except BaseException:
            self._landed.appendleft(landed)  # who waits is told of what it is
            raise

    def _take_in_all(self) -> None:
        """Put all there is where it belongs, once nobody has any in hand: of a call that is
        done."""
        while True:
            self.take_in()
            with self._helping:
                if not self._landed:
                    return

    def _put(self, place: int, row: EncodedRow) -> None:
        raise NotImplementedError


class Stack(_Landing, Generic[RowT_co]):
    """The block of one call, float32 [rows, vocab_size]."""

    def __init__(self, framework: Framework[RowT_co], rows: int, vocab_size: int) -> None:
        super().__init__()
        self._framework = framework
        self._shape = rows, vocab_size
        self.nbytes = 4 * rows * vocab_size
        # Now: two threads may put the first rows there at the same moment.
        self._block: Any = framework.empty(rows, vocab_size)
        self.kept = Together(memory_of(self.nbytes))
        """Those of its rows that the local cache has."""
        self._lent: set[int] = set()
        """Places that somebody receives a row into."""
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

    def takes(self, answer: Answer) -> bool:
        """Whether an answer is to land here: all that are not in their place."""
        return answer is not STACKED

    def land(self, place: int, row: EncodedRow) -> bool:
        if place in self._lent:
            self._crossed.append((place, row))
            return False
        return super().land(place, row)

    def _put(self, place: int, row: EncodedRow) -> None:
        row.logprobs_into(self._block[place])

    def whole(self, rows: Sequence[Answer]) -> RowT_co:
        """The block of a call that is done, with its answers."""
        self._take_in_all()
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

    def begin(self, jobs: Sequence[Job], info: ModelInfo) -> Stack[RowT_co] | None:
        """One for the rows of these jobs; None where they come to it at the end alone."""
        self._stack = Stack(self._framework, len(jobs), info.vocab_size)
        return self._stack if are_stacked(jobs, info) else None

    def whole(self, rows: Sequence[Answer]) -> RowT_co:
        """The last one's block, once the call is done, with its answers."""
        assert self._stack is not None
        return self._stack.whole(rows)


class Conversion(_Landing, Generic[RowT_co]):
    """The rows of one call that do not travel as callers have them: each gets memory of its own,
    and what it came in is free again."""

    def __init__(self, framework: Framework[RowT_co]) -> None:
        super().__init__()
        self._framework = framework
        self._rows: dict[int, RowT_co] = {}

    def takes(self, answer: Answer) -> bool:
        """Whether an answer is to land here: a row that the caller cannot have as it came."""
        return isinstance(answer, EncodedRow) and answer.encoding != "f32"

    def _put(self, place: int, row: EncodedRow) -> None:
        self._rows[place] = self._framework.one(row)

    def whole(self, found: Sequence[Answer | LmpoolError]) -> list[Any]:
        """The answers of a call that is done, and such rows as the caller gets them."""
        self._take_in_all()
        rows = self._rows
        return [rows[place] if each is STACKED else each for place, each in enumerate(found)]


class Conversions(Generic[RowT_co]):
    """Makes the conversion of a call: another one where that is asked anew."""

    def __init__(self, framework: Framework[RowT_co]) -> None:
        self._framework = framework
        self._conversion: Conversion[RowT_co] | None = None

    def begin(self, jobs: Sequence[Job], info: ModelInfo) -> Conversion[RowT_co] | None:
        """One for these jobs; None where nothing is worth it."""
        # Who brings rows waits for nothing: what cannot be handed out yet is converted at the end.
        worth = self._framework.is_there and are_converted(jobs, info)
        self._conversion = Conversion(self._framework) if worth else None
        return self._conversion

    def whole(self, found: Sequence[Answer | LmpoolError]) -> Sequence[Any]:
        """What the last call was answered with, once it is done: see `Conversion.whole`."""
        return found if self._conversion is None else self._conversion.whole(found)
