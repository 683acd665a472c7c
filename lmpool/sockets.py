"""Reading from and writing to sockets, in as few steps as each kind allows.

A socket to a server on the same machine holds a few hundred KiB. What is larger comes in as many
steps, and in each of them both sides fall asleep and are woken: that takes longer than the copying
does, and costs the one that wakes as much. So there the next bytes are waited for awake, for a
moment, in which whoever else can run does.
"""

from __future__ import annotations

import ctypes
import os
import socket as sockets
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

AWAKE: Final = 50e-6
"""Seconds that the next bytes are waited for awake: a few times what they take to come."""
PIECES: Final = 16
"""Pieces of memory that one read may fill or one write send: a socket holds a few values."""

Move: TypeAlias = Callable[[Sequence[Any]], int]
"""Fills pieces of memory, or sends them, as far as a socket goes at once: returns how many bytes
that were, at least one unless the connection has ended. Raises what the socket raises, and within
its timeout."""


def reads(socket: Any) -> Move:
    """How pieces of memory are filled with what a socket receives."""
    if isinstance(socket, ssl.SSLSocket) or not hasattr(socket, "recvmsg_into"):
        return lambda pieces: int(socket.recv_into(pieces[0]))
    if not is_near(socket):
        return lambda pieces: int(socket.recvmsg_into(pieces[:PIECES])[0])
    return _awake(socket, os.readv, lambda pieces: int(socket.recvmsg_into(pieces)[0]))


def writes(socket: Any) -> Move:
    """How pieces of memory are sent."""
    if isinstance(socket, ssl.SSLSocket) or not hasattr(socket, "sendmsg"):
        return lambda pieces: int(socket.send(pieces[0]))
    if not is_near(socket):
        return lambda pieces: int(socket.sendmsg(pieces[:PIECES]))
    return _awake(socket, os.writev, lambda pieces: int(socket.sendmsg(pieces)))


def is_near(socket: sockets.socket) -> bool:
    """Whether who is at the other end of a connected socket runs on this machine, and can be asked
    without being waited for: that takes a socket with a timeout."""
    if not hasattr(os, "readv") or not socket.gettimeout():
        return False
    try:
        peer = socket.getpeername()
    except OSError:
        return False
    if not isinstance(peer, tuple):
        return True  # a unix socket's path
    return str(peer[0]).startswith(("127.", "::ffff:127.")) or peer[0] == "::1"


def _awake(socket: sockets.socket, move: Callable[[int, Sequence[Any]], int], asleep: Move) -> Move:
    def moved(pieces: Sequence[Any]) -> int:
        pieces, until = pieces[:PIECES], 0.0
        while True:
            try:
                return move(socket.fileno(), pieces)
            except BlockingIOError:
                now = time.perf_counter()
            if not until:
                until = now + AWAKE
            elif now > until:
                return asleep(pieces)
            _let_others_run()

    return moved


def _find_yield() -> Callable[[], object]:
    if sys.version_info >= (3, 12) and hasattr(os, "sched_yield"):
        return os.sched_yield
    try:
        found: Callable[[], object] = ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError, TypeError):  # the system has none
        return lambda: None
    return found  # before 3.12 Python's own keeps the interpreter's lock meanwhile


_let_others_run: Final = _find_yield()
