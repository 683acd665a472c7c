"""A server that answers what none would: an error that says so, and no thread that breaks."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

import lmpool
from lmpool import PooledLM, inspection
from lmpool.errors import LmpoolError
from lmpool.keys import PoolKeys
from tests.support.fake import FakeServer
from tests.support.parts import info_of

COMMANDS = (
    "PING", "INFO", "TIME", "GET", "MGET", "EVALSHA", "EVAL", "EXISTS", "HGETALL", "XLEN", "XREAD",
    "XINFO", "XADD", "PEXPIRE", "EXEC", "DEL",
)  # fmt: skip
NONSENSE: dict[str, Any] = {
    "a number": 7,
    "nothing": None,
    "lists": [[b"a", [1]], None],
    "bytes": b"\xff\xc1\x92",
    "no protocol": ...,
}
ASKED: list[Callable[[PooledLM], object]] = [
    lambda lm: lm.info,
    lambda lm: lm.wait_for_workers_sync(0.1),
    lambda lm: lm.next_token_logprobs_sync([1], timeout=0.1),
    lambda lm: lm.sample_sync([1], 3, [], lora_name="one", timeout=0.1),
    lambda lm: lm.byte_vocab,
    lambda lm: lm.pool_statistics_sync(timeout=0.1),
    lambda lm: lm.cache_kv([1], timeout=0.1),
    lambda lm: inspection.read_facts(lm.url, lm.pool),
]


class NonsenseServer(FakeServer):
    """Answers one command with nonsense."""

    command = b""
    answer: Any = None

    def _run(self, client: Any, command: list[bytes], connection: socket.socket) -> Any:
        if command[0].upper() == self.command:
            return self.answer
        return super()._run(client, command, connection)

    def _reply(self, answer: Any) -> bytes:
        return b"HTTP/1.1 400 Bad Request\r\n\r\n" if answer is ... else super()._reply(answer)


@pytest.mark.parametrize("kind", NONSENSE)
def test_every_call_ends_in_an_error_that_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with NonsenseServer() as server:
        with server.client() as client:
            client.set(PoolKeys("p").info, info_of(shards=1).pack())
        server.answer = NONSENSE[kind]
        for command in COMMANDS:
            server.command = command.encode()
            lm = lmpool.connect(server.url, "p", request_timeout=0.1, workers_timeout=0.1)
            for ask in ASKED:
                began = time.monotonic()
                try:
                    ask(lm)
                except LmpoolError:
                    pass
                assert time.monotonic() - began < 30.0, (command, ask)
            lm.close(0.1)
            server.command = b""
    assert "Traceback" not in caplog.text
