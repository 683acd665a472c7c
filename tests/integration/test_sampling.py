"""Continuations sampled on workers, as one job each."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import LmpoolError
from tests.support.clients import connected
from tests.support.pools import Asking, some_prompts, until_at_rest, worker_processes
from tests.support.waiting import until
from tests.support.workers import worker_process

PROMPTS = some_prompts(8, seed=1)
SEEDS = (0, 1, -5, 2**64)  # the last one means the same as the first


def test_a_seed_repeats_alone_and_in_company_on_any_worker(server_url, redis_client, pool_name):
    company = some_prompts(60, seed=2)
    with worker_process(server_url, pool_name), connected(server_url, pool_name) as lm:
        alone = [
            [lm.sample_sync(prompt, 24, [], 1.3, seed) for seed in SEEDS] for prompt in PROMPTS
        ]
        computed = lm.pool_statistics_sync()["computed"]
        assert lm.sample_sync(PROMPTS[0], 24, [], 1.3, 1) == alone[0][1]
        assert lm.pool_statistics_sync()["computed"] == computed  # it was there already

    async def all_at_once(pool: str) -> list[list[list[int]]]:
        async with lmpool.connect(server_url, pool, framework="numpy") as lm:
            rows = asyncio.gather(*(lm.next_token_logprobs(prompt) for prompt in company))
            others = asyncio.gather(*(lm.sample(prompt, 30, [], 0.9) for prompt in company))
            found = await asyncio.gather(
                *(lm.sample(prompt, 24, [], 1.3, s) for prompt in PROMPTS for s in SEEDS)
            )
            np.testing.assert_array_equal(await rows, [mock_row(p, 256) for p in company])
            assert {len(ids) for ids in await others} == {30}
            return [found[i : i + 4] for i in range(0, len(found), 4)]

    # Another pool of the same model: it knows none of them, and has two workers and small batches.
    elsewhere = f"{pool_name}-2"
    with worker_processes(server_url, elsewhere, 2, batch_size=16):
        assert asyncio.run(all_at_once(elsewhere)) == alone
        until_at_rest(redis_client, elsewhere)
    for mine in alone:
        assert [len(ids) for ids in mine] == [24] * 4
        assert mine[0] == mine[3]
        assert len({tuple(ids) for ids in mine}) == 3
    assert len({tuple(mine[0]) for mine in alone}) == len(PROMPTS)


def test_what_a_continuation_is(server_url, pool_name):
    with worker_process(server_url, pool_name), connected(server_url, pool_name) as lm:
        # Without a seed each is its own, also within one call.
        free = lm.batch_sample_sync([PROMPTS[0]] * 6, 20, [])
        free.append(lm.sample_sync(PROMPTS[0], 20, []))
        assert len({tuple(ids) for ids in free}) == 7
        assert all(type(token) is int and 0 <= token < 256 for ids in free for token in ids)

        # Temperature 0 is the likeliest token, over and over, whatever the seed.
        for prompt in PROMPTS[:3]:
            context, expected = list(prompt), []
            for _ in range(12):
                expected.append(int(lm.next_token_logprobs_sync(context).argmax()))
                context.append(expected[-1])
            for seed in (None, 3):
                assert lm.sample_sync(prompt, 12, [], temperature=0, seed=seed) == expected
            assert lm.sample_sync(prompt, 5, [], temperature=0.0) == expected[:5]

        # It ends before the first token that ends it, or after max_tokens.
        whole = lm.sample_sync(PROMPTS[1], 40, [], seed=7)
        assert len(whole) == 40
        for length in (1, 39):
            assert lm.sample_sync(PROMPTS[1], length, [], seed=7) == whole[:length]
        for place in (0, 5, 25):
            ends = [whole[place], whole[place + 1]]
            first = min(whole.index(token) for token in ends)
            assert lm.sample_sync(PROMPTS[1], 40, ends, seed=7) == whole[:first]

        # A batch answers in order.
        both = lm.batch_sample_sync(PROMPTS[:2], 40, [], seed=7)
        assert both[1] == whole
        assert both[0] == lm.sample_sync(PROMPTS[0], 40, [], seed=7)


def test_a_continuation_ends_at_the_longest_prompt(server_url, pool_name):
    with (
        worker_process(server_url, pool_name, max_prompt_tokens=16) as worker,
        connected(server_url, pool_name) as lm,
    ):
        # The last token comes of the row after 16 tokens.
        assert len(lm.sample_sync([1] * 10, 1000, [], seed=1)) == 7
        assert len(lm.sample_sync([1] * 16, 1000, [], seed=1)) == 1
        assert "ERROR" not in worker.log


def test_draws_follow_the_distribution(server_url, pool_name):
    """2,000 draws of one token, against the row they come from."""
    draws = 2000
    with (
        worker_process(server_url, pool_name, engine_opts={"vocab_size": 8}, batch_size=256),
        connected(server_url, pool_name) as lm,
    ):
        row = np.exp(lm.next_token_logprobs_sync([1, 2, 3]))
        drawn = lm.batch_sample_sync([[1, 2, 3]] * draws, 1, [])
        counts = np.bincount([ids[0] for ids in drawn], minlength=8)
    chi2 = ((counts - draws * row) ** 2 / (draws * row)).sum()
    assert chi2 < 40.5  # 7 degrees of freedom: once in a million
    assert row.max() < 0.9


def test_rows_do_not_wait_for_continuations(server_url, pool_name):
    """Prompts asked while long continuations run are answered between two of their tokens."""
    slow = {"engine_opts": {"delay": 0.05}}
    with (
        worker_process(server_url, pool_name, **slow),
        connected(server_url, pool_name) as lm,
        connected(server_url, pool_name) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        lm.batch_sample_sync(PROMPTS[:2], 4, [])  # the worker has seen how long that takes
        sampling = threads.submit(lm.sample_sync, PROMPTS[3], 1200, [], seed=1)  # for a minute
        until(lambda: lm.statistics()["queued"] == 3, what="the continuation to be queued")
        for i in range(8):
            rows = Asking(other, [[i, 1], [i, 2]]).rows()
            np.testing.assert_array_equal(rows, [mock_row([i, j], 256) for j in (1, 2)])
        assert not sampling.done()
        lm.reset_async_queries()
        with pytest.raises(LmpoolError, match="reset"):
            sampling.result(60)
