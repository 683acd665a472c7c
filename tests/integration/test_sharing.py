"""Who goes first: interactive before batch, neither starved, and no client before all others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import LmpoolError, SettingsError
from tests.support.clients import connected
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
        self._lm.close()

    def _run(self) -> None:
        with pytest.raises(LmpoolError, match="reset"):
            self._lm.batch_next_token_logprobs_sync(self.prompts)

    def answered(self) -> int:
        """Prompts that were answered so far."""
        table = self._lm._client._session.table
        return len(self.prompts) - len(table.flights)


def turns(
    lm: lmpool.PooledLM, prompts: Sequence[Sequence[int]], priority: str | None = None
) -> list[int]:
    """How many rows the pool computed while each of the prompts, one after another, was waited for.

    Its own is one of them, and so are those of the batches that were under way.
    """
    found = []
    for prompt in prompts:
        before = lm.pool_statistics_sync()["computed"]
        row = lm.next_token_logprobs_sync(prompt, priority=priority, timeout=60)
        found.append(lm.pool_statistics_sync()["computed"] - before)
        np.testing.assert_array_equal(row, mock_row(prompt, 256))
    return found


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(SettingsError, match="priority='urgent'"):
        lmpool.connect(priority="urgent")


@pytest.mark.one_shard
def test_batch_lets_interactive_go_first(server_url, redis_client, pool_name):
    with (
        in_process_worker(server_url, pool_name, **SLOW),
        connected(server_url, pool_name, cache_bytes=0) as lm,
    ):
        with Flood(server_url, pool_name, 1, priority="batch") as flood:
            (shard,) = pool_shards(redis_client, pool_name)
            until(lambda: redis_client.xlen(shard.stream("batch").key) > 1000, what="the backlog")
            # A thousand jobs are waiting; these wait for the batches under way.
            assert median(turns(lm, some_prompts(10, seed=2))) < 100
            assert flood.answered() > 0
        until_at_rest_of(lm, redis_client, pool_name)


def until_at_rest_of(lm: lmpool.PooledLM, client: object, pool: str) -> None:
    lm.close()
    until_at_rest(client, pool)  # type: ignore[arg-type]


def test_interactive_does_not_starve_batch(server_url, pool_name):
    with (
        in_process_worker(server_url, pool_name, **SLOW),
        connected(server_url, pool_name, cache_bytes=0, priority="batch") as lm,
        Flood(server_url, pool_name, 3) as flood,
    ):
        # One that the flood has asked, too, would be its.
        prompts = [p for p in some_prompts(60, seed=4) if p not in flood.prompts][:40]
        asking = Asking(lm, prompts)
        until(lambda: lm.statistics()["queued"] == 40, what="all to be queued", every=0.001)
        before = flood.answered()
        rows = asking.rows()
        # One place in eight is theirs, not less and hardly more.
        share = 40 / (40 + flood.answered() - before)
        np.testing.assert_array_equal(rows, [mock_row(prompt, 256) for prompt in prompts])
        assert share > 0.06, share


def test_batch_of_one_does_not_starve_either(server_url, pool_name):
    settings = {"batch_size": 1, "engine_opts": {"delay": 0.005}}
    with (
        in_process_worker(server_url, pool_name, **settings),
        connected(server_url, pool_name, cache_bytes=0, priority="batch") as lm,
        Flood(server_url, pool_name, 5),
    ):
        *found, _ = sorted(turns(lm, some_prompts(5, seed=6)))  # one of them may meet a pause
        assert max(found) < 100


def test_an_interactive_caller_takes_a_batch_job_along(server_url, redis_client, pool_name):
    """A prompt that waits among the last goes first once somebody asks it who does."""
    with (
        in_process_worker(server_url, pool_name, **SLOW),
        Flood(server_url, pool_name, 7, count=3000, priority="batch") as flood,
        connected(server_url, pool_name, cache_bytes=0) as lm,
    ):
        last = flood.prompts[2999]
        until(lambda: flood._lm.statistics()["queued"] == 3000, what="all to be queued")
        (before,) = turns(lm, [last])
        assert lm.statistics()["joined"] == 1
        assert before < 500  # it would be its turn after nearly three thousand


@pytest.mark.one_shard
def test_one_client_asks_with_both_priorities(server_url, redis_client, pool_name):
    with (
        in_process_worker(server_url, pool_name, client_backlog=256, **SLOW),
        connected(server_url, pool_name, cache_bytes=0) as lm,
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
        assert median(turns(lm, some_prompts(10, seed=14))) < 100
        # What waits at the client goes first as well, once it is asked for so.
        (before,) = turns(lm, some_prompts(8000, seed=12)[-1:], "interactive")
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
            with pytest.raises(SettingsError, match="priority='urgent': write 'interactive' or"):
                lm.next_token_logprobs_sync([1], priority="urgent")


@pytest.mark.one_shard
def test_a_greedy_client_starves_nobody(server_url, redis_client, pool_name):
    """The jobs of one client that may wait have a bound: others wait behind those at most."""
    with (
        in_process_worker(server_url, pool_name, client_backlog=64, **SLOW),
        connected(server_url, pool_name, cache_bytes=0) as lm,
        Flood(server_url, pool_name, 8) as flood,
    ):
        (shard,) = pool_shards(redis_client, pool_name)
        found = turns(lm, some_prompts(5, seed=9))
        assert redis_client.xlen(shard.stream().key) <= 64 + 16
        assert median(found) < 400  # not all of the 20,000
        until(lambda: flood.answered() > 100, what="the flood to go on")


def test_greedy_clients_share_evenly(server_url, pool_name):
    with in_process_worker(server_url, pool_name, client_backlog=64, **SLOW):
        with (
            Flood(server_url, pool_name, 10) as one,
            Flood(server_url, pool_name, 11, count=5000) as two,
        ):
            before = one.answered(), two.answered()

            def shares() -> tuple[int, int]:
                return one.answered() - before[0], two.answered() - before[1]

            found = until(lambda: now if sum(now := shares()) > 800 else None)
        assert min(found) > 0.6 * max(found), found
