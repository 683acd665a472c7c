"""When batches leave, what is in them, and who computes them."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.hf import HFEngine
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.mock_rows import rows_of
from tests.support.pools import Asking, pending, pool_shards, read_batches, some_prompts
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

LONG = 30.0
"""Seconds that no test waits for: what would wait for them comes far too late."""


def test_a_full_batch_leaves_at_once(server_url, pool_name, tmp_path):
    prompts = some_prompts(24, seed=1)
    log = tmp_path / "log"
    with (
        worker_process(
            server_url, pool_name, batch_size=8, timeout=LONG, engine_opts={"log": str(log)}
        ),
        connected(server_url, pool_name) as lm,
    ):
        began = time.monotonic()
        rows = lm.batch_next_token_logprobs_sync(prompts, timeout=LONG)
        took = time.monotonic() - began
    np.testing.assert_array_equal(rows, rows_of(prompts))
    assert took < LONG / 3
    assert [batch.size for batch in read_batches(log)] == [8, 8, 8]


@pytest.mark.one_shard
def test_a_partial_batch_leaves_a_timeout_after_its_first_job(server_url, pool_name, tmp_path):
    """Jobs keep trickling in: one that waited for the last of them would leave after them all."""
    timeout, every, fewest = 1.2, 0.25, 14
    prompts = some_prompts(10 * fewest, seed=2)
    log = tmp_path / "log"

    async def trickle() -> tuple[list[float], float]:
        async with lmpool.connect(server_url, pool_name, framework="numpy") as lm:
            calls, asked = [], []
            for prompt in prompts:
                asked.append(time.monotonic())
                calls.append(asyncio.create_task(lm.next_token_logprobs(prompt)))
                await asyncio.sleep(every)
                # On a machine of whatever pace: while jobs come, two leave.
                if len(calls) >= fewest and len(read_batches(log)) >= 2:
                    break
            ended = time.monotonic()
            found = await asyncio.gather(*calls)
            np.testing.assert_array_equal(found, rows_of(prompts[: len(calls)]))
            return asked, ended

    options = {"batch_size": 64, "timeout": timeout, "engine_opts": {"log": str(log)}}
    with worker_process(server_url, pool_name, **options):
        asked, ended = asyncio.run(trickle())
    began, count = asked[0], len(asked)
    batches = read_batches(log)
    assert sum(batch.size for batch in batches) == count
    # While jobs were still coming (they came for more than 3 s).
    assert batches[0].start < ended
    assert ended - began >= every * count
    # Each batch took what came meanwhile, and the next one began with the next job.
    assert 2 <= len(batches) <= 2 + (ended - began) / timeout
    assert max(batch.size for batch in batches) >= 2
    # None before its time, by its own first job: the batch before may have begun late.
    firsts = itertools.accumulate((batch.size for batch in batches[:-1]), initial=0)
    for batch, first in zip(batches, firsts, strict=True):
        assert batch.start >= asked[first] + timeout - 0.1


def test_no_batch_is_over_its_bounds(server_url, pool_name, tmp_path):
    prompts = some_prompts(400, seed=3, longest=100)
    log = tmp_path / "log"
    options = {"max_prompt_tokens": 100, "max_batch_tokens": 300, "batch_size": 7, "timeout": 0.5}
    with (
        worker_process(server_url, pool_name, **options, engine_opts={"log": str(log)}),
        connected(server_url, pool_name) as lm,
    ):
        rows = lm.batch_next_token_logprobs_sync(prompts)
    np.testing.assert_array_equal(rows, rows_of(prompts))
    batches = read_batches(log)
    assert sum(batch.size for batch in batches) == len(prompts)
    assert sum(batch.tokens for batch in batches) == sum(map(len, prompts))
    assert max(batch.size for batch in batches) == 7
    assert 200 < max(batch.tokens for batch in batches) <= 300
    # Both bounds are made use of: prompts of 51 tokens on average, so about 5 in a batch.
    assert len(batches) < len(prompts) / 3.5


def test_prompts_as_long_as_the_budget_go_alone(server_url, pool_name, tmp_path):
    longest = [[i] * 40 for i in range(5)]
    log = tmp_path / "log"
    options = {"max_prompt_tokens": 40, "max_batch_tokens": 40, "timeout": 0.1}
    with (
        worker_process(server_url, pool_name, **options, engine_opts={"log": str(log)}),
        connected(server_url, pool_name) as lm,
    ):
        rows = lm.batch_next_token_logprobs_sync(longest)
    np.testing.assert_array_equal(rows, rows_of(longest))
    assert [(batch.size, batch.tokens) for batch in read_batches(log)] == [(1, 40)] * 5


@pytest.mark.parametrize(
    ("engine", "room", "fewest", "most"),
    [("hf", 4_000, 1, 2), ("hf", 200, 16, 32), ("mock", 0, 16, 32)],
    ids=["kept", "no room to keep it", "nothing is shared"],
)
def test_a_common_beginning_counts_once_where_the_engine_computes_it_once(
    server_url, pool_name, engine, room, fewest, most
):
    """Particles of a long prompt run together, and not two at a time."""
    shared = [5 * n % 251 for n in range(398)]
    options = {"max_prompt_tokens": 400, "max_batch_tokens": 1_000}
    if engine == "hf":
        position = HFEngine("tiny", kv_cache_bytes=1 << 20)
        options["engine_opts"] = {
            "kv_cache_bytes": room * position.kv_cache_bytes() // position.statistics().slots
        }
        position.close()
    with (
        in_process_worker(server_url, pool_name, engine=engine, model="tiny", **options),
        connected(server_url, pool_name) as lm,
    ):
        rows = lm.batch_next_token_logprobs_sync([[*shared, n, 2 * n] for n in range(32)])
        assert len({row.tobytes() for row in rows}) == 32
        until(lambda: lm.sync.pool_statistics()["computed"] >= 32)
        assert fewest <= lm.sync.pool_statistics()["batches"] <= most


def test_the_next_batch_fills_while_one_is_computed(server_url, pool_name, tmp_path):
    prompts = some_prompts(16 * 8, seed=4)
    log, delay = tmp_path / "log", 0.25
    with (
        worker_process(
            server_url,
            pool_name,
            batch_size=16,
            timeout=LONG,
            engine_opts={"delay": delay, "log": str(log)},
        ),
        connected(server_url, pool_name) as lm,
    ):
        rows = lm.batch_next_token_logprobs_sync(prompts)
    np.testing.assert_array_equal(rows, rows_of(prompts))
    batches = read_batches(log)
    assert [batch.size for batch in batches] == [16] * 8
    gaps = [b.start - a.end for a, b in itertools.pairwise(batches)]
    assert statistics.median(gaps) < delay / 2
    assert max(gaps) < LONG / 2  # none waited for company


@pytest.mark.one_shard
def test_jobs_that_come_during_a_batch_are_the_next_one(
    server_url, redis_client, pool_name, tmp_path
):
    prompts = some_prompts(48, seed=5)
    gate = Gate(tmp_path)

    async def ask() -> None:
        async with lmpool.connect(server_url, pool_name, framework="numpy") as lm:
            calls = [asyncio.create_task(lm.next_token_logprobs(p)) for p in prompts[:16]]
            await asyncio.to_thread(gate.wait_for_batch)
            calls += [asyncio.create_task(lm.next_token_logprobs(p)) for p in prompts[16:]]
            await asyncio.to_thread(
                until, lambda: queued(redis_client, pool_name) == 48, what="all jobs to be queued"
            )
            gate.open()
            np.testing.assert_array_equal(await asyncio.gather(*calls), rows_of(prompts))

    # Nothing but a full batch leaves without waiting.
    with worker_process(server_url, pool_name, batch_size=16, timeout=LONG, **gate.settings()):
        asyncio.run(ask())
        assert [size for _, size in gate.batches()] == [16, 16, 16]


def queued(client: redis.Redis, pool: str) -> int:
    """How many jobs lie in all streams of a pool."""
    return sum(client.xlen(s.key) for shard in pool_shards(client, pool) for s in shard.streams)


def held(client: redis.Redis, pool: str) -> Counter[str]:
    """How many jobs each worker of a pool holds."""
    found: Counter[str] = Counter()
    for shard in pool_shards(client, pool):
        found.update(pending(client, shard))
    return found


def test_idle_workers_find_work_and_a_busy_one_hoards_nothing(
    server_url, redis_client, pool_name, tmp_path
):
    """What comes while one worker computes runs at once on the other, however much it is."""
    first, *others = some_prompts(41, seed=6)
    gate = Gate(tmp_path)
    # A partial batch that has waited longer than a read takes: see what a worker reads next.
    options = {"batch_size": 8, "timeout": 0.1, **gate.settings()}
    with (
        worker_process(server_url, pool_name, **options) as one,
        connected(server_url, pool_name) as lm,
        connected(server_url, pool_name) as impatient,
    ):
        asking = Asking(lm, [first])
        try:
            gate.wait_for_batch()
            with worker_process(server_url, pool_name, **options) as two:
                gate.open(pid=two.pid)
                for start in range(0, 40, 10):  # more than once: while the other may be reading
                    mine = others[start : start + 10]
                    found = impatient.batch_next_token_logprobs_sync(mine, timeout=60)
                    np.testing.assert_array_equal(found, rows_of(mine))
                    assert sorted(held(redis_client, pool_name).values()) == [0, 1]
                assert [pid for pid, _ in gate.batches()].count(one.pid) == 1
        finally:
            gate.open()
        np.testing.assert_array_equal(asking.rows(), rows_of([first]))


def test_jobs_behind_a_batch_that_takes_longer_than_expected_run_elsewhere(
    server_url, redis_client, pool_name, tmp_path
):
    first, second, *others = some_prompts(12, seed=7)
    gate = Gate(tmp_path)
    options = {"batch_size": 1, **gate.settings()}
    with (
        worker_process(server_url, pool_name, **options) as one,
        connected(server_url, pool_name) as lm,
        connected(server_url, pool_name) as impatient,
    ):
        gate.open()
        for prompt in others:  # each in no time: so will the next be, the worker thinks
            lm.next_token_logprobs_sync(prompt)
        gate.close()
        asking = Asking(lm, [first])
        waiting = Asking(impatient, [second])
        try:
            gate.wait_for_batch(len(others) + 1)
            with worker_process(server_url, pool_name, **options) as two:
                gate.open(pid=two.pid)
                until(
                    lambda: queued(redis_client, pool_name) == 1,
                    what="one of two jobs to be done elsewhere",
                )
                assert [pid for pid, _ in gate.batches()].count(one.pid) == len(others) + 1
        finally:
            gate.open()
        np.testing.assert_array_equal(asking.rows(), rows_of([first]))
        np.testing.assert_array_equal(waiting.rows(), rows_of([second]))
