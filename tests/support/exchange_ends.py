"""An exchange without a server: its connection's other end is the test's."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any, Final

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA

from lmpool.bell import Bell
from lmpool.exchange import Exchange, waited_for

LONG: Final = 5.0


class Ends:
    """An exchange, which reads `buffer` bytes at once, and the other end of its connection."""

    def __init__(self, buffer: int = 4096) -> None:
        self.here, self.there = socket.socketpair()
        self.here.settimeout(1.0)
        self.bell = Bell()
        reader = hiredis.Reader(notEnoughData=NOT_ENOUGH_DATA)
        parser = SimpleNamespace(_reader=reader, _buffer=bytearray(buffer))
        connection = SimpleNamespace(_sock=self.here, _parser=parser)
        server: Any = SimpleNamespace(connection_pool=SimpleNamespace(_one=connection))
        self.exchange = Exchange(server, self.bell)

    def reply(self, seconds: float = LONG) -> Any:
        """The next reply, for which this thread waits."""
        return self.replies(1, seconds)[0]

    def replies(self, count: int, seconds: float = LONG) -> list[Any]:
        """The next ones."""
        return waited_for(self.exchange.replies(count, time.monotonic() + seconds))

    def close(self) -> None:
        """Both ends, and the bell."""
        self.here.close()
        self.there.close()
        self.bell.close()
