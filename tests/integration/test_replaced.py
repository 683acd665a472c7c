"""A pool that comes to serve another model: its clients are told, or follow if they want to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmpool import PooledLM
from lmpool.backends.mock import mock_row
from lmpool.errors import PoolMismatch, PromptError, UnknownAdapter
from lmpool.producer.jobs import JobMaker
from lmpool.producer.pending import PendingCall
from lmpool.wants import Row, Tokens
from tests.integration.test_adapters import client_of, registered, write_adapter
from tests.support.clients import connected
from tests.support.pools import Asking as AskingThread
from tests.support.pools import pool_shards, until_at_rest
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

NEW: dict[str, Any] = {
    "model": "new", "shards": 2, "max_prompt_tokens": 8, "engine_opts": {"vocab_size": 300},
}  # fmt: skip


@contextmanager
def connected_after_a_worker(url: str, pool: str) -> Iterator[tuple[PooledLM, Any]]:
    """A client, who follows, of a pool whose worker has left, and a row that it brought."""
    with ExitStack() as stack:
        with in_process_worker(url, pool, shards=3):
            client = connected(url, pool, when_replaced="follow", workers_timeout=60)
            lm = stack.enter_context(client)
            row = lm.next_token_logprobs_sync([7], timeout=60)
        yield lm, row


def rows_of(prompts: list[list[int]], vocab: int) -> np.ndarray:
    return np.stack([mock_row(prompt, vocab) for prompt in prompts])


def test_a_client_follows_with_what_it_waits_for(any_server, redis_client, pool_name):
    prompts = [[i, 1, 2] for i in range(40)]
    with connected_after_a_worker(any_server, pool_name) as (lm, known):
        old = pool_shards(redis_client, pool_name)
        np.testing.assert_array_equal(known, mock_row([7], 256))
        assert len(lm.byte_vocab) == lm.info.vocab_size == 256
        asking = AskingThread(lm, prompts)
        too_long = AskingThread(lm, [[3] * 9])
        until(lambda: lm.statistics()["queued"] == 42, what="all to be queued")
        with in_process_worker(any_server, pool_name, **NEW):
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts, 300))
            with pytest.raises(PromptError, match="9 tokens"):
                too_long.rows()
            # Nothing of the old model is left: not in the local cache, nor on the server.
            np.testing.assert_array_equal(lm.next_token_logprobs_sync([7]), mock_row([7], 300))
            assert lm.info.model == "new"
            assert len(lm.byte_vocab) == lm.info.vocab_size == 300
            for shard in old:
                assert redis_client.xlen(shard.stream().key) == 0
                assert not list(redis_client.scan_iter(f"{shard.prefix}:flight:*"))
            assert len(lm._client.cache) == 41
            assert lm.statistics()["failed"] == 0
            lm.close()
            until_at_rest(redis_client, pool_name)


def test_an_idle_client_follows_when_it_looks(any_server, pool_name):
    with (
        connected_after_a_worker(any_server, pool_name) as (lm, _),
        in_process_worker(any_server, pool_name, **NEW),
    ):
        lm.wait_for_workers_sync(10)
        assert lm.info.model == "new"

        async def rows() -> Any:
            one = lm.next_token_logprobs([299, 1])
            return await asyncio.gather(one, lm.batch_next_token_logprobs([[298], [297]]))

        one, two = asyncio.run(rows())
        np.testing.assert_array_equal(one, mock_row([299, 1], 300))
        np.testing.assert_array_equal(two, rows_of([[298], [297]], 300))


def test_what_the_caller_changes_meanwhile_is_not_asked(any_server, pool_name):
    """All that a call was made of is kept: the lists are the caller's, to fill anew at once."""
    with connected_after_a_worker(any_server, pool_name) as (lm, _):
        prompt, text, positions = [5, 1], [9, 8, 7], [3, 1]

        async def ask() -> Any:
            calls = [
                asyncio.ensure_future(call)
                for call in (
                    lm.next_token_logprobs(prompt, timeout=60),
                    lm.batch_next_token_logprobs([prompt, text], timeout=60),
                    lm.ask_many([(prompt, Tokens([1])), ([300], Row()), (text, Row())],
                                errors="return", timeout=60),
                    lm.batch_sample([prompt], 1, [], 0.0, timeout=60),
                    lm.logprobs_at(text, positions, timeout=60),
                )
            ]  # fmt: skip
            stream = lm.stream(prompt, 1, temperature=0.0, eos_token_ids=[], timeout=60)
            calls.append(asyncio.ensure_future(anext(stream)))
            waiting = lambda: lm.statistics()["queued"] >= 6  # noqa: E731
            await asyncio.to_thread(until, waiting, what="all to be queued")
            prompt[:], text[:], positions[:] = [2], [2], [1]
            with in_process_worker(any_server, pool_name, **NEW):
                return await asyncio.gather(*calls)

        one, two, many, (ids,), at, piece = asyncio.run(ask())
        first, second = rows_of([[5, 1], [9, 8, 7]], 300)
        np.testing.assert_array_equal(one, first)
        np.testing.assert_array_equal(two, [first, second])
        np.testing.assert_array_equal(many[0], first[[1]])
        assert isinstance(many[1], PromptError)
        np.testing.assert_array_equal(many[2], second)
        assert ids == piece.token_ids.tolist() == [first.argmax()]
        np.testing.assert_array_equal(at, rows_of([[9, 8, 7], [9]], 300))


def test_callers_in_an_event_loop_follow_too(any_server, pool_name):
    with connected_after_a_worker(any_server, pool_name) as (lm, _):

        async def rows() -> Any:
            one = asyncio.ensure_future(lm.next_token_logprobs([5, 1], timeout=60))
            two = asyncio.ensure_future(lm.batch_sample([[4]], 2, [], 0.0, timeout=60))
            queued = lambda: lm.statistics()["queued"] == 3  # noqa: E731
            await asyncio.to_thread(until, queued, what="all to be queued")
            with in_process_worker(any_server, pool_name, **NEW):
                return await asyncio.gather(one, two)

        one, (ids,) = asyncio.run(rows())
        np.testing.assert_array_equal(one, mock_row([5, 1], 300))
        assert ids[0] == mock_row([4], 300).argmax()


def test_prompts_made_for_the_old_model_are_never_sent_to_the_new(any_server, pool_name):
    with in_process_worker(any_server, pool_name), connected(any_server, pool_name) as lm:
        other = replace(lm.info, model="old", fingerprint="0" * 32)
        jobs = [JobMaker(other).one([5, 6], Row("f32"), None)]
        call = PendingCall(jobs, None, info=other).for_thread()
        lm._client.submit([call])
        assert call.wait(60)
        assert isinstance(call.error, PoolMismatch)
        assert lm.statistics()["queued"] == 0


def test_a_follower_keeps_its_adapters_right(server_url, redis_client, pool_name, tmp_path):
    folder = write_adapter(tmp_path / "one")
    options = {"adapter_dirs": [str(tmp_path)]}
    with closing(client_of(server_url, pool_name, when_replaced="follow")) as lm:
        with worker_process(server_url, pool_name, **options):
            lm.add_new_lora(folder, "one")
            (print_of_one,) = registered(redis_client, pool_name).values()
            row = lm.next_token_logprobs_sync([1, 2], lora_name="one")
            np.testing.assert_array_equal(row, mock_row([1, 2], 256, f"one@{print_of_one}"))
        with worker_process(server_url, pool_name, **{**options, **NEW, "shards": 1}):
            # The new pool has none of that name: no row of the base model, nor of the old one.
            with pytest.raises(UnknownAdapter, match=r"'one'.*known: none"):
                lm.next_token_logprobs_sync([3, 2], lora_name="one")
            lm.add_new_lora(folder, "one")
            (print_of_one,) = registered(redis_client, pool_name).values()
            row = lm.next_token_logprobs_sync([1, 2], lora_name="one")
            np.testing.assert_array_equal(row, mock_row([1, 2], 300, f"one@{print_of_one}"))


@pytest.mark.parametrize("shards", [1, 6], ids=["fewer", "more"])
def test_other_numbers_of_shards_are_moved_to_under_load(
    shards: int, server_url: str, pool_name: str
) -> None:
    """Workers are started again one by one with another setting: nobody who asks is told."""
    vocab, ended, failures = 256, threading.Event(), []
    asked = 0

    def ask(number: int) -> None:
        nonlocal asked
        rng = np.random.default_rng(number)
        with connected(server_url, pool_name, cache_bytes=0) as lm:
            while not ended.is_set():
                prompts = rng.integers(0, vocab, (20, 8)).tolist()
                try:
                    rows = lm.batch_next_token_logprobs_sync(prompts, timeout=60)
                    for prompt, row in zip(prompts, rows, strict=True):
                        np.testing.assert_allclose(row, mock_row(prompt, vocab), atol=1e-5)
                except Exception as error:
                    failures.append(error)
                asked += 1

    opts = {"engine_opts": {"vocab_size": vocab, "delay": 0.02}}
    with ExitStack() as new, ThreadPoolExecutor() as threads:
        with ExitStack() as old:
            for _ in range(2):
                old.enter_context(in_process_worker(server_url, pool_name, shards=3, **opts))
            asking = [threads.submit(ask, number) for number in range(3)]
            until(lambda: asked > 20, what="calls")
            for _ in range(2):
                new.enter_context(
                    in_process_worker(server_url, pool_name, shards=shards, replace=True, **opts)
                )
            before = asked
            until(lambda: asked > before + 20, what="calls of the old shards")
        before = asked
        until(lambda: asked > before + 40, what="calls of the new shards")
        ended.set()
        for done in asking:
            done.result(60)
        with connected(server_url, pool_name) as lm:
            assert len(lm.shards) == shards
    assert not failures, failures[:3]
