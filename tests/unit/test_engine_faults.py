"""Engines that answer nonsense, and a server that has lost all: the worker serves on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import redis

from lmpool.backends.engine import Outcome, Request
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.errors import PoolTimeout, PromptFailed
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker

BAD, GOOD = [7, 7], [1, 2, 3]
right = MockEngine.compute


def _row(change: Callable[[Any], Any]) -> Callable[[Outcome], list[Outcome]]:
    return lambda outcome: [Outcome(outcome.id, change(outcome.row))]


class Speechless(Exception):
    """An error that cannot even be worded."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


FAULTS: dict[str, Callable[[Outcome], Any]] = {
    "no outcome": lambda outcome: [],
    "another's outcome": lambda outcome: [Outcome(b"?" * 16, outcome.row)],
    "neither row nor error": lambda outcome: [Outcome(outcome.id)],
    "tokens": lambda outcome: [Outcome(outcome.id, tokens=np.arange(3, dtype=np.uint32))],
    "a short row": _row(lambda row: row[:-1]),
    "an empty row": _row(lambda row: row[:0]),
    "a table": _row(lambda row: row.reshape(1, -1)),
    "a number": _row(lambda row: np.float32(0)),
    "a list": _row(list),
    "integers": _row(lambda row: row.astype(np.int64)),
    "objects": _row(lambda row: row.astype(object)),
    "NaN": _row(lambda row: row * np.nan),
    "None": lambda outcome: [None],
    "raises": lambda outcome: 1 / 0,
    "raises no words": lambda outcome: (_ for _ in ()).throw(Speechless()),
    "raises what is no UTF-8": lambda outcome: (_ for _ in ()).throw(OSError("mod\udce8le")),
    "an error that is no UTF-8": lambda outcome: [
        Outcome(outcome.id, error=PromptFailed("mod\udce8le"))
    ],
    "out of memory": lambda outcome: (_ for _ in ()).throw(MemoryError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_engine_fails_its_prompt_alone(
    fault: str, any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(self: MockEngine, requests: Sequence[Request]) -> Iterable[Outcome]:
        for request, outcome in zip(requests, right(self, requests), strict=True):
            if request.tokens.tolist() == BAD:
                yield from FAULTS[fault](outcome)
            else:
                yield outcome

    monkeypatch.setattr(MockEngine, "compute", compute)
    with (
        in_process_worker(any_server, pool_name),
        connected(any_server, pool_name, cache_bytes=0) as lm,
    ):
        for _ in range(2):  # and again: nothing of it is kept
            with pytest.raises(PromptFailed):
                lm.next_token_logprobs_sync(BAD, timeout=60)
            assert (lm.next_token_logprobs_sync(GOOD, timeout=60) == mock_row(GOOD, 256)).all()


@pytest.mark.parametrize("times", [2, 3])
def test_outcomes_given_several_times_count_once(
    times: int, any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MockEngine, "compute", lambda self, rs: [*right(self, rs)] * times)
    with (
        in_process_worker(any_server, pool_name),
        connected(any_server, pool_name) as lm,
    ):
        assert (lm.next_token_logprobs_sync(GOOD, timeout=60) == mock_row(GOOD, 256)).all()
        ids = lm.sample_sync(GOOD, 5, [], seed=1, timeout=60)
        assert len(ids) == 5


def test_a_continuation_that_nobody_waits_for_is_ended(any_server: str, pool_name: str) -> None:
    options = {"delay": 0.01, "max_prompt_tokens": 100_000}
    with (
        in_process_worker(any_server, pool_name, engine_opts=options) as worker,
        connected(any_server, pool_name) as lm,
    ):
        with pytest.raises(PoolTimeout):
            lm.sample_sync(GOOD, 90_000, [], seed=1, timeout=0.5)
        until(lambda: not worker.service.status.held)  # it would take 15 minutes
        engine = worker.service.engine
        assert engine is not None
        until(lambda: engine.in_flight() == 0)
        assert (lm.next_token_logprobs_sync(GOOD, timeout=60) == mock_row(GOOD, 256)).all()


def test_new_clients_find_the_pool_on_a_server_that_has_lost_all(
    server_binary: str, pool_name: str
) -> None:
    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, pool_name),
        server.client() as admin,
    ):
        assert isinstance(admin, redis.Redis)
        admin.flushall()
        until(lambda: admin.exists(f"lmpool:{pool_name}"))
        with connected(server.url, pool_name) as lm:
            assert (lm.next_token_logprobs_sync(GOOD, timeout=60) == mock_row(GOOD, 256)).all()
            until(lambda: admin.keys("*:vocabulary"))
            assert len(lm.byte_vocab) == 256
