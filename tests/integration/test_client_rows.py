"""A client and one worker, on fakeredis and on a real server: right rows, each computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.producer import session as session_module
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.mock_rows import VOCAB, prompts_of, rows_of
from tests.support.pools import pool_shards as shards_of
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_every_prompt_gets_its_own_row(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(20)
    for prompt in prompts:
        assert np.array_equal(lm.next_token_logprobs_sync(prompt), mock_row(prompt, VOCAB))


def test_a_batch_is_answered_in_its_order(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(300)
    rows = lm.batch_next_token_logprobs_sync(prompts)
    assert rows.shape == (300, VOCAB)
    assert rows.dtype == np.float32
    assert np.array_equal(rows, rows_of(prompts))
    # Backwards, now from the cache.
    assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts[::-1]), rows_of(prompts[::-1]))
    assert lm.batch_next_token_logprobs_sync([]).shape == (0, VOCAB)


def test_a_gather_is_answered_in_its_order(lm: lmpool.PooledLM) -> None:
    prompts = prompts_of(300)

    async def main() -> list[Any]:
        return await asyncio.gather(*(lm.next_token_logprobs(prompt) for prompt in prompts))

    assert np.array_equal(np.stack(asyncio.run(main())), rows_of(prompts))


def test_equal_prompts_are_computed_once(lm: lmpool.PooledLM) -> None:
    few = prompts_of(5)
    prompts = few * 20
    assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))

    async def main() -> list[Any]:
        return await asyncio.gather(*(lm.next_token_logprobs([*p, 1]) for p in prompts))

    assert np.array_equal(np.stack(asyncio.run(main())), rows_of([[*p, 1] for p in prompts]))
    assert lm.pool_statistics_sync()["computed"] == 10
    statistics = lm.statistics()
    assert statistics["requests"] == 200
    assert statistics["queued"] == 10
    assert statistics["joined"] == 190


def test_clients_share_what_is_computed_and_what_was(
    any_server: str, start_pool: Callable[..., str], hold: Hold
) -> None:
    pool = start_pool()
    prompts = prompts_of(10)
    with connected(any_server, pool) as first, connected(any_server, pool) as second:

        def counted(name: str) -> int:
            return sum(lm.statistics()[name] for lm in (first, second))

        with ThreadPoolExecutor(2) as threads:
            asked = [
                threads.submit(lm.batch_next_token_logprobs_sync, prompts) for lm in (first, second)
            ]
            until(lambda: counted("queued") == 10)
            until(lambda: counted("joined") == 10)
            hold.open()
            for rows in asked:
                assert np.array_equal(rows.result(), rows_of(prompts))
        assert first.pool_statistics_sync()["computed"] == 10
        with connected(any_server, pool) as third:
            assert np.array_equal(third.batch_next_token_logprobs_sync(prompts), rows_of(prompts))
            assert third.statistics()["cache_hits"] == 10
        first.batch_next_token_logprobs_sync(prompts)
        assert first.statistics()["local_hits"] == 10
        first.clear_cache()
        first.batch_next_token_logprobs_sync(prompts)
        assert first.statistics()["cache_hits"] == 10
        assert first.pool_statistics_sync()["computed"] == 10


@pytest.mark.parametrize("check_every", [2.0, 0.01])
def test_every_request_is_counted_as_answered_in_one_way(
    any_server: str,
    start_pool: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    check_every: float,
) -> None:
    """Also where an answer is found a second time, by who looks after what takes long, and
    somebody asks for the same again by then."""
    monkeypatch.setattr(session_module, "CHECK_EVERY", check_every)
    pool = start_pool(batch_size=8, max_backlog=20, shards=2)
    prompts = prompts_of(60)
    random = np.random.default_rng(1)

    def ask(lm: lmpool.PooledLM) -> None:
        for _ in range(6):
            chosen = [prompts[i] for i in random.integers(0, len(prompts), 15)]
            assert np.array_equal(lm.batch_next_token_logprobs_sync(chosen), rows_of(chosen))

    with (
        connected(any_server, pool, cache_bytes=20_000) as first,
        connected(any_server, pool, cache_bytes=0) as second,
    ):
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, (first, second, first, second)))
        for lm in (first, second):
            statistics = lm.statistics()
            assert statistics["requests"] == 180
            assert statistics["requests"] == sum(
                statistics[name] for name in ("local_hits", "cache_hits", "joined", "queued")
            )
            assert statistics["failed"] == statistics["expired"] == statistics["withdrawn"] == 0
        assert second.statistics()["local_hits"] == 0
        computed = first.pool_statistics_sync()["computed"]
        assert computed == sum(lm.statistics()["queued"] for lm in (first, second))


def test_shards_share_the_work(
    any_server: str, start_pool: Callable[..., str], redis_client: redis.Redis
) -> None:
    pool = start_pool(shards=3)
    prompts = prompts_of(90)
    with connected(any_server, pool) as lm:
        assert lm.info.shards == 3
        assert np.array_equal(lm.batch_next_token_logprobs_sync(prompts), rows_of(prompts))
        each = [
            int(redis_client.hget(shard.counters, "computed") or 0)
            for shard in shards_of(redis_client, pool)
        ]  # type: ignore[arg-type]
        assert min(each) > 10
        assert lm.pool_statistics_sync()["computed"] == sum(each) == 90
        assert len(lm.pool_statistics_sync()["workers"]) == 1


def test_sampling_repeats_with_its_seed_and_differs_without(lm: lmpool.PooledLM) -> None:
    def sample(seed: int | None = None, **options: Any) -> list[int]:
        return lm.sample_sync([1, 2, 3], 12, [VOCAB - 1], seed=seed, **options)

    first = sample(seed=1)
    assert 0 < len(first) <= 12
    assert all(0 <= token < VOCAB - 1 for token in first)
    assert sample(seed=1) == first
    assert sample(seed=2) != first
    # Without an end, or two might be empty.
    assert len({tuple(lm.sample_sync([1, 2, 3], 12, [])) for _ in range(4)}) == 4
    assert sample(temperature=0) == sample(temperature=0, seed=5)
    several = lm.batch_sample_sync([[1, 2, 3], [4], [1, 2, 3]], 12, [VOCAB - 1], seed=1)
    assert several[0] == several[2] == first
    assert asyncio.run(lm.sample([1, 2, 3], 12, [VOCAB - 1], seed=1)) == first


@pytest.mark.parametrize("encoding", ["auto", "f32", "bf16", "f16"])
def test_rows_in_every_encoding(encoding: str, any_server: str, pool: str) -> None:
    prompts = prompts_of(20)
    with connected(any_server, pool, encoding=encoding) as lm:
        rows = lm.batch_next_token_logprobs_sync(prompts)
        again = lm.batch_next_token_logprobs_sync(prompts)
    assert np.array_equal(rows, again)
    assert np.allclose(np.exp(rows.astype(np.float64)).sum(1), 1, atol=1e-5)
    if encoding == "f16":
        assert np.allclose(rows, rows_of(prompts), atol=1e-2)
    else:
        assert np.array_equal(rows, rows_of(prompts))


def test_encodings_do_not_share_results(any_server: str, pool: str) -> None:
    with connected(any_server, pool, encoding="f16") as rough:
        rough.next_token_logprobs_sync([1])
    with connected(any_server, pool) as exact:
        assert np.array_equal(exact.next_token_logprobs_sync([1]), mock_row([1], VOCAB))
        assert exact.statistics()["cache_hits"] == 0


@pytest.mark.parametrize("encoding", ["f32", "f16"])
def test_torch_rows_are_the_callers_own(encoding: str, any_server: str, pool: str) -> None:
    torch = pytest.importorskip("torch")
    with connected(any_server, pool, framework="torch", encoding=encoding) as lm:
        expected = lm.next_token_logprobs_sync([1]).clone()
        assert expected.dtype == torch.float32
        for _ in range(2):
            row = lm.next_token_logprobs_sync([1])
            assert torch.equal(row, expected)
            row.fill_(7)
            batch = lm.batch_next_token_logprobs_sync([[1], [1]])
            assert torch.equal(batch, torch.stack([expected, expected]))
            batch[0].fill_(7)
            assert torch.equal(batch[1], expected)

        async def main() -> list[Any]:
            return await asyncio.gather(*(lm.next_token_logprobs([2]) for _ in range(2)))

        first, second = asyncio.run(main())
        kept = second.clone()
        first.fill_(7)
        assert torch.equal(second, kept)


@pytest.mark.parametrize("encoding", ["f32", "f16"])
def test_numpy_rows_are_read_only(encoding: str, any_server: str, pool: str) -> None:
    with connected(any_server, pool, encoding=encoding) as lm:
        for _ in range(2):
            for row in (lm.next_token_logprobs_sync([1]), lm.batch_next_token_logprobs_sync([[1]])):
                assert isinstance(row, np.ndarray)
                with pytest.raises(ValueError, match="read-only"):
                    row[0] = 7


def test_the_vocabulary_comes_from_the_pool(lm: lmpool.PooledLM) -> None:
    assert [bytes(token) for token in lm.byte_vocab] == [bytes([i]) for i in range(VOCAB)]
    assert [token.token_id for token in lm.byte_vocab] == list(range(VOCAB))
