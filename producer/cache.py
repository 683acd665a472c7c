"""The client's own cache of rows."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lmpool.wire import Row

_OVERHEAD = 200
"""Bytes that an entry takes besides its numbers, roughly: key, row and array objects."""


class RowCache:
    """Least recently used rows, bounded by bytes; safe to use from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        self._rows: OrderedDict[bytes, Row] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """Bytes held, overhead included."""
        return self._bytes

    def get(self, digest: bytes) -> Row | None:
        """The row, which becomes the most recently used, or None."""
        with self._lock:
            row = self._rows.get(digest)
            if row is not None:
                self._rows.move_to_end(digest)
            return row

    def put(self, digest: bytes, row: Row) -> None:
        """Keep a row, dropping the least recently used while over the bound."""
        size = row.data.nbytes + _OVERHEAD
        if size > self.max_bytes:
            return
        with self._lock:
            if digest in self._rows:
                return
            self._rows[digest] = row
            self._bytes += size
            while self._bytes > self.max_bytes:
                _, dropped = self._rows.popitem(last=False)
                self._bytes -= dropped.data.nbytes + _OVERHEAD

    def clear(self) -> None:
        """Drop every row."""
        with self._lock:
            self._rows.clear()
            self._bytes = 0

    def unlock(self) -> None:
        """A new lock, for a forked child: another thread may have held the old one."""
        self._lock = threading.Lock()
