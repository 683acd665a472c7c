"""What was drawn for streams and waits for their readers.

A stream is read on as fast as it is drawn, whatever its reader does: so its job ends when the model
has ended it, and the place that it had is another's. What waits meanwhile is bounded for all
requests together. Beyond that the one that leaves the most is ended: who reads loses nothing to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from lmpool.gateway.errors import ApiError

T = TypeVar("T")

UNREAD_BYTES: Final = 512 << 20
"""Of all requests together."""


class _Counted(Protocol):
    size: int

    def cut(self) -> None: ...


class Unread:
    """All shelves of a gateway, and what lies on them."""

    def __init__(self, most: int = UNREAD_BYTES) -> None:
        self._most = most
        self._total = 0
        self._shelves: set[_Counted] = set()

    @property
    def total(self) -> int:
        """Bytes that wait for readers."""
        return self._total

    def count(self, shelf: _Counted, size: int) -> None:
        """So many bytes more on a shelf, or fewer."""
        self._total += size
        shelf.size += size
        if shelf.size:
            self._shelves.add(shelf)
        else:
            self._shelves.discard(shelf)
        while self._total > self._most:
            max(self._shelves, key=lambda each: each.size).cut()


class Shelf(Generic[T]):
    """Parts for one reader, in the order that they come. `size_of` tells the bytes of one."""

    def __init__(self, unread: Unread, size_of: Callable[[T], int]) -> None:
        self.size = 0
        """Bytes, as `Unread` counts them."""
        self._unread = unread
        self._size_of = size_of
        self._parts: deque[tuple[T, int]] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._on_cut: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return len(self._parts)

    def begin(self, on_cut: Callable[[], object]) -> None:
        """`on_cut` ends whoever puts parts here, where their reader leaves too many."""
        self._on_cut = on_cut

    def put(self, part: T) -> None:
        """One more part."""
        if self._ended:
            return
        size = self._size_of(part)
        self._parts.append((part, size))
        self._changed.set()
        self._unread.count(self, size)

    def end(self, error: Exception | None = None) -> None:
        """There comes no more; behind what is there its reader is told the error."""
        if not self._ended:
            self._ended, self._error = True, error
        self._changed.set()

    def cut(self) -> None:
        """End it now: nothing of it is told any more but why."""
        self.end()
        self._error = ApiError(
            503, "too much of this stream waits to be read: read faster, or ask for less at a time"
        )
        self.clear()
        self._on_cut()

    def clear(self) -> None:
        """Hold nothing any more."""
        self._parts.clear()
        self._unread.count(self, -self.size)

    async def take(self) -> tuple[T] | None:
        """The next part, or None after the last. Raises what the stream ended with."""
        while not self._parts:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            await self._change()
        part, size = self._parts.popleft()
        self._changed.set()
        self._unread.count(self, -size)
        return (part,)

    async def until_fewer(self, count: int) -> None:
        """Return once fewer parts than so many wait, or its end has come."""
        while len(self._parts) >= count and not self._ended:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
