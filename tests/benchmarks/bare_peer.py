"""One prompt after another through bare sockets: what Redis, hiredis and Python take by themselves.

A process reads prompts off a stream, computes their rows, stores them and tells who waits, as a
worker does: they are claimed by their digests, joined, acknowledged and told by scripts, and each
row is asked for behind the read that brings its notice. Of a pool's other promises none is kept:
each side is one thread that waits for nothing but its socket, nothing is checked, renewed or
counted, and what either loses is lost.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import hiredis
import numpy as np

from lmpool.backends.mock import mock_row
from tests.benchmarks.machine import cpu_seconds
from tests.benchmarks.pool import Cpu, WrongRows
from tests.support.server import RealServer

JOBS, GROUP, REPLY = "bare:jobs", "bare", "bare:reply"
RESULT, FLIGHT = "bare:result:", "bare:flight:"
TTL_MS = "60000"
BLOCK_MS = "5000"

CLAIM: Final = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 'h' end
local waiting = redis.call('GET', KEYS[3])
if waiting then
  redis.call('SET', KEYS[3], waiting .. ' ' .. ARGV[1], 'PX', ARGV[4])
  return 'j'
end
redis.call('XADD', KEYS[1], '*', 'digest', ARGV[2], 'tokens', ARGV[3])
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[4])
return 'q'
"""
COMPLETE: Final = """
local waiting = redis.call('GET', KEYS[2])
redis.call('DEL', KEYS[2])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
for client in string.gmatch(waiting or '', '%S+') do
  redis.call('XADD', client, '*', 'ok', ARGV[3])
end
return 1
"""


class _Connection:
    """A socket, and hiredis for what goes through it."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._reader = hiredis.Reader()
        self._buffer = bytearray(1 << 16)

    def send(self, *commands: tuple[Any, ...]) -> None:
        self._socket.sendall(b"".join(map(hiredis.pack_command, commands)))

    def read(self) -> Any:
        while (reply := self._reader.gets()) is False:
            count = self._socket.recv_into(self._buffer)
            if not count:
                raise ConnectionError("the server has gone")
            self._reader.feed(self._buffer, 0, count)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def ask(self, *command: Any) -> Any:
        self.send(command)
        return self.read()

    def close(self) -> None:
        self._socket.close()


class BarePeer:
    """The caller; see `bare_peer`."""

    def __init__(self, server: RealServer, pid: int) -> None:
        self._server, self._pid = server, pid
        path = str(server.socket)
        self._claims, self._notices = _Connection(path), _Connection(path)
        self._claim = self._claims.ask("SCRIPT", "LOAD", CLAIM).decode()
        self._last = "0-0"

    def row(self, prompt: Sequence[int], block_ms: str = BLOCK_MS) -> Any:
        """A prompt's row, within so many milliseconds."""
        tokens = np.array(prompt, np.uint32).tobytes()
        digest = hashlib.blake2b(tokens, digest_size=16).hexdigest()
        result = RESULT + digest
        keys = (JOBS, result, FLIGHT + digest)
        self._claims.send(("EVALSHA", self._claim, 3, *keys, REPLY, digest, tokens, TTL_MS))
        self._notices.send(
            ("XREAD", "COUNT", "1", "BLOCK", block_ms, "STREAMS", REPLY, self._last),
            ("GET", result),
        )
        if self._claims.read() != b"q":
            raise WrongRows("the prompt was asked before")
        notices = self._notices.read()
        if notices is None:
            raise WrongRows("no answer")
        entry, fields = notices[0][1][0]
        self._last = entry.decode()
        row = self._notices.read()
        if fields[1].decode() != digest or row is None:
            raise WrongRows("the answer to another prompt")
        return np.frombuffer(row, np.float32)

    def cpu(self) -> Cpu:
        """Processor time used so far."""
        return Cpu(cpu_seconds(), cpu_seconds(self._pid), sum(map(cpu_seconds, self._server.pids)))

    def close(self) -> None:
        """Both connections."""
        self._claims.close()
        self._notices.close()


@contextmanager
def bare_peer(server: RealServer, vocab_size: int) -> Iterator[BarePeer]:
    """A caller of a process that serves until the block ends."""
    connection = _Connection(str(server.socket))
    connection.ask("XGROUP", "CREATE", JOBS, GROUP, "0", "MKSTREAM")
    connection.close()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(str(server.socket), vocab_size), daemon=True)
    process.start()
    assert process.pid is not None
    peer = BarePeer(server, process.pid)
    try:
        peer.row([0], "120000")  # it has begun
        yield peer
    finally:
        process.kill()
        process.join()
        peer.close()


def _serve(path: str, vocab_size: int) -> None:
    jobs, results = _Connection(path), _Connection(path)
    complete = results.ask("SCRIPT", "LOAD", COMPLETE).decode()
    read = (
        "XREADGROUP", "GROUP", GROUP, "one", "COUNT", "1", "BLOCK", BLOCK_MS, "STREAMS", JOBS, ">",
    )  # fmt: skip
    while True:
        found = jobs.ask(*read)
        if found is None:
            continue
        entry, fields = found[0][1][0]
        digest, tokens = fields[1].decode(), np.frombuffer(fields[3], np.uint32)
        row = mock_row(tokens, vocab_size).tobytes()
        results.send(
            ("MULTI",),
            ("SET", RESULT + digest, row, "PX", TTL_MS),
            ("EVALSHA", complete, 2, JOBS, FLIGHT + digest, GROUP, entry, digest),
            ("EXEC",),
        )
        *_, done = [results.read() for _ in range(4)]
        for refused in done:
            if isinstance(refused, Exception):
                raise refused
