"""Replies of a bounded size: what others wrote must not fill this process's memory."""

from __future__ import annotations

from typing import Any, Final

import redis.exceptions
from redis._parsers import _HiredisParser

REPLY_BYTES: Final = 64 << 20


class ReplyTooLong(redis.exceptions.ConnectionError):
    """A reply was longer than `REPLY_BYTES`: it was not read to its end, its connection closed."""


class _Counted:
    """A socket that says how much came since `begin`, and gives up beyond the bound."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._receive = socket.recv_into
        self.settimeout = socket.settimeout
        self._came = 0

    def begin(self) -> None:
        """The next reply begins."""
        self._came = 0

    def recv_into(self, buffer: bytearray) -> int:
        """As a socket's."""
        count: int = self._receive(buffer)
        self._came += count
        if self._came > REPLY_BYTES:
            raise ReplyTooLong(f"a reply of more than {REPLY_BYTES} bytes")
        return count


class BoundedParser(_HiredisParser):
    """redis-py's reader of replies, for a connection that reads what others wrote."""

    def on_connect(self, connection: Any, **options: Any) -> None:
        """A new connection."""
        super().on_connect(connection, **options)  # type: ignore[no-untyped-call]
        self._sock: _Counted | None = _Counted(self._sock)

    def read_response(self, disable_decoding: bool = False) -> Any:
        """The next reply."""
        if self._sock is not None:
            self._sock.begin()
        return super().read_response(disable_decoding)  # type: ignore[no-untyped-call]
