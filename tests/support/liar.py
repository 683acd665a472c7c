"""A proxy that lies: it cuts, delays, repeats, swaps and makes up the server's replies."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

KINDS = ("cut", "delay", "repeat", "swap", "random", "bytes")
CHUNK = 1 << 16
KEPT = 64
"""Replies that are kept to be swapped for others."""


def made_up(rng: random.Random, depth: int = 0) -> bytes:
    """A reply of any type, shape and size."""
    kind = rng.choice(b"+-:$n*" if depth < 3 else b"+-:$n")
    words = b"OK|QUEUED||ERR no|NOSCRIPT none|WRONGTYPE no|NOGROUP no|hjqfa|1-1|\xff"
    text = rng.choice(words.split(b"|"))
    if kind in b"+-":
        return bytes([kind]) + text + b"\r\n"
    if kind in b":":
        return b":%d\r\n" % rng.choice([-2, -1, 0, 1, 7, 2**63 - 1])
    if kind in b"$":
        data = rng.choice([text, rng.randbytes(rng.randrange(40)), b"\x00" * 5000])
        return b"$%d\r\n%s\r\n" % (len(data), data)
    if kind in b"n":
        return rng.choice([b"$-1\r\n", b"*-1\r\n"])
    parts = [made_up(rng, depth + 1) for _ in range(rng.randrange(5))]
    return b"*%d\r\n" % len(parts) + b"".join(parts)


def end_of_reply(data: bytes, start: int) -> int | None:
    """Where the reply that begins at `start` ends; None if not all of it is there."""
    left = 1
    while left:
        line = data.find(b"\r\n", start)
        if line < 0:
            return None
        kind, length = data[start], data[start + 1 : line]
        start = line + 2
        left -= 1
        if kind == ord("$") and int(length) >= 0:
            start += int(length) + 2
        elif kind == ord("*") and int(length) > 0:
            left += int(length)
    return start if start <= len(data) else None


class Liar:
    """Between clients and a server on a loopback port; two threads for each connection.

    While `rate` is above 0, that share of the server's replies is not what it said.
    """

    def __init__(self, port: int, seed: int, kinds: tuple[str, ...] = KINDS) -> None:
        self._target = port
        self._seed = seed
        self._kinds = kinds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.rate = 0.0
        self.lies = 0
        """How many it has told."""
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._opened = 0
        self._others: list[bytes] = []
        self._closed = threading.Event()

    def cut(self) -> None:
        """End every connection."""
        for end in list(self._ends):
            _shut(end)

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        _shut(self._listener)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(60)

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
                upstream = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                if self._closed.is_set():
                    return
                client.close()
                continue
            self._opened += 1
            self._ends |= {client, upstream}
            rng = random.Random(f"{self._seed} {self._opened}")
            self._spawn(self._ask, client, upstream)
            self._spawn(self._answer, client, upstream, rng)

    def _ask(self, client: socket.socket, upstream: socket.socket) -> None:
        with self._ending(client, upstream):
            while data := client.recv(CHUNK):
                upstream.sendall(data)

    def _answer(self, client: socket.socket, upstream: socket.socket, rng: random.Random) -> None:
        data = b""
        with self._ending(client, upstream):
            while part := upstream.recv(CHUNK):
                data += part
                start = 0
                while start < len(data) and (end := end_of_reply(data, start)) is not None:
                    self._pass_on(client, data[start:end], rng)
                    start = end
                data = data[start:]

    def _pass_on(self, client: socket.socket, reply: bytes, rng: random.Random) -> None:
        if len(self._others) < KEPT:
            self._others.append(reply)
        else:
            self._others[rng.randrange(KEPT)] = reply
        if rng.random() >= self.rate:
            client.sendall(reply)
            return
        self.lies += 1
        kind = rng.choice(self._kinds)
        if kind == "cut":
            client.sendall(reply[: rng.randrange(len(reply))])
            _shut(client)
        elif kind == "delay":
            self._closed.wait(rng.uniform(0.05, 0.5))
            client.sendall(reply)
        elif kind == "repeat":
            client.sendall(reply * 2)
        elif kind == "swap":
            client.sendall(rng.choice(self._others))
        elif kind == "random":
            client.sendall(made_up(rng))
        else:
            client.sendall(rng.randbytes(rng.randint(1, 64)))

    @contextlib.contextmanager
    def _ending(self, *ends: socket.socket) -> Iterator[None]:
        try:
            with contextlib.suppress(OSError):
                yield
        finally:
            for end in ends:
                _shut(end)
                self._ends.discard(end)
                end.close()


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
