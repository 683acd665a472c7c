"""Rows in memory that a worker shares with the clients of its machine, the newest over the oldest.

Nobody locks it, and nothing is ever waited for. A row says which answer it is and where it was
laid, and the ring how far it has been written: who has copied a row sees whether that was still
there. What is not is read from the server, which has it all.

A file of `FRONT` bytes and the rows behind them, each from a multiple of 64 bytes on::

    0    magic, uint64 bytes of rows, uint64 number of slots
    64   uint64: the position up to which the ring is, or is about to be, written
    128  the name of the worker that writes it, in UTF-8, and zeros behind
    4096 uint64 for each slot: the position of the last row whose digest falls there
    row  digest, uint64 position, uint64 length, 8 bytes of nothing; the row as it is stored

A position counts all bytes since the beginning: its place is what is left over of the ring's size.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
from typing import Any, Final

import numpy as np

from lmpool.rows import ROW_HEADER_BYTES, PackedRow
from lmpool.wants import DIGEST_BYTES, Digest

IS_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether another core sees what one writes in that order, without a fence that Python lacks."""
MAGIC: Final = b"lmpool rows 2\0\0\0"
SLOTS: Final = 1 << 14
"""A multiple of the rows that there are in a ring of usual size: few fall into one slot."""
FRONT: Final = 4096 + 8 * SLOTS
SPARE: Final = 8
"""A row takes one part in so many at most, and as much is counted as written over before it is:
more than one core writes before others see how far it is."""
ALIGNED: Final = 64

_HEAD: Final = struct.Struct("<16sQQ")
_OWNER: Final = slice(128, 1024)
_ROW: Final = struct.Struct(f"<{DIGEST_BYTES}sQQ8x")
_ROW_HEAD: Final = _ROW.size + ROW_HEADER_BYTES
"""The numbers come behind as many bytes, at a multiple of 64."""


class RingError(Exception):
    """A file that is no ring of this release."""


def place_of(digest: Digest) -> int:
    """The slot of a digest."""
    return int.from_bytes(digest[:4], "little") % SLOTS


class _Ring:
    """What both sides see of it."""

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        self.size = size
        """Bytes of rows."""
        self._spare = size // SPARE
        self._memory = memoryview(memory)
        # Whole numbers that lie in one piece are read and written in one step.
        self._written: Any = np.frombuffer(memory, np.uint64, 1, 64)
        self._slots: Any = np.frombuffer(memory, np.uint64, SLOTS, 4096)


class RowRing(_Ring):
    """A ring that is written, by one thread at a time."""

    def __init__(self, file: int, size: int, owner: str) -> None:
        """A new one of `size` bytes of rows in an empty file, of the worker `owner`. Raises
        `OSError` where there is no room for it: all of it is taken now, as there is no error to
        come later."""
        os.posix_fallocate(file, 0, FRONT + size)
        memory = mmap.mmap(file, FRONT + size)
        memory[: _HEAD.size] = _HEAD.pack(MAGIC, size, SLOTS)
        name = owner.encode("utf-8", "surrogateescape")[: _OWNER.stop - _OWNER.start]
        memory[_OWNER.start : _OWNER.start + len(name)] = name
        super().__init__(memory, size)
        self._at = ALIGNED
        """The position of the next row; at 0 there is none, which empty slots say."""

    def lay(self, digest: Digest, row: PackedRow) -> bool:
        """Lay a row that is stored under `digest`. False where it is too large, or has another
        header than ours."""
        size = row.nbytes
        needed = -(-(_ROW.size + size) // ALIGNED) * ALIGNED
        if needed > self._spare or len(row.header) != ROW_HEADER_BYTES:
            return False
        at = self._at
        if at % self.size + needed > self.size:
            at += self.size - at % self.size  # a row lies in one piece
        self._written[0] = self._at = at + needed  # first: what is there is so no more
        start = FRONT + at % self.size
        numbers = start + _ROW_HEAD
        memory = self._memory
        memory[start:numbers] = _ROW.pack(digest, at, size) + row.header
        memory[numbers : start + _ROW.size + size] = row.numbers
        self._slots[place_of(digest)] = at
        return True


class RowRingReader(_Ring):
    """A ring that is read, by any threads."""

    def __init__(self, file: int) -> None:
        """Raises `RingError` for a file that is none, `OSError` where it cannot be mapped."""
        whole = os.fstat(file).st_size
        head = os.pread(file, _HEAD.size, 0)
        magic, size, slots = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0)
        if magic != MAGIC or slots != SLOTS or not 0 < size == whole - FRONT:
            raise RingError(f"{whole} bytes that begin with {magic!r}")
        memory = mmap.mmap(file, whole, access=mmap.ACCESS_READ)
        self.owner = memory[_OWNER].rstrip(b"\0").decode("utf-8", "surrogateescape")
        """The name of the worker that writes it, as far as the file says."""
        super().__init__(memory, size)

    def copy(
        self, digest: Digest, size: int, room: PackedRow | None = None
    ) -> PackedRow | memoryview | None:
        """A copy of the row of `size` bytes, header included; None where it is there no more, or
        never was.

        With a `room` its numbers are copied there, for a row of that header, and what there is may
        be of no row; else to memory of their own.
        """
        at = int(self._slots[place_of(digest)])
        if not at or not self._holds(at):
            return None
        start = FRONT + at % self.size
        end = start + _ROW.size + size
        memory = self._memory
        if end > len(memory) or bytes(memory[start : start + _ROW.size]) != _ROW.pack(
            digest, at, size
        ):
            return None
        found: PackedRow | memoryview
        if room is None:
            # Not a bytearray, which would be filled with zeros first.
            value = np.empty(size, np.uint8).data
            value[:] = memory[start + _ROW.size : end]
            found = value.toreadonly()
        else:
            header = bytes(memory[start + _ROW.size : start + _ROW_HEAD])
            if header != room.header or len(room.numbers) != size - ROW_HEADER_BYTES:
                return None
            room.numbers[:] = memory[start + _ROW_HEAD : end]
            found = PackedRow(header, room.numbers.toreadonly())
        return found if self._holds(at) else None

    def _holds(self, at: int) -> bool:
        """Whether what was laid at a position is there."""
        return 0 <= int(self._written[0]) - at <= self.size - self._spare
