"""fakeredis on a loopback port: the product connects to it as to any server.

One command at a time, as Redis runs them. What fakeredis lacks or does otherwise is made up for
here: it has no INFO, before 2.41 its ``XREADGROUP ... COUNT n BLOCK ms`` answers at once, with
nothing, and of a stream that is not there it says something else than ``NOGROUP``.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, Self

import fakeredis
import hiredis
import redis
import redis.exceptions

INFO = b"# Server\r\nredis_version:7.0.0\r\n"
BLOCKING = (b"XREAD", b"XREADGROUP")

Command = list[bytes]


class FakeServer:
    """A server that is threads of this process."""

    def __init__(self) -> None:
        self._state = fakeredis.FakeServer(version=(7,))
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def client(self) -> redis.Redis:
        """A connection of the test's own; close it."""
        return redis.Redis.from_url(self.url, protocol=2)

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Wakes the accepting thread, which `close` alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._sockets):
            _shut(connection)
        for thread in self._threads:
            thread.join(10)

    def _spawn(self, target: Any, *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, name="fakeredis", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.add(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        reader = hiredis.Reader()
        client = fakeredis.FakeRedis(
            server=self._state, protocol=2, single_connection_client=True, lib_name=None
        )
        client.response_callbacks.clear()  # answers as they are
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(1 << 20):
                reader.feed(data)
                answers = []
                while (command := reader.gets()) is not False:
                    answers.append(self._reply(self._run(client, command, connection)))
                connection.sendall(b"".join(answers))
        except OSError:
            pass
        finally:
            self._sockets.discard(connection)
            connection.close()
            client.close()

    def _reply(self, answer: Any) -> bytes:
        return _encoded(answer)

    def _run(self, client: redis.Redis, command: Command, connection: socket.socket) -> Any:
        name = command[0].upper()
        if name == b"INFO":
            return INFO
        with self._changed:
            if name in BLOCKING and b"BLOCK" in command:
                return self._wait(client, command, connection)
            answer = _execute(client, command)
            self._changed.notify_all()
            return answer

    def _wait(self, client: redis.Redis, command: Command, connection: socket.socket) -> Any:
        at = command.index(b"BLOCK")
        milliseconds = int(command[at + 1])
        deadline = time.monotonic() + milliseconds / 1000 if milliseconds else None
        command = command[:at] + command[at + 2 :]
        while not (answer := _execute(client, command)) and not self._closed:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._changed.wait(left)
            if _has_left(connection):
                return None
        return answer


def _has_left(connection: socket.socket) -> bool:
    """Whether a client has hung up: what comes goes to others."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _execute(client: redis.Redis, command: Command) -> Any:
    try:
        return client.execute_command(*command)
    except redis.exceptions.RedisError as error:
        if "subcommand requires the key to exist" in str(error) and command[0].upper() != b"XGROUP":
            return redis.exceptions.ResponseError("NOGROUP No such key or consumer group")
        return error


def _encoded(answer: Any) -> bytes:
    """An answer as RESP2."""
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, redis.exceptions.NoScriptError):
        return b"-NOSCRIPT no such script\r\n"
    if isinstance(answer, Exception):
        text = str(answer).replace("\r", " ").replace("\n", " ")
        first = text.partition(" ")[0]
        return f"-{'' if first.isupper() else 'ERR '}{text}\r\n".encode()
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, (list, tuple)):
        return b"*%d\r\n" % len(answer) + b"".join(map(_encoded, answer))
    data = answer if isinstance(answer, bytes) else str(answer).encode()
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
