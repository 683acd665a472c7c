"""Calls that end without a row: cancelled, too late, refused, failed, reset, closed.

Each on fakeredis and on a real server, with a client and one worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import (
    ClientClosed,
    JobExpired,
    LmpoolError,
    PoolBusy,
    PoolTimeout,
    PromptError,
    PromptFailed,
    SettingsError,
    UnknownAdapter,
)
from lmpool.keys import PoolKeys, streams
from lmpool.model_info import ModelInfo
from lmpool.producer.deadline import Deadline
from lmpool.wants import Draw
from lmpool.worker import engine_thread
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.mock_rows import VOCAB, prompts_of, rows_of
from tests.support.pools import pool_shards as shards_of
from tests.support.protocol import Caller, new_job, told
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def jobs_left(client: redis.Redis, pool: str) -> int:
    """How many jobs wait or are computed."""
    return sum(client.xlen(s.key) for s in streams(shards_of(client, pool)))


def test_a_cancelled_call_is_withdrawn_and_its_job_not_run(
    any_server: str, start_pool: Callable[..., str], hold: Hold, redis_client: redis.Redis
) -> None:
    pool = start_pool(batch_size=1)
    with connected(any_server, pool) as lm:

        async def main() -> None:
            running = asyncio.create_task(lm.next_token_logprobs([1]))
            assert await asyncio.to_thread(hold.begun.wait, 60)
            waiting = asyncio.create_task(lm.next_token_logprobs([2]))
            both = asyncio.gather(lm.next_token_logprobs([3]), lm.next_token_logprobs([3]))
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 3)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(until, lambda: jobs_left(redis_client, pool) == 2)
            hold.open()
            assert np.array_equal(await running, mock_row([1], VOCAB))
            for row in await both:
                assert np.array_equal(row, mock_row([3], VOCAB))

        asyncio.run(main())
        until(lambda: lm.pool_statistics_sync()["backlog"] == 0)
        assert lm.pool_statistics_sync()["computed"] == 2
        assert lm.statistics()["withdrawn"] == 1
        # It can be asked again.
        assert np.array_equal(lm.next_token_logprobs_sync([2]), mock_row([2], VOCAB))


def test_a_call_cancelled_in_the_turn_it_was_made_is_never_sent(lm: lmpool.PooledLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await lm.next_token_logprobs([2])

    asyncio.run(main())
    assert lm.pool_statistics_sync()["computed"] == 1
    statistics = lm.statistics()
    assert statistics["requests"] == statistics["queued"] == 1
    assert statistics["withdrawn"] == statistics["failed"] == 0


LATE = {
    "lone": "1 of 1 answers were not there after 0.5 s; they were withdrawn (pool {pool!r})",
    "awaited": "1 of 1 answers were not there after 0.5 s; they were withdrawn (pool {pool!r})",
    "batch": "3 of 3 answers were not there after 0.5 s; they were withdrawn (pool {pool!r})",
    "kept": "3 of 3 answers were not there after 0.5 s; they were withdrawn (pool {pool!r})",
    "windowed": "the answer was not there after 0.5 s; it was withdrawn (pool {pool!r})",
    "stream": "the continuation had 0 tokens and no end after 0.5 s; it was withdrawn "
    "(pool {pool!r})",
}


def late_call(lm: lmpool.PooledLM, way: str) -> None:
    """Raises what is told of a call that is over after half a second."""
    rows = [[2], [3], [4]]
    match way:
        case "lone":
            lm.sync.next_token_logprobs([2], timeout=0.5)
        case "awaited":
            asyncio.run(lm.next_token_logprobs([2], timeout=0.5))
        case "batch":
            lm.sync.batch_next_token_logprobs(rows, timeout=0.5)
        case "kept":
            asks = [lmpool.Ask(prompt, Draw(seed=1)) for prompt in rows]
            errors = lm.sync.ask_many(asks, timeout=0.5, errors="return")
            assert [str(error) for error in errors] == [str(errors[0])] * 3
            raise errors[0]
        case "windowed":
            list(lm.sync.ask_iter([lmpool.Ask([2], Draw(seed=1))], timeout=0.5))
        case "stream":
            list(lm.sync.stream([2], 50, seed=1, eos_token_ids=[], timeout=0.5))


@pytest.mark.parametrize("first", ["caller", "worker"])
@pytest.mark.parametrize("way", LATE)
def test_who_is_late_is_told_the_same_whoever_saw_it_first(
    way: str,
    first: str,
    any_server: str,
    start_pool: Callable[..., str],
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = start_pool(batch_size=1)
    with connected(any_server, pool) as lm, ThreadPoolExecutor(2) as threads:
        running = threads.submit(lm.sync.next_token_logprobs, [1])
        assert hold.begun.wait(60)
        if first == "worker":  # as if the caller's thread did not get to run
            left = Deadline.left
            monkeypatch.setattr(Deadline, "left", lambda deadline: (left(deadline) or 0.0) + 60)
        late = threads.submit(late_call, lm, way)
        if first == "worker":
            # Of each job the server is asked, whose clock it is: the worker's may be behind.
            monkeypatch.setattr(engine_thread, "LONG_WAIT", -1.0)
            until(lambda: lm.statistics()["queued"] >= 2)
            time.sleep(0.6)
            hold.open()
        error = late.exception(60)
        hold.open()
        assert str(error) == LATE[way].format(pool=pool)
        assert type(error) is (PoolTimeout if first == "caller" else JobExpired)
        assert np.array_equal(running.result(60), mock_row([1], VOCAB))
        until(lambda: lm.pool_statistics_sync()["backlog"] == 0)


def test_a_wait_ends_at_its_timeout_and_is_withdrawn(
    any_server: str, start_pool: Callable[..., str], hold: Hold, redis_client: redis.Redis
) -> None:
    pool = start_pool(batch_size=1)
    with connected(any_server, pool) as lm, ThreadPoolExecutor(1) as threads:
        running = threads.submit(lm.next_token_logprobs_sync, [1])
        assert hold.begun.wait(60)  # or one of the others might be run in its place
        with pytest.raises(PoolTimeout, match=r"2 of 2 answers were not there after 0\.1 s"):
            lm.batch_next_token_logprobs_sync([[2], [3]], timeout=0.1)

        async def main() -> None:
            with pytest.raises(PoolTimeout):
                await lm.next_token_logprobs([4], timeout=0.05)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(lm.next_token_logprobs([5]), 0.05)

        asyncio.run(main())
        until(lambda: jobs_left(redis_client, pool) == 1)
        statistics = lm.statistics()
        assert statistics["withdrawn"] + statistics["expired"] == 4
        hold.open()
        assert np.array_equal(running.result(), mock_row([1], VOCAB))
        until(lambda: lm.pool_statistics_sync()["backlog"] == 0)
        assert lm.pool_statistics_sync()["computed"] == 1


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), True, "5", [5]], ids=repr)
def test_a_timeout_that_is_none_is_refused(timeout: Any, lm: lmpool.PooledLM) -> None:
    with pytest.raises(SettingsError, match=r"timeout=.*: write a positive number of seconds"):
        lm.next_token_logprobs_sync([1], timeout=timeout)
    with pytest.raises(SettingsError):
        asyncio.run(lm.next_token_logprobs([1], timeout=timeout))


@pytest.mark.parametrize("timeout", [float("inf"), 1e18, 10**30, np.float32(9), 9], ids=repr)
def test_a_timeout_may_be_as_long_as_one_likes(timeout: Any, lm: lmpool.PooledLM) -> None:
    assert len(lm.next_token_logprobs_sync([1], timeout=timeout)) == VOCAB
    assert len(asyncio.run(lm.next_token_logprobs([2], timeout=timeout))) == VOCAB


def test_a_timeout_of_the_client_holds_for_calls_that_name_none(
    any_server: str, start_pool: Callable[..., str], hold: Hold
) -> None:
    pool = start_pool()
    hold.open()
    lm = lmpool.connect(
        any_server, pool, framework="numpy", request_timeout=0.05, workers_timeout=60.0
    )
    with closing(lm):
        # It connects in a call that may take longer.
        assert np.array_equal(lm.next_token_logprobs_sync([2], timeout=60), mock_row([2], VOCAB))
        hold.close()
        with pytest.raises(PoolTimeout):
            lm.next_token_logprobs_sync([1])
        hold.open()
        assert np.array_equal(lm.next_token_logprobs_sync([1], timeout=60), mock_row([1], VOCAB))


@pytest.mark.one_shard
def test_a_job_that_comes_too_late_is_not_run(
    any_server: str, pool: str, redis_client: redis.Redis
) -> None:
    (shard,) = shards_of(redis_client, pool)
    packed: Any = redis_client.get(PoolKeys(pool).info)
    job = new_job(1, 2, fingerprint=ModelInfo.unpack(packed).fingerprint, deadline=1)
    caller = Caller(redis_client, shard)
    caller.enqueue(job)
    assert until(lambda: told(caller)) == [(job.digest.hex(), "expired", "")]
    caller.vanish()
    with connected(any_server, pool) as lm:
        until(lambda: lm.pool_statistics_sync()["expired"] == 1)
        assert lm.pool_statistics_sync()["computed"] == 0


def test_at_the_backlogs_bound_callers_wait(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.01, batch_size=1, max_backlog=2)
    prompts = prompts_of(12)
    with connected(any_server, pool) as lm:
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))
        assert lm.statistics()["queued"] == 12


@pytest.mark.one_shard
def test_at_the_backlogs_bound_callers_can_have_an_error_instead(
    any_server: str, start_pool: Callable[..., str]
) -> None:
    pool = start_pool(delay=0.2, batch_size=1, max_backlog=2)
    with connected(any_server, pool, when_busy="raise") as lm:

        async def main() -> list[Any]:
            return await asyncio.gather(
                *(lm.next_token_logprobs([i]) for i in range(5)), return_exceptions=True
            )

        found = asyncio.run(main())
        refused = [error for error in found if isinstance(error, PoolBusy)]
        assert len(refused) == 3
        assert "2 jobs waiting, its bound" in str(refused[0])
        for i, row in enumerate(found):
            if not isinstance(row, PoolBusy):
                assert np.array_equal(row, mock_row([i], VOCAB))
        statistics = lm.statistics()
        assert (statistics["requests"], statistics["queued"], statistics["failed"]) == (5, 2, 3)


def test_one_bad_prompt_fails_alone(any_server: str, start_pool: Callable[..., str]) -> None:
    pool = start_pool(engine_opts={"fail_token": 13})
    with connected(any_server, pool) as lm:

        async def main() -> list[Any]:
            return await asyncio.gather(
                *(lm.next_token_logprobs([i, 1]) for i in range(20)), return_exceptions=True
            )

        for i, found in enumerate(asyncio.run(main())):
            if i == 13:
                assert isinstance(found, PromptFailed)
                assert "a prompt contains the token 13" in str(found)
            else:
                assert np.array_equal(found, mock_row([i, 1], VOCAB))
        assert lm.pool_statistics_sync()["failed"] == 1
        assert lm.statistics()["failed"] == 1
        # A failure is nobody's row: it is tried again.
        with pytest.raises(PromptFailed):
            lm.next_token_logprobs_sync([13, 1])
        with pytest.raises(PromptFailed):
            lm.batch_next_token_logprobs_sync([[1, 1], [13, 1], [2, 1]])


def test_nothing_is_sent_where_one_prompt_of_a_batch_is_bad(lm: lmpool.PooledLM) -> None:
    for bad in ([], [VOCAB], [-1], [1.5], "text"):
        with pytest.raises(PromptError):
            lm.batch_next_token_logprobs_sync([[1], bad])  # type: ignore[list-item]
        with pytest.raises(ValueError, match=r"prompt|token"):
            asyncio.run(lm.next_token_logprobs(bad))  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="at most 4096"):
        lm.next_token_logprobs_sync([1] * 4097)
    assert lm.statistics()["requests"] == 0


def test_an_unknown_adapter_is_told_at_once(lm: lmpool.PooledLM) -> None:
    with pytest.raises(UnknownAdapter, match=r"'none'.*known: none"):
        lm.next_token_logprobs_sync([1], lora_name="none")
    with pytest.raises(ValueError, match="add_new_lora"):
        asyncio.run(lm.batch_next_token_logprobs([[1]], lora_name="none"))
    assert lm.statistics()["requests"] == 0


def test_closing_ends_every_wait(
    any_server: str, start_pool: Callable[..., str], hold: Hold
) -> None:
    pool = start_pool(batch_size=1)
    lm = lmpool.connect(any_server, pool, framework="numpy")
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(lm.next_token_logprobs_sync, [i]) for i in range(3)]
        until(lambda: lm.statistics()["queued"] == 3)
        lm.close()
        for wait in waits:
            with pytest.raises(ClientClosed):
                wait.result(60)
    for _ in range(2):
        with pytest.raises(ClientClosed):
            lm.next_token_logprobs_sync([1])
        with pytest.raises(ClientClosed):
            asyncio.run(lm.next_token_logprobs([1]))
        lm.close()


def test_resetting_withdraws_what_is_waited_for(
    any_server: str, start_pool: Callable[..., str], hold: Hold, redis_client: redis.Redis
) -> None:
    pool = start_pool(batch_size=1)
    with connected(any_server, pool) as lm:

        async def main() -> list[Any]:
            running = asyncio.create_task(lm.next_token_logprobs([0]))
            assert await asyncio.to_thread(hold.begun.wait, 60)
            waiting = [asyncio.create_task(lm.next_token_logprobs([i])) for i in (1, 2, 3)]
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 4)
            lm.reset_async_queries()
            return await asyncio.gather(running, *waiting, return_exceptions=True)

        for error in asyncio.run(main()):
            assert isinstance(error, LmpoolError)
            assert "reset_async_queries" in str(error)
        until(lambda: jobs_left(redis_client, pool) == 0)
        hold.open()
        lm.reset_async_queries()
        assert np.array_equal(lm.next_token_logprobs_sync([2]), mock_row([2], VOCAB))
        assert lm.pool_statistics_sync()["computed"] <= 2  # what was running, and this one
