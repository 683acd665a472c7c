"""What the server itself can do with values as large as rows: the bound of any pool on it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from typing import Self

from tests.benchmarks.pool import WrongRows
from tests.support.server import RealServer


class RawConnection:
    """A connection without a client library: nothing is parsed but what must be, nothing copied."""

    def __init__(self, server: RealServer, size: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(server.socket))
        self._value = memoryview(bytes(size))
        self._head = f"${size}\r\n".encode()
        # The answer to GET: the head, the value, a line end.
        self._answer = bytearray(len(self._head) + size + 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def set(self, keys: Iterable[bytes], ttl_ms: int) -> None:
        """SET each key to a value of the full size, with a time to live."""
        ttl = str(ttl_ms).encode()
        tail = b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl), ttl)
        for key in keys:
            head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n%s" % (len(key), key, self._head)
            self._send(head, tail)
            if self._socket.recv(64) != b"+OK\r\n":
                raise WrongRows("SET was refused")

    def get(self, keys: Iterable[bytes]) -> None:
        """GET each key into one buffer."""
        for key in keys:
            self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
            self._receive()

    def _send(self, head: bytes, tail: bytes) -> None:
        sent = self._socket.sendmsg((head, self._value, tail))
        total = len(head) + len(self._value) + len(tail)
        if sent < total:
            rest = b"".join((head, self._value, tail))
            self._socket.sendall(memoryview(rest)[sent:])

    def _receive(self) -> None:
        answer, got = memoryview(self._answer), 0
        while got < len(answer):
            more = self._socket.recv_into(answer[got:])
            # A missing key's answer is short: without a look at the head this would wait for ever.
            if more == 0 or (got == 0 and not self._answer.startswith(self._head[:more])):
                raise WrongRows("GET found no value of this size")
            got += more


def alternating(server: RealServer, keys: list[bytes], size: int, ttl_ms: int) -> float:
    """Values a second: SET and GET of each in turn, on one connection."""
    with RawConnection(server, size) as connection:
        began = time.perf_counter()
        for key in keys:
            connection.set((key,), ttl_ms)
            connection.get((key,))
        return len(keys) / (time.perf_counter() - began)


def beside(server: RealServer, keys: list[bytes], size: int, ttl_ms: int) -> float:
    """Values a second: one connection SETs them while another GETs as many others."""
    there = [b"there:%d" % number for number in range(min(64, len(keys)))]
    with RawConnection(server, size) as writer, RawConnection(server, size) as reader:
        writer.set(there, 600_000)
        chosen = [there[number % len(there)] for number in range(len(keys))]
        thread = threading.Thread(target=reader.get, args=(chosen,))
        began = time.perf_counter()
        thread.start()
        writer.set(keys, ttl_ms)
        thread.join()
        return len(keys) / (time.perf_counter() - began)
