"""The client's own cache of answers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, cast

from lmpool.interrupts import frees
from lmpool.result_memory import CACHED_BYTES
from lmpool.rows import EncodedRow
from lmpool.wants import Answer, Digest

SHARED_PART: Final = 4
"""What part of the cache a block is at most whose rows are kept in it."""


class Together:
    """Rows of one block that a cache has: its memory is taken as long as it has any."""

    __slots__ = ("digests", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.digests: set[Digest] = set()


class AnswerCache:
    """Least recently used answers, bounded by bytes; safe to use from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        self.rows = 0
        """How many of the answers are rows."""
        self._answers: OrderedDict[Digest, Answer] = OrderedDict()
        self._together: dict[Digest, Together] = {}
        self._used: set[Digest] = set()
        """Those of them that were asked for since."""
        self._lock = threading.RLock()  # a signal's handler may ask, too

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def size(self) -> int:
        """Bytes held, overhead included."""
        return self._bytes

    @frees("_lock")
    def get(self, digest: Digest) -> Answer | None:
        """The answer, which becomes the most recently used, or None."""
        if digest not in self._answers:  # most often: what was asked before is not asked again
            return None
        with self._lock:
            answer = self._answers.get(digest)
            if answer is None:
                return None
            self._answers.move_to_end(digest)
            if digest not in self._together:
                return answer
            # Who asks may be interrupted: what is counted is for those who put.
            self._used.add(digest)
            return cast(EncodedRow, answer).copy()

    @frees("_lock")
    def touch(self, digest: Digest) -> None:
        """An answer, if it is there, becomes the most recently used."""
        with self._lock:
            if digest in self._answers:
                self._answers.move_to_end(digest)

    @frees("_lock")
    def take(self, digest: Digest) -> Answer | None:
        """The answer, which is kept no longer, or None. Not for rows."""
        if digest not in self._answers:
            return None
        with self._lock:
            answer = self._answers.pop(digest, None)
            if answer is not None:
                self._uncount(answer)
                self._bytes -= answer.nbytes
            return answer

    def peek(self, digest: Digest) -> Answer | None:
        """The answer, which is used no more recently by that, or None."""
        return self._answers.get(digest)

    def may_share(self, nbytes: int) -> bool:
        """Whether rows may be kept in a block of so many bytes that somebody else has, too."""
        return nbytes <= self.max_bytes // SHARED_PART

    @frees("_lock")
    def put(self, digest: Digest, answer: Answer, together: Together | None = None) -> None:
        """Keep an answer, dropping the least recently used while over the bound. A row may be kept
        `together` with others of its block."""
        if answer.nbytes + CACHED_BYTES > self.max_bytes:
            return
        with self._lock:
            while self._used:
                self._part(self._used.pop())
            if digest in self._answers:
                return
            self._answers[digest] = answer
            self._bytes += CACHED_BYTES
            self.rows += type(answer) is EncodedRow
            if together is None:
                self._bytes += answer.nbytes
            else:
                self._together[digest] = together
                self._bytes += 0 if together.digests else together.nbytes
                together.digests.add(digest)
            self._drop_what_is_over()

    def _part(self, digest: Digest) -> None:
        """Give a row of a block memory of its own, so that it stays when that goes."""
        together = self._together.pop(digest, None)
        if together is None:
            return
        together.digests.discard(digest)
        own = self._answers[digest] = cast(EncodedRow, self._answers[digest]).copy()
        self._bytes += own.nbytes - (0 if together.digests else together.nbytes)
        self._drop_what_is_over()

    def _drop_what_is_over(self) -> None:
        while self._bytes > self.max_bytes:
            digest, dropped = self._answers.popitem(last=False)
            self._uncount(dropped)
            together = self._together.pop(digest, None)
            if together is None:
                self._bytes -= dropped.nbytes
                continue
            # Its memory is free once none of its rows is left, which nobody has asked for since.
            together.digests.discard(digest)
            for other in together.digests:
                del self._together[other]
                self._uncount(self._answers.pop(other))
            together.digests.clear()
            self._bytes -= together.nbytes

    def _uncount(self, dropped: Answer) -> None:
        self._bytes -= CACHED_BYTES
        self.rows -= type(dropped) is EncodedRow

    @frees("_lock")
    def clear(self) -> None:
        """Drop every answer."""
        with self._lock:
            self._answers.clear()
            for together in self._together.values():
                together.digests.clear()
            self._together.clear()
            self._used.clear()
            self._bytes = self.rows = 0

    def unlock(self) -> None:
        """A new lock, for a forked child: another thread may have held the old one."""
        self._lock = threading.RLock()
