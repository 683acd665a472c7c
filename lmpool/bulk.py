"""Large values received into the memory where they stay, and sent from where they are.

A reader of replies gathers what comes, and copies a value out of it once it is whole; both copies
take as long as the reading. Where the sizes of all values are known, so is where each byte of the
reply belongs, and it is received there. A reply that is another is the usual reader's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import redis.exceptions

from lmpool.rows import PackedRow
from lmpool.sockets import PIECES, Move, writes

PORTION: Final = 256 << 10
"""Bytes that are taken within a socket's limit in time, or else nobody is there."""


def receive_values(
    receive: tuple[Move, Move],
    sizes: Sequence[int],
    leave: Callable[[bytes], object],
    rooms: Sequence[PackedRow | None] = (),
) -> list[memoryview | PackedRow] | None:
    """Values of these sizes, as the array of them that is about to come: read-only memory.

    A row for which there is a room is to have its header, and its numbers are received there.

    `receive` is as `lmpool.sockets.reads` gives it. None where the reply is another one: what has
    come of it was given to `leave`. Raises redis-py's `ConnectionError` where the connection ends,
    and what the socket raises.
    """
    places = [*rooms] or [None] * len(sizes)
    heads = [
        b"\r\n$%d\r\n%b" % (size, b"" if room is None else room.header)
        for size, room in zip(sizes, places, strict=True)
    ]
    heads[0] = b"*%d%b" % (len(sizes), heads[0])
    heads.append(b"\r\n")
    expected = b"".join(heads)
    came = memoryview(bytearray(len(expected)))
    # Not bytearrays, which would be filled with zeros first.
    values = [
        np.empty(size, np.uint8).data if room is None else room.numbers
        for size, room in zip(sizes, places, strict=True)
    ]
    pieces: list[memoryview] = []
    end = 0
    for head, value in zip(heads, [*values, came[:0]], strict=True):
        start, end = end, end + len(head)
        pieces += (came[start:end], value)
    del pieces[-1]
    left = pieces.copy()
    at = total = known = checked = 0
    while at < len(pieces):
        count = receive[total > 0](left[at : at + PIECES])
        if not count:
            raise redis.exceptions.ConnectionError("Connection closed by server.")
        total += count
        while count:
            size = len(left[at])
            known += min(count, size) if at % 2 == 0 else 0
            if count < size:
                left[at] = left[at][count:]
                break
            count -= size
            at += 1
        if bytes(came[checked:known]) != expected[checked:known]:  # before more is waited for
            leave(b"".join(pieces[: at + 1])[:total])
            return None
        checked = known
    return [
        value.toreadonly() if room is None else PackedRow(room.header, value.toreadonly())
        for value, room in zip(values, places, strict=True)
    ]


class Gathered:
    """A command in pieces which leave in few writes: for redis-py's ``send_packed_command``.

    That sends what this yields, each by itself; what is sent here, while it asks for more, ends in
    its errors all the same.
    """

    def __init__(self, connection: Any, pieces: Sequence[bytes | memoryview]) -> None:
        self._connection = connection
        self._pieces = pieces

    def __len__(self) -> int:
        """How many bytes are to be sent."""
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[bytes | memoryview]:
        if len(self._pieces) == 1 and len(self._pieces[0]) <= PORTION:
            return iter(self._pieces)  # which leaves at once: no look at the socket is worth it
        socket = self._connection._sock
        send = writes(socket)
        left, at = [memoryview(piece) for piece in self._pieces], 0
        # A write returns as soon as one byte has left: the socket's limit alone would have no end.
        limit: float | None = socket.gettimeout()
        end, due = time.monotonic(), 0
        while at < len(left):
            if limit is not None and due <= 0:
                end, due = time.monotonic() + limit, PORTION
            count = send(left[at : at + PIECES])
            due -= count
            while at < len(left) and count >= len(left[at]):
                count -= len(left[at])
                at += 1
            if count:
                left[at] = left[at][count:]
            if limit is not None and at < len(left) and due > 0 and time.monotonic() > end:
                raise TimeoutError("too few bytes were taken in time")
        return iter(())
