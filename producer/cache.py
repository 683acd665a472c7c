"""The client's own cache of answers."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lmpool.result_memory import CACHED_BYTES
from lmpool.rows import EncodedRow
from lmpool.wants import Answer, Digest


class AnswerCache:
    """Least recently used answers, bounded by bytes; safe to use from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        self.rows = 0
        """How many of the answers are rows."""
        self._answers: OrderedDict[Digest, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def size(self) -> int:
        """Bytes held, overhead included."""
        return self._bytes

    def get(self, digest: Digest) -> Answer | None:
        """The answer, which becomes the most recently used, or None."""
        if digest not in self._answers:  # most often: what was asked before is not asked again
            return None
        with self._lock:
            answer = self._answers.get(digest)
            if answer is not None:
                self._answers.move_to_end(digest)
            return answer

    def peek(self, digest: Digest) -> Answer | None:
        """The answer, which is used no more recently by that, or None."""
        return self._answers.get(digest)

    def put(self, digest: Digest, answer: Answer) -> None:
        """Keep an answer, dropping the least recently used while over the bound."""
        size = answer.nbytes + CACHED_BYTES
        if size > self.max_bytes:
            return
        with self._lock:
            if digest in self._answers:
                return
            self._answers[digest] = answer
            self._bytes += size
            self.rows += type(answer) is EncodedRow
            while self._bytes > self.max_bytes:
                _, dropped = self._answers.popitem(last=False)
                self._bytes -= dropped.nbytes + CACHED_BYTES
                self.rows -= type(dropped) is EncodedRow

    def clear(self) -> None:
        """Drop every answer."""
        with self._lock:
            self._answers.clear()
            self._bytes = self.rows = 0

    def unlock(self) -> None:
        """A new lock, for a forked child: another thread may have held the old one."""
        self._lock = threading.Lock()
