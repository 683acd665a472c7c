"""Who goes first: interactive before batch, neither starved, and no client before all others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import lmpool
from lmpool.backends.engine import Outcome, Request
from lmpool.backends.mock import MockEngine, mock_row
from lmpool.errors import LmpoolError, SettingsError
from lmpool.wants import Digester, Row
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.pools import Asking, pool_shards, some_prompts, until_at_rest
from tests.support.waiting import until
from tests.support.workers import in_process_worker

SLOW = {"batch_size": 8, "engine_opts": {"delay": 0.02}}  # 400 rows a second


class Flood:
    """A client that has very many prompts waiting while the block runs."""

    def __init__(self, url: str, pool: str, seed: int, count: int = 20_000, **options: object):
        self._lm = lmpool.connect(url, pool, framework="numpy", cache_bytes=0, **options)
        self.prompts = some_prompts(count, seed=seed)
        self.rows = 0

    def __enter__(self) -> Flood:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(lambda: self._lm.statistics()["queued"] > 0, what="the flood to begin")
        return self

    def __exit__(self, *_: object) -> None:
        self._lm.reset_async_queries()
        self._thread.join()
        self._lm.close(60)

    def _run(self) -> None:
        with pytest.raises(LmpoolError, match="reset"):
            self._lm.batch_next_token_logprobs_sync(self.prompts)

    def answered(self) -> int:
        """Prompts that were answered so far."""
        table = self._lm._client._session.table
        return len(self.prompts) - len(table.flights)


class Pace:
    """Engines compute while `hold` is open, and what they were given is in `order`."""

    def __init__(self, hold: Hold, order: list[tuple[int, ...]]) -> None:
        self.hold = hold
        self.order = order

    def turns(
        self, lm: lmpool.PooledLM, prompts: Sequence[Sequence[int]], priority: str | None = None
    ) -> list[int]:
        """How many rows were computed from when each of the prompts, one after another, was
        queued, at whatever pace that is.

        Its own is one of them, and so are those of the batches that were under way.
        """
        found = []
        with ThreadPoolExecutor(1) as thread:
            for prompt in prompts:
                self.hold.close()
                asked = thread.submit(
                    lm.next_token_logprobs_sync, prompt, priority=priority, timeout=150
                )
                until(lambda: is_queued(lm, prompt, priority), what="it to be queued")  # noqa: B023
                before = len(self.order)
                self.hold.open()
                np.testing.assert_array_equal(asked.result(), mock_row(prompt, 256))
                found.append(self.order.index(tuple(prompt)) + 1 - before)
        return found


@contextmanager
def paced() -> Iterator[Pace]:
    """Nothing is computed until it is opened."""
    order: list[tuple[int, ...]] = []
    compute = MockEngine.compute

    def noted(engine: MockEngine, requests: Sequence[Request]) -> Iterable[Outcome]:
        order.extend(tuple(request.tokens.tolist()) for request in requests)
        return compute(engine, requests)

    with patch.object(MockEngine, "compute", noted), Hold() as hold:
        yield Pace(hold, order)


def is_queued(lm: lmpool.PooledLM, prompt: Sequence[int], priority: str | None) -> bool:
    """Whether the server knows that a row is asked for with this priority."""
    tokens = np.array(prompt, "<u4").tobytes()
    digest = Digester(lm.info.fingerprint).digest(Row("f32"), tokens)
    flight = lm._client._session.table.flights.get(digest)
    if flight is None or flight.priority != (priority or lm.options.priority):
        return False
    return flight.counted and not flight.queued


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(SettingsError, match="priority='urgent'"):
        lmpool.connect(priority="urgent")


@pytest.mark.one_shard
def test_batch_lets_interactive_go_first(server_url, redis_client, pool_name):
    with (
        in_process_worker(server_url, pool_name, **SLOW),
        connected(server_url, pool_name, cache_bytes=0) as lm,
        paced() as pace,
    ):
        with Flood(server_url, pool_name, 1, priority="batch") as flood:
            (shard,) = pool_shards(redis_client, pool_name)
            until(lambda: redis_client.xlen(shard.stream("batch").key) > 1000, what="the backlog")
            # A thousand jobs are waiting; these wait for the batches under way.
            assert max(pace.turns(lm, some_prompts(10, seed=2))) < 100
            until(lambda: flood.answered() > 0, what="the flood to go on")
        until_at_rest_of(lm, redis_client, pool_name)


def until_at_rest_of(lm: lmpool.PooledLM, client: object, pool: str) -> None:
    lm.close()
    until_at_rest(client, pool)  # type: ignore[arg-type]


def test_interactive_does_not_starve_batch(server_url, pool_name):
    with (
        in_process_worker(server_url, pool_name, **SLOW),
        connected(server_url, pool_name, cache_bytes=0, priority="batch") as lm,
        paced() as pace,
        Flood(server_url, pool_name, 3) as flood,
    ):
        # One that the flood has asked, too, would be its.
        prompts = [p for p in some_prompts(60, seed=4) if p not in flood.prompts][:40]
        asking = Asking(lm, prompts)
        until(lambda: lm.statistics()["queued"] == 40, what="all to be queued")
        pace.hold.open()
        rows = asking.rows()
        # One place in eight is theirs, not less and hardly more.
        share = 40 / (1 + max(pace.order.index(tuple(prompt)) for prompt in prompts))
        np.testing.assert_array_equal(rows, [mock_row(prompt, 256) for prompt in prompts])
        assert share > 0.06, share


def test_batch_of_one_does_not_starve_either(server_url, pool_name):
    settings = {"batch_size": 1, "engine_opts": {"delay": 0.005}}
    with (
        in_process_worker(server_url, pool_name, **settings),
        connected(server_url, pool_name, cache_bytes=0, priority="batch") as lm,
        paced() as pace,
        Flood(server_url, pool_name, 5),
    ):
        assert max(pace.turns(lm, some_prompts(5, seed=6))) < 100


def test_an_interactive_caller_takes_a_batch_job_along(server_url, redis_client, pool_name):
    """A prompt that waits among the last goes first once somebody asks it who does."""
    with (
        in_process_worker(server_url, pool_name, **SLOW),
        paced() as pace,
        Flood(server_url, pool_name, 7, count=3000, priority="batch") as flood,
        connected(server_url, pool_name, cache_bytes=0) as lm,
    ):
        last = flood.prompts[2999]
        until(lambda: flood._lm.statistics()["queued"] == 3000, what="all to be queued")
        (before,) = pace.turns(lm, [last])
        assert lm.statistics()["joined"] == 1
        assert before < 500  # it would be its turn after nearly three thousand


@pytest.mark.one_shard
def test_one_client_asks_with_both_priorities(server_url, redis_client, pool_name):
    with (
        in_process_worker(server_url, pool_name, client_backlog=256, **SLOW),
        connected(server_url, pool_name, cache_bytes=0) as lm,
        paced() as pace,
    ):
        floods = [
            threading.Thread(target=ask_in_vain, args=(lm, some_prompts(8000, seed=12 + i)))
            for i in range(2)
        ]
        for flood in floods:
            flood.start()
        (shard,) = pool_shards(redis_client, pool_name)
        until(lambda: redis_client.xlen(shard.stream("batch").key) > 128, what="the backlog")
        # Sixteen thousand of its own jobs are waiting, most of them at the client.
        assert max(pace.turns(lm, some_prompts(10, seed=14))) < 100
        # What waits at the client goes first as well, once it is asked for so.
        (before,) = pace.turns(lm, some_prompts(8000, seed=12)[-1:], "interactive")
        assert before < 1000
        lm.reset_async_queries()
        for flood in floods:
            flood.join()
        until_at_rest_of(lm, redis_client, pool_name)


def ask_in_vain(lm: lmpool.PooledLM, prompts: list[list[int]]) -> None:
    with pytest.raises(LmpoolError, match="reset"):
        lm.batch_next_token_logprobs_sync(prompts, priority="batch")


@pytest.mark.one_shard
def test_every_call_takes_a_priority(server_url, redis_client, pool_name):
    with in_process_worker(server_url, pool_name):
        pass

    async def ask(lm: lmpool.PooledLM, priority: str, first: int) -> None:
        options: dict[str, Any] = {"priority": priority, "timeout": 30}
        calls = [
            lm.next_token_logprobs([first, 1], **options),
            lm.batch_next_token_logprobs([[first, 2]], **options),
            lm.sample([first, 3], 1, [], **options),
            lm.batch_sample([[first, 4]], 1, [], **options),
            asyncio.to_thread(lm.next_token_logprobs_sync, [first, 5], **options),
            asyncio.to_thread(lm.batch_next_token_logprobs_sync, [[first, 6]], **options),
            asyncio.to_thread(lm.sample_sync, [first, 7], 1, [], **options),
            asyncio.to_thread(lm.batch_sample_sync, [[first, 8]], 1, [], **options),
        ]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, LmpoolError)
            assert "reset" in str(answer)

    (shard,) = pool_shards(redis_client, pool_name)
    for default, asked in (("interactive", "batch"), ("batch", "interactive")):
        with connected(server_url, pool_name, priority=default, workers_timeout=60) as lm:
            asking = threading.Thread(target=asyncio.run, args=(ask(lm, asked, 1),))
            asking.start()
            there, elsewhere = shard.stream(asked).key, shard.stream(default).key
            until(lambda: redis_client.xlen(there) == 8, what="all to be queued")  # noqa: B023
            assert redis_client.xlen(elsewhere) == 0
            lm.reset_async_queries()
            asking.join()
            until(lambda: not redis_client.xlen(there), what="all to be withdrawn")  # noqa: B023
            with pytest.raises(SettingsError, match="priority='urgent': write 'interactive' or"):
                lm.next_token_logprobs_sync([1], priority="urgent")


@pytest.mark.one_shard
def test_a_greedy_client_starves_nobody(server_url, redis_client, pool_name):
    """The jobs of one client that may wait have a bound: others wait behind those at most."""
    with (
        in_process_worker(server_url, pool_name, client_backlog=64, **SLOW),
        connected(server_url, pool_name, cache_bytes=0) as lm,
        paced() as pace,
        Flood(server_url, pool_name, 8) as flood,
    ):
        (shard,) = pool_shards(redis_client, pool_name)
        found = pace.turns(lm, some_prompts(5, seed=9))
        assert redis_client.xlen(shard.stream().key) <= 64 + 16
        assert max(found) < 400  # not all of the 20,000
        until(lambda: flood.answered() > 100, what="the flood to go on")


def test_greedy_clients_share_evenly(server_url, pool_name):
    with (
        in_process_worker(server_url, pool_name, client_backlog=64, **SLOW),
        Flood(server_url, pool_name, 10) as one,
        Flood(server_url, pool_name, 11, count=5000) as two,
    ):
        before = one.answered(), two.answered()

        def are_even() -> bool:
            """In the long run: one that stands still for a while falls behind."""
            assert two.answered() < 5000  # whom one could catch up with, had it ended
            found = one.answered() - before[0], two.answered() - before[1]
            return sum(found) > 800 and min(found) > 0.6 * max(found)

        until(are_even, what="even shares")
