"""A TCP proxy that does to connections what networks do: cut, hold, slow down, half-close."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import Self

CHUNK = 1 << 16


class Proxy:
    """Between clients and a server on a loopback port; one thread for each connection.

    The server may be at another `host` of this machine, and sees `source` as where all come from.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1", source: str = "") -> None:
        self._host, self._source = host, (source, 0) if source else None
        self.target = port
        """Where connections lead that are made from now on."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._connections: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._flows = threading.Event()
        self._flows.set()
        self.refuses = False
        self.chunk = CHUNK
        """Bytes passed on at a time."""
        self.delay = 0.0
        """Seconds before each chunk."""

    def cut(self) -> None:
        """End every connection."""
        for pair in list(self._connections):
            for end in pair:
                _shut(end, socket.SHUT_RDWR)

    def half_close(self) -> None:
        """The server's side of every connection falls silent for good; the client's stays open."""
        for _, upstream in list(self._connections):
            _shut(upstream, socket.SHUT_WR)

    def hold(self) -> None:
        """Pass on nothing: connections stay open, and nothing arrives."""
        self._flows.clear()

    def release(self) -> None:
        """Let go what was held."""
        self._flows.set()

    def passes(self, data: bytes) -> bool:
        """Whether this goes on; if not, its connection ends."""
        return True

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._flows.set()
        _shut(self._listener, socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(60)

    def _spawn(self, target: object, *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                client.close()
                continue
            self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            upstream = socket.create_connection(
                (self._host, self.target), source_address=self._source
            )
        except OSError:
            client.close()
            return
        pair = (client, upstream)
        self._connections.add(pair)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(client, selectors.EVENT_READ, upstream)
                selector.register(upstream, selectors.EVENT_READ, client)
                while not self._closed:
                    for key, _ in selector.select(1.0):
                        source: socket.socket = key.fileobj  # type: ignore[assignment]
                        data = source.recv(self.chunk)
                        if self.delay:
                            time.sleep(self.delay)
                        self._flows.wait()
                        if not data or not self.passes(data):
                            return
                        key.data.sendall(data)
        except OSError:
            pass
        finally:
            self._connections.discard(pair)
            client.close()
            upstream.close()


def _shut(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)
