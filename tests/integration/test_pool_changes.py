"""A client of a pool that comes, goes, changes or forgets, on fakeredis and on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import msgpack
import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import (
    ClientClosed,
    NoWorkers,
    PoolMismatch,
    UnknownPool,
    WireError,
)
from lmpool.keys import PROTOCOL, PoolKeys
from lmpool.producer import sender as sender_module
from lmpool.producer import session as session_module
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.mock_rows import VOCAB, prompts_of, rows_of
from tests.support.pools import pending
from tests.support.pools import pool_shards as shards_of
from tests.support.waiting import until
from tests.support.workers import in_process_worker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_pool_that_was_never_served_is_unknown(any_server: str, pool_name: str) -> None:
    lm = lmpool.connect(any_server, pool_name, workers_timeout=0.3)
    try:
        with pytest.raises(UnknownPool, match=f"no pool '{pool_name}' on .*--pool "):
            lm.next_token_logprobs_sync([1])
        with pytest.raises(UnknownPool):
            asyncio.run(lm.next_token_logprobs([1]))
        # It is found as soon as it is there.
        with in_process_worker(any_server, pool_name):
            assert len(lm.next_token_logprobs_sync([1])) == VOCAB
    finally:
        lm.close()


def test_a_pool_without_workers_is_told_after_a_while(
    any_server: str, pool_name: str, redis_client: redis.Redis
) -> None:
    with in_process_worker(any_server, pool_name):
        pass
    with connected(any_server, pool_name, workers_timeout=0.4) as lm:
        began = time.monotonic()
        with pytest.raises(NoWorkers, match=r"has had no worker alive for 0\.4 s"):
            lm.next_token_logprobs_sync([1])
        assert time.monotonic() - began > 0.2
        with in_process_worker(any_server, pool_name):

            def is_served() -> bool:
                with suppress(NoWorkers):  # a sign of life may come late
                    return np.array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], VOCAB))
                return False

            until(is_served)


@pytest.mark.usefixtures("looks_soon")
@pytest.mark.parametrize(
    "other",
    [{"shards": 1, "max_prompt_tokens": 9}, {"shards": 3, "engine_opts": {"vocab_size": 100}}],
    ids=["shorter prompts", "another model"],
)
def test_a_client_of_what_the_pool_served_before_is_told(
    other: dict[str, Any], any_server: str, pool_name: str
) -> None:
    with in_process_worker(any_server, pool_name, shards=3):
        pass
    with (
        connected(any_server, pool_name) as lm,
        in_process_worker(any_server, pool_name, **other),
    ):
        with pytest.raises(PoolMismatch, match="connect again"):
            lm.batch_next_token_logprobs_sync(prompts_of(20), timeout=60)
        with connected(any_server, pool_name) as again:
            assert again.info.shards == other["shards"]
            assert len(again.next_token_logprobs_sync([1])) == again.info.vocab_size


@pytest.mark.usefixtures("looks_soon")
@pytest.mark.parametrize("when_replaced", ["raise", "follow"])
def test_a_client_of_what_a_later_release_serves_is_told(
    when_replaced: str, any_server: str, pool_name: str, redis_client: redis.Redis
) -> None:
    with in_process_worker(any_server, pool_name):
        pass
    with connected(any_server, pool_name, when_replaced=when_replaced) as lm:
        redis_client.set(PoolKeys(pool_name).info, b"\x81\xa1v\x63")
        with pytest.raises(PoolMismatch, match="connect again"):
            lm.next_token_logprobs_sync([1], timeout=60)
        redis_client.delete(PoolKeys(pool_name).info)


@pytest.mark.parametrize(
    ("protocols", "whose"),
    [((PROTOCOL + 1,), "upgrade this lmpool"), ((1,), "upgrade the lmpool of the pool's workers")],
)
def test_who_speaks_another_protocol_is_told_what_to_upgrade(
    protocols: tuple[int, ...],
    whose: str,
    any_server: str,
    pool_name: str,
    redis_client: redis.Redis,
) -> None:
    with in_process_worker(any_server, pool_name):
        key = PoolKeys(pool_name).info
        packed: Any = redis_client.get(key)
        other = {**msgpack.unpackb(packed), "protocols": protocols}
        redis_client.set(key, msgpack.packb(other))
        lm = lmpool.connect(any_server, pool_name)
        with closing(lm), pytest.raises(WireError, match=whose):
            lm.next_token_logprobs_sync([1], timeout=60)
        redis_client.set(key, packed)


@pytest.mark.parametrize("asks", ["blocking", "async"])
def test_the_first_worker_of_a_pool_is_waited_for(
    asks: str, any_server: str, pool_name: str
) -> None:
    options: dict[str, Any] = {"framework": "numpy", "workers_timeout": 60.0}
    with closing(lmpool.connect(any_server, pool_name, **options)) as lm:

        async def ask() -> Any:
            return await lm.next_token_logprobs([7])

        with ThreadPoolExecutor(1) as threads:
            blocking = asks == "blocking"
            row = threads.submit(
                lambda: lm.next_token_logprobs_sync([7]) if blocking else asyncio.run(ask())
            )
            until(lambda: lm._client._threads, what="the client to look for the pool")
            time.sleep(0.3)
            assert not row.done()
            with in_process_worker(any_server, pool_name):
                assert np.array_equal(row.result(60), mock_row([7], VOCAB))


@pytest.mark.parametrize("when_replaced", ["raise", "follow"])
def test_answers_of_the_clients_cache_are_of_the_model_that_is_served(
    when_replaced: Any, any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "CONFIRMED_FOR", 0.2)
    monkeypatch.setattr(sender_module, "CONFIRMED_FOR", 0.2)
    with in_process_worker(any_server, pool_name):
        lm = lmpool.connect(any_server, pool_name, framework="numpy", when_replaced=when_replaced)
        prompts = [[7], [8], [9]]
        lm.batch_next_token_logprobs_sync(prompts)
        time.sleep(0.3)
        # As long as the same model is served they are answers, of prompts asked in any way.
        assert np.array_equal(lm.next_token_logprobs_sync([7]), mock_row([7], VOCAB))
        time.sleep(0.3)
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))
        assert lm.statistics()["local_hits"] == 4
        assert lm.statistics()["queued"] == 3
    with closing(lm), in_process_worker(any_server, pool_name, engine_opts={"vocab_size": 100}):
        time.sleep(0.3)
        if when_replaced == "raise":
            for _ in range(2):
                with pytest.raises(PoolMismatch, match="connect again"):
                    lm.next_token_logprobs_sync([7])
                with pytest.raises(PoolMismatch, match="connect again"):
                    lm.batch_next_token_logprobs_sync(prompts)
        else:
            assert np.array_equal(lm.next_token_logprobs_sync([7]), mock_row([7], 100))
            rows = lm.batch_next_token_logprobs_sync(prompts)
            assert np.array_equal(rows, [mock_row(prompt, 100) for prompt in prompts])


def test_who_asks_as_the_pool_is_found_replaced_gets_no_answer_of_the_model_before(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others were told just now, and the client has yet to send what it has."""
    monkeypatch.setattr(session_module, "CONFIRMED_FOR", 0.2)
    monkeypatch.setattr(sender_module, "CONFIRMED_FOR", 0.2)
    look_at, asked = sender_module.look_at, list[Any]()

    def look_and_ask(session: Any, *arguments: Any) -> bool:
        found = look_at(session, *arguments)
        if found and not asked:
            asked.append(threads.submit(lm.next_token_logprobs_sync, [7]))
            until(session.table.has_unsent, what="the second to be asked")
        return found

    with in_process_worker(any_server, pool_name):
        lm = lmpool.connect(any_server, pool_name, framework="numpy")
        lm.next_token_logprobs_sync([7])
    other = in_process_worker(any_server, pool_name, engine_opts={"vocab_size": 100})
    with closing(lm), other, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(sender_module, "look_at", look_and_ask)
        time.sleep(0.3)
        with pytest.raises(PoolMismatch, match="connect again"):
            lm.batch_next_token_logprobs_sync([[7]])
        with pytest.raises(PoolMismatch, match="connect again"):
            until(lambda: asked)[0].result(60)


def test_once_it_was_told_of_a_replacement_a_client_gives_out_nothing_that_it_kept(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short before the model was still served."""
    monkeypatch.setattr(sender_module, "CONFIRMED_FOR", 0.2)
    with in_process_worker(any_server, pool_name):
        lm = lmpool.connect(any_server, pool_name, framework="numpy")
        lm.batch_next_token_logprobs_sync([[7], [8]])
    other = in_process_worker(any_server, pool_name, engine_opts={"vocab_size": 100})
    with closing(lm), other:
        monkeypatch.setattr(session_module, "CONFIRMED_FOR", 1e9)
        time.sleep(0.3)
        for prompt in ([9], [7]):  # the second is kept
            with pytest.raises(PoolMismatch, match="connect again"):
                lm.next_token_logprobs_sync(prompt)
        with pytest.raises(PoolMismatch, match="connect again"):
            lm.batch_next_token_logprobs_sync([[7], [8]])


def test_a_closed_client_answers_nothing(any_server: str, pool: str) -> None:
    with connected(any_server, pool) as lm:
        lm.next_token_logprobs_sync([7])
        lm.batch_next_token_logprobs_sync([[7]])
    for ask in (
        lambda: lm.next_token_logprobs_sync([7]),
        lambda: lm.batch_next_token_logprobs_sync([[7]]),
        lambda: asyncio.run(lm.next_token_logprobs([7])),
    ):
        with pytest.raises(ClientClosed):
            ask()


def test_a_worker_that_comes_in_time_is_waited_for(any_server: str, pool_name: str) -> None:
    with in_process_worker(any_server, pool_name):
        pass
    with connected(any_server, pool_name) as lm, ThreadPoolExecutor(1) as threads:
        row = threads.submit(lm.next_token_logprobs_sync, [7])
        until(lambda: lm.statistics()["queued"] == 1)
        with in_process_worker(any_server, pool_name):
            assert np.array_equal(row.result(60), mock_row([7], VOCAB))


def test_a_forgotten_script_is_nobodys_concern(
    lm: lmpool.PooledLM, redis_client: redis.Redis
) -> None:
    for seed in range(4):
        redis_client.script_flush()
        prompts = prompts_of(30, seed=seed)
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))


@pytest.mark.one_shard
@pytest.mark.usefixtures("looks_soon")
def test_what_the_server_forgot_is_sent_again(
    any_server: str, start_pool: Callable[..., str], hold: Hold, redis_client: redis.Redis
) -> None:
    pool = start_pool(batch_size=2)
    prompts = prompts_of(6)
    with connected(any_server, pool) as lm, ThreadPoolExecutor(1) as threads:
        rows = threads.submit(lm.batch_next_token_logprobs_sync, prompts)
        until(lambda: lm.statistics()["queued"] == 6)
        (shard,) = shards_of(redis_client, pool)
        lost = [shard.stream().key, *redis_client.scan_iter(f"{shard.prefix}:flight:*", count=1000)]
        lost += redis_client.scan_iter(f"{shard.prefix}:reply:*", count=1000)
        redis_client.delete(*lost)
        hold.open()
        assert np.array_equal(rows.result(60), rows_of(prompts))
        assert lm.statistics()["resubmitted"] > 0
        statistics = lm.statistics()
        assert statistics["queued"] == statistics["requests"] == 6


@pytest.mark.one_shard
@pytest.mark.usefixtures("looks_soon")
def test_a_client_that_was_taken_for_dead_still_gets_its_rows(
    any_server: str, start_pool: Callable[..., str], hold: Hold, redis_client: redis.Redis
) -> None:
    pool = start_pool(batch_size=1)
    with connected(any_server, pool) as lm, ThreadPoolExecutor(1) as threads:
        rows = threads.submit(lm.batch_next_token_logprobs_sync, [[1], [2], [3]])
        until(lambda: lm.statistics()["queued"] == 3)
        (shard,) = shards_of(redis_client, pool)
        for reply in redis_client.scan_iter(f"{shard.prefix}:reply:*", count=1000):
            redis_client.delete(reply)
        hold.open()
        assert np.array_equal(rows.result(60), rows_of([[1], [2], [3]]))


@pytest.mark.one_shard
def test_a_row_that_vanished_before_it_was_read_is_computed_again(
    lm: lmpool.PooledLM, redis_client: redis.Redis, pool: str
) -> None:
    lm.next_token_logprobs_sync([1])
    lm.clear_cache()
    (shard,) = shards_of(redis_client, pool)
    (result,) = redis_client.scan_iter(f"{shard.prefix}:result:*", count=1000)
    redis_client.delete(result)
    assert np.array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], VOCAB))
    # Nor is a damaged one given out.
    lm.clear_cache()
    redis_client.set(result, b"\x95\x01\xa3f32 damaged")
    assert np.array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], VOCAB))


def test_a_worker_that_left_is_forgotten(
    any_server: str, pool_name: str, redis_client: redis.Redis
) -> None:
    with in_process_worker(any_server, pool_name, shards=2) as worker:
        shards = shards_of(redis_client, pool_name)
        for shard in shards:
            assert redis_client.exists(shard.alive(worker.id))
            assert pending(redis_client, shard) == {worker.id: 0}
    for shard in shards:
        assert not redis_client.exists(shard.alive(worker.id))
        assert pending(redis_client, shard) == {}
