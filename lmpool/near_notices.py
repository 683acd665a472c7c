"""What a worker tells the clients of its machine: which rows it has just laid, and where.

A notice is written to a pipe of the client's in one piece, and never waited for: where the pipe is
full nobody reads, and the rows come from the server, as those of which nobody was told.
"""

from __future__ import annotations

import os
import select
import stat
import struct
import threading
import weakref
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from lmpool.interrupts import frees
from lmpool.neighbours import close_own, which
from lmpool.wants import DIGEST_BYTES, Digest

fcntl: Any
termios: Any
try:
    import fcntl
    import termios
except ImportError:  # Windows, where nobody is told of anything
    fcntl = termios = None

PIPE_BYTES: Final = getattr(select, "PIPE_BUF", 512)
"""Bytes that arrive in one piece, whoever else writes."""
READ_BYTES: Final = 256
"""No more at once: by what is left in its pipe workers see how far behind a client is."""
RING_BYTES: Final = 16
"""Length of a ring's name, which is hexadecimal digits."""

_HEAD: Final = struct.Struct(f"<4sH{RING_BYTES}s")
_MARK: Final = b"rows"
NOTICE_MOST: Final = (PIPE_BYTES - _HEAD.size) // DIGEST_BYTES
"""Digests in one notice."""


class NearNotice(NamedTuple):
    """Rows that lie in the ring of that name."""

    ring: str
    digests: list[Digest]


class NoticeReader:
    """The client's end of its pipe, which one thread reads until it is closed."""

    def __init__(self, pipe: int) -> None:
        """The pipe, open for reading and writing; it is not taken over."""
        self._pipe = os.dup(pipe)
        self._which = which(os.fstat(self._pipe))
        self._end = weakref.finalize(self, close_own, self._pipe, self._which)
        self._left = b""
        self._closed = False
        # Closed or written to, but not one after the other where its number is another's by then.
        self._ending = threading.RLock()

    @frees("_ending")
    def read(self) -> list[NearNotice] | None:
        """The notices that have come, once there are any; None once it was closed: then nothing is
        read any more."""
        with suppress(BlockingIOError):  # it was closed in the midst of this
            if not self._closed:
                data = os.read(self._pipe, READ_BYTES)
                if not self._closed:
                    return [*self._notices(data)]
        with self._ending:
            self._let_go()
        return None

    def fileno(self) -> int:
        """The pipe's, to be waited for; less than 0 once it was let go of."""
        return self._pipe

    @frees("_ending")
    def is_empty(self) -> bool:
        """Whether nothing has come that was not read."""
        with self._ending:
            return not self._closed and not _unread(self._pipe)

    def _notices(self, data: bytes) -> Iterator[NearNotice]:
        data, at = self._left + data, 0
        self._left = b""
        while len(data) - at >= _HEAD.size:
            mark, count, ring = _HEAD.unpack_from(data, at)
            begin = at + _HEAD.size
            end = begin + DIGEST_BYTES * count
            if mark != _MARK or count > NOTICE_MOST:
                # Nobody of ours wrote that: what comes next may begin well.
                if behind := _unread(self._pipe):
                    os.read(self._pipe, behind)
                return
            if end > len(data):
                break
            digests = [Digest(data[n : n + DIGEST_BYTES]) for n in range(begin, end, DIGEST_BYTES)]
            yield NearNotice(ring.decode("ascii", "replace"), digests)
            at = end
        self._left = data[at:]

    @frees("_ending")
    def close(self) -> None:
        """End `read`, for another thread, or in the midst of anything of its own."""
        with self._ending:
            self._closed = True
            if self._is_mine():
                os.set_blocking(self._pipe, False)
                with suppress(OSError):  # it is full: there is something to be read
                    os.write(self._pipe, _MARK)

    def after_fork(self) -> None:
        """In a forked child, where nobody reads."""
        self._let_go()

    def _let_go(self) -> None:
        self._pipe = -1
        self._end()

    def _is_mine(self) -> bool:
        """Whether its number is not another's, as after all were closed, which daemons do."""
        try:
            return self._pipe >= 0 and which(os.fstat(self._pipe)) == self._which
        except OSError:
            return False


class NoticeWriter:
    """A worker's end of a client's pipe."""

    def __init__(self, path: str) -> None:
        """Raises `OSError` where that is no pipe of this user's, or nobody reads."""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        self._pipe = os.open(path, flags)
        found = os.fstat(self._pipe)
        self._end = weakref.finalize(self, close_own, self._pipe, which(found))
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is no pipe of this user's")

    def unread(self) -> int:
        """How many rows, about, its client was told of, by whomever, and has not come to."""
        return _unread(self._pipe) // DIGEST_BYTES

    def tell(self, notice: NearNotice) -> None:
        """Say it, unless the pipe is full. Raises `OSError` where nobody reads any more."""
        ring, digests = notice
        for begin in range(0, len(digests), NOTICE_MOST):
            some = digests[begin : begin + NOTICE_MOST]
            with suppress(BlockingIOError):
                os.write(
                    self._pipe,
                    _HEAD.pack(_MARK, len(some), ring.encode("ascii")) + b"".join(some),
                )


def _unread(pipe: int) -> int:
    """Bytes that lie in a pipe."""
    size = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, size)
    return size[0]
