"""How a gateway listens."""

from __future__ import annotations

import socket
from contextlib import closing

from lmpool.gateway.door import PART, STALL
from lmpool.gateway.serve import SEND_BYTES, listen

SLOWEST = 8192
"""Bytes a second at which a reader is not taken to be gone."""


def test_a_slow_reader_is_seen_to_read() -> None:
    """The system tells of room once a third of its buffer is free, twice what was asked for."""
    listener = listen("127.0.0.1", 0)
    with closing(listener), socket.create_connection(listener.getsockname()):
        taken, _ = listener.accept()
        with taken:
            held = taken.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert held == 2 * SEND_BYTES
    assert (held / 3 + PART) / STALL < SLOWEST
