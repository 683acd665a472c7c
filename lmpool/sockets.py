"""Reading from and writing to sockets, in as few steps as each kind allows.

A socket to a server on the same machine holds a few hundred KiB. What is larger comes in as many
steps, and in each of them both sides fall asleep and are woken, which takes longer than the copying
does. So what is on its way from there is waited for awake, for a moment.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

AWAKE: Final = 50e-6
"""Seconds that the next bytes are waited for awake: a few times what they take to come. Nothing is
yielded meanwhile: on a core that others keep busy that would be for milliseconds."""
PIECES: Final = 16
"""Pieces of memory that one read may fill or one write send: a socket holds a few values."""
SEND_BYTES: Final = 2 << 20
"""That a unix socket is to hold of what is sent, as far as the system lets it: other kinds grow by
themselves."""

Move: TypeAlias = Callable[[Sequence[Any]], int]
"""Fills pieces of memory, or sends them, as far as a socket goes at once: returns how many bytes
that were, at least one unless the connection has ended. Raises what the socket raises, and within
its timeout. For the thread that closes the socket, and no other: by the time it moves, its number
might be another's."""


def reads(end: Any) -> tuple[Move, Move]:
    """How pieces of memory are filled with what a socket receives: the first of it, which may be
    long in coming, and then the rest."""
    if isinstance(end, ssl.SSLSocket) or not hasattr(end, "recvmsg_into"):

        def one(pieces: Sequence[Any]) -> int:
            return int(end.recv_into(pieces[0]))

        return one, one

    def asleep(pieces: Sequence[Any]) -> int:
        return int(end.recvmsg_into(pieces[:PIECES])[0])

    return asleep, _awake(end, os.readv, asleep) if _is_worth_it(end) else asleep


def writes(end: Any) -> Move:
    """How pieces of memory are sent."""
    if isinstance(end, ssl.SSLSocket) or not hasattr(end, "sendmsg"):
        return lambda pieces: int(end.send(pieces[0]))
    if end.family == getattr(socket, "AF_UNIX", None):
        kind = socket.SOL_SOCKET, socket.SO_SNDBUF
        with suppress(OSError):
            if end.getsockopt(*kind) < SEND_BYTES:
                end.setsockopt(*kind, SEND_BYTES)

    def asleep(pieces: Sequence[Any]) -> int:
        return int(end.sendmsg(pieces[:PIECES]))

    return _awake(end, os.writev, asleep) if _is_worth_it(end) else asleep


def is_near(end: socket.socket) -> bool:
    """Whether who is at the other end of a connected socket runs on this machine, as far as its
    address says."""
    try:
        peer = end.getpeername()
    except OSError:
        return False
    if not isinstance(peer, tuple):
        return True  # a unix socket's path
    return str(peer[0]).startswith(("127.", "::ffff:127.")) or peer[0] == "::1"


def _is_worth_it(end: socket.socket) -> bool:
    """Whether the other end can be waited for awake: one without a timeout is waited for in any
    case, and on a single core it would be kept from running."""
    if not hasattr(os, "readv") or not end.gettimeout() or not is_near(end):
        return False
    return _cores() > 1


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _awake(end: socket.socket, move: Callable[[int, Sequence[Any]], int], asleep: Move) -> Move:
    def moved(pieces: Sequence[Any]) -> int:
        some, until = pieces[:PIECES], 0.0
        while True:
            try:
                return move(end.fileno(), some)
            except BlockingIOError:
                now = time.perf_counter()
            if not until:
                until = now + AWAKE
            elif now > until:
                return asleep(some)

    return moved
