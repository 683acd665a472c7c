"""A server that lies, byte by byte, to clients and to workers: nobody hangs, nobody breaks."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import LmpoolError
from tests.support.liar import Liar
from tests.support.server import RealServer
from tests.support.workers import WorkerProcess

pytestmark = pytest.mark.server

RATE = 0.1
"""The share of replies that are lies."""
DOCUMENTED = {name for name in lmpool.errors.__all__ if name != "LmpoolError"}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What ended a thread, and tracebacks that were logged."""
    found: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(repr(args.exc_value)))

    class Traced(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    handler = Traced()
    logging.getLogger("lmpool").addHandler(handler)
    yield found
    logging.getLogger("lmpool").removeHandler(handler)


class Lateness(threading.Thread):
    """How late threads wake up on this machine, which is no doing of the client's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self._found: list[tuple[float, float]] = []
        self._due = time.monotonic() + 0.02
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            now = time.monotonic()
            self._found.append((now, now - self._due))
            self._due = now + 0.02

    def since(self, began: float) -> float:
        """Seconds, all together, that wakings came late since then; the next may be late by now."""
        overdue = max(0.0, time.monotonic() - self._due)
        return overdue + sum(late for when, late in self._found if when >= began)


def calls(liar: Liar, url: str, pool: str, rng: random.Random, seconds: float) -> list[str]:
    """Ask for `seconds`, and until there were many lies, with clients old and new. Returns the
    names of the errors."""
    errors: list[str] = []
    late = Lateness()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends or liar.lies <= 20:
        lm = lmpool.connect(
            url, pool, framework="numpy", cache_bytes=0, workers_timeout=2, reconnect_timeout=2
        )
        try:
            for _ in range(rng.randint(1, 40)):
                timeout = rng.uniform(0.2, 1.5)
                prompts = [[rng.randrange(256), rng.randrange(256)] for _ in range(16)]
                began = time.monotonic()
                try:
                    if rng.random() < 0.9:
                        lm.batch_next_token_logprobs_sync(prompts, timeout=timeout)
                    else:
                        lm.sample_sync(prompts[0], 3, [1], timeout=timeout)
                except LmpoolError as error:
                    errors.append(type(error).__name__)
                took = time.monotonic() - began
                assert took < timeout + 5.0 + late.since(began), errors[-1:]
        finally:
            lm.close(timeout=1.0)
    late.ended.set()
    assert set(errors) <= DOCUMENTED
    return errors


def is_served(url: str, pool: str) -> bool:
    """Whether rows come, and the right ones."""
    prompts = [[9, number] for number in range(40)]
    with lmpool.connect(url, pool, framework="numpy", cache_bytes=0, workers_timeout=20) as lm:
        rows = lm.batch_next_token_logprobs_sync(prompts, timeout=60)
    expected = [mock_row(prompt, 256) for prompt in prompts]
    return bool(np.array_equal(rows, expected))


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [
        (1, 4.0),
        *(pytest.param(seed, 60.0, marks=[pytest.mark.chaos]) for seed in range(2, 7)),
    ],
)
def test_a_server_that_lies_to_clients(
    seed: int, seconds: float, server_binary: str, pool_name: str, traces: list[str]
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(RealServer(binary=server_binary, tcp=True))
        worker = WorkerProcess(server.url, pool_name, result_ttl=1)
        stack.callback(worker.close)
        worker.wait_until_alive()
        liar = stack.enter_context(Liar(server.port, seed))
        liar.rate = RATE
        errors = calls(liar, liar.url, pool_name, random.Random(seed), seconds)
        liar.rate = 0.0
        assert is_served(liar.url, pool_name)
        print(f"{liar.lies} lies, errors {sorted(set(errors))}")
        assert traces == []
        assert "Traceback" not in worker.log


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [
        (1, 4.0),
        *(pytest.param(seed, 60.0, marks=[pytest.mark.chaos]) for seed in range(2, 7)),
    ],
)
def test_a_server_that_lies_to_a_worker(
    seed: int, seconds: float, server_binary: str, pool_name: str, traces: list[str]
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(RealServer(binary=server_binary, tcp=True))
        liar = stack.enter_context(Liar(server.port, seed))
        worker = WorkerProcess(liar.url, pool_name, result_ttl=1)
        stack.callback(worker.close)
        worker.url = server.url
        worker.wait_until_alive()
        liar.rate = RATE
        calls(liar, server.url, pool_name, random.Random(seed), seconds)
        liar.rate = 0.0
        try:
            assert is_served(server.url, pool_name)
        except LmpoolError as error:
            raise AssertionError(f"{error!r}; the worker says:\n{worker.log}") from None
        assert "Traceback" not in worker.log, worker.log
        assert traces == []
        worker.terminate()
        assert worker.wait() == 0, worker.log
