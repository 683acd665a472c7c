"""A call that waited in vain says what was wrong meanwhile, as far as its client found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import lmpool
from lmpool.errors import PoolTimeout
from lmpool.producer import sender
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

pytestmark = [pytest.mark.server, pytest.mark.one_server]

LONG = 5.0
"""Seconds of a call in which its client looks after what it waits for."""
WAYS: dict[str, Callable[[lmpool.PooledLM, float], Any]] = {
    "lone": lambda lm, timeout: lm.sync.next_token_logprobs([9], timeout=timeout),
    "batch": lambda lm, timeout: lm.sync.batch_next_token_logprobs([[9], [8]], timeout=timeout),
    "windowed": lambda lm, timeout: list(lm.sync.ask_iter([lmpool.Ask([9])], timeout=timeout)),
    "stream": lambda lm, timeout: list(lm.sync.stream([9], 5, timeout=timeout)),
}


def late(lm: lmpool.PooledLM, way: str, timeout: float = LONG) -> str:
    """What is told of a call of which nothing comes."""
    with pytest.raises(PoolTimeout) as found:
        WAYS[way](lm, timeout)
    return str(found.value)


@contextmanager
def left_by_its_worker(url: str, pool: str) -> Iterator[lmpool.PooledLM]:
    """A client of a pool whose only worker has left."""
    with ExitStack() as stack:
        with in_process_worker(url, pool):
            lm = stack.enter_context(connected(url, pool))
            lm.sync.next_token_logprobs([1])
        yield lm


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers count as gone at the first look that finds none."""
    monkeypatch.setattr(sender, "LIFE_MS", 0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("way", WAYS)
def test_a_pool_without_workers_is_said_to_have_none(way: str, pool_name: str) -> None:
    with RealServer() as server, left_by_its_worker(server.url, pool_name) as lm:
        said = late(lm, way)
        assert said.endswith(f"withdrawn (pool {pool_name!r}, which had no worker alive)")
        # Nobody looks in so short a time: what was found before a call says nothing of it.
        assert late(lm, way, 0.01).endswith(f"withdrawn (pool {pool_name!r})")


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_is_gone_is_said_to_be(way: str, pool_name: str) -> None:
    slow = {"engine_opts": {"delay": 3600.0}}
    with RealServer() as server, worker_process(server.url, pool_name, **slow) as worker:
        with connected(server.url, pool_name) as lm, ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(late, lm, way, 8.0)
            until(lambda: lm.statistics()["queued"] > 0)
            server.kill()
            while not waiting.done():  # what has nothing to do with it finds nothing mended
                with pytest.raises(lmpool.LmpoolError):
                    lm.sync.pool_statistics(timeout=0.05)
            said = waiting.result()
            assert said.endswith(f"withdrawn (pool {pool_name!r}, whose server did not answer)")
            assert str(server.socket) not in said
        worker.kill()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("what", ["workers", "server"])
def test_what_is_mended_while_a_call_waits_is_told_no_more(what: str, pool_name: str) -> None:
    slow = {"engine_opts": {"delay": 25.0}, "drain_timeout": 0.1, "may_fail": True}
    with (
        RealServer() as server,
        left_by_its_worker(server.url, pool_name) as lm,
        ThreadPoolExecutor(1) as threads,
    ):
        troubles = lm._client._session.troubles
        if what == "server":
            server.kill()
        waiting = threads.submit(late, lm, "lone", 20.0)
        until(lambda: what in troubles)
        if what == "server":
            server.start()
        with in_process_worker(server.url, pool_name, **slow):
            until(lambda: not troubles)
            assert waiting.result(60).endswith(f"withdrawn (pool {pool_name!r})")
