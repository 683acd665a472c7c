"""A pool in three shards: everything that holds for one."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
import redis

import lmpool
from lmpool.affinity import Placement
from lmpool.backends.mock import mock_row
from lmpool.errors import PromptFailed, UnknownAdapter
from lmpool.keys import ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.wants import Digester, Row
from lmpool.wire import Job, pack_job
from tests.integration.test_adapters import registered
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.pools import (
    Asking,
    in_processes,
    pending,
    pool_shards,
    some_prompts,
    until_at_rest,
    worker_processes,
)
from tests.support.protocol import read_flight, write_flight
from tests.support.waiting import until
from tests.support.workers import worker_process

SHARDS = 3


def rows_of(prompts: list[list[int]], adapter: str | None = None) -> np.ndarray:
    return np.stack([mock_row(prompt, 256, adapter=adapter) for prompt in prompts])


def ask(url: str, pool: str, prompts: list[list[int]]) -> tuple[np.ndarray, dict[str, int]]:
    """One client process."""
    with connected(url, pool) as lm:
        return lm.batch_next_token_logprobs_sync(prompts, timeout=40), lm.statistics()


def test_rows_and_shared_work(server_url, redis_client, pool_name, tmp_path):
    prompts, gate = some_prompts(300, seed=1), Gate(tmp_path)
    options = {"shards": SHARDS, "batch_size": 16, **gate.settings()}
    callers = [(server_url, pool_name, prompts), (server_url, pool_name, prompts[::-1])]
    with worker_processes(server_url, pool_name, 2, **options):
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(in_processes, ask, callers)
            # Nothing is computed before both wait, whichever process was up first.
            for shard in pool_shards(redis_client, pool_name):
                replies = f"{shard.prefix}:reply:*"
                until(
                    lambda: len(list(redis_client.scan_iter(replies, count=1000))) == len(callers),  # noqa: B023
                    what="both to have asked",
                )
            gate.open()
            answers = asking.result()
        with connected(server_url, pool_name) as lm:
            assert lm.info.shards == SHARDS
            statistics = lm.pool_statistics_sync()
            assert len(statistics["workers"]) == 2
            counted = [found for _, found in answers]

            async def more() -> None:
                async with lmpool.connect(server_url, pool_name, framework="numpy") as one:
                    rows = await asyncio.gather(*(one.next_token_logprobs(p) for p in prompts))
                    np.testing.assert_array_equal(rows, rows_of(prompts))
                    assert one.statistics()["cache_hits"] == len(prompts)

            asyncio.run(more())
            seeded = lm.batch_sample_sync(prompts[:30], 8, [], seed=4)
            assert seeded == [lm.sample_sync(prompt, 8, [], seed=4) for prompt in prompts[:30]]
        shards = pool_shards(redis_client, pool_name)
        assert len({shard.prefix for shard in shards}) == SHARDS
        computed = [int(redis_client.hget(shard.counters, "computed")) for shard in shards]
        until_at_rest(redis_client, pool_name)
    np.testing.assert_array_equal(answers[0][0], rows_of(prompts))
    np.testing.assert_array_equal(answers[1][0], rows_of(prompts[::-1]))
    assert statistics["computed"] == len(prompts)
    assert sum(found["queued"] for found in counted) == len(prompts)
    assert sum(found["joined"] for found in counted) > 0
    # Each shard had its share, of rows and continuations.
    assert sum(computed) == len(prompts) + 30
    assert min(computed) > len(prompts) / SHARDS / 2


def test_what_goes_wrong_and_who_leaves(server_url, redis_client, pool_name, tmp_path):
    adapter = tmp_path / "adapters" / "one"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_text("one")
    prompts = some_prompts(120, seed=2, vocab_size=255)
    options = {
        "shards": SHARDS,
        "adapter_dirs": [str(adapter.parent)],
        "engine_opts": {"fail_token": 255},
    }
    with ExitStack() as stack:
        # Its batch is never full: what it takes, it holds.
        with worker_process(server_url, pool_name, batch_size=300, timeout=50, **options) as one:
            lm = stack.enter_context(connected(server_url, pool_name, workers_timeout=60))
            asking = Asking(lm, prompts)
            # Another number of shards is another pool.
            other = {**options, "shards": 2}
            with worker_process(server_url, pool_name, alive=False, **other) as refused:
                assert refused.wait() == 78
                assert "shards 3 there, 2 here" in refused.log
            shards = pool_shards(redis_client, pool_name)
            with connected(server_url, pool_name) as leaving:
                Asking(leaving, [[7, 7, i] for i in range(60)])
                until(
                    lambda: (
                        sum(sum(pending(redis_client, shard).values()) for shard in shards) == 180
                    ),
                    what="all jobs to be taken",
                )
                leaving.close(60)  # it is told to forget them, however long that takes
            one.terminate()
            assert one.wait() == 0
            assert "left the pool; 120 jobs given back" in one.log
        # What it held in each of the shards is run by another; what was withdrawn is not.
        with worker_process(server_url, pool_name, **options):
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts))
            assert lm.pool_statistics_sync()["computed"] == len(prompts)
            for i in range(6):  # in one shard or another
                with pytest.raises(PromptFailed, match="contains the token 255"):
                    lm.next_token_logprobs_sync([i, 255])
            lm.add_new_lora(str(adapter), "one")
            entries = {redis_client.hget(shard.adapters, "one") for shard in shards}
            (entry,) = entries
            fingerprint = entry.decode().partition("\n")[0]
            found = lm.batch_next_token_logprobs_sync(prompts[:30], lora_name="one")
            np.testing.assert_array_equal(found, rows_of(prompts[:30], f"one@{fingerprint}"))
            lm.remove_lora("one")
            assert registered(redis_client, pool_name) == {}
            with pytest.raises(UnknownAdapter):
                lm.next_token_logprobs_sync([1], lora_name="one")
            lm.close()
            until_at_rest(redis_client, pool_name)
        for shard in shards:
            assert redis_client.xinfo_consumers(shard.stream().key, "workers") == []


def test_entries_of_two_shards_may_share_an_id(server_url, redis_client, pool_name):
    """Ids are a stream's own: a job is known by its shard and its id, whatever becomes of it."""
    never = {"shards": SHARDS, "batch_size": 300, "timeout": 50}
    with closing(lmpool.connect(server_url, pool_name)) as lm:
        with worker_process(server_url, pool_name, shards=SHARDS, timeout=0.5):
            shards = pool_shards(redis_client, pool_name)
            left, waited_for = (one_job_of(lm.info, shard, sent=1) for shard in (0, 1))
            # Of two jobs of one batch and one id, nobody waits for the first any more.
            put(redis_client, shards[0], left, "9-9", waits=False)
            put(redis_client, shards[1], waited_for, "9-9", waits=True)
            until(
                lambda: redis_client.exists(shards[1].result(waited_for.digest)),
                what="the job that is waited for",
            )
            until(
                lambda: not any(redis_client.xlen(shard.stream().key) for shard in shards),
                what="the other to be dropped",
            )
            assert not redis_client.exists(shards[0].result(left.digest))
        with worker_process(server_url, pool_name, **never) as worker:
            jobs = [one_job_of(lm.info, shard) for shard in range(SHARDS)]
            # Ahead of whatever else is put; a year ahead a worker would take it for damage.
            entry = f"{int(1000 * time.time()) + 3_600_000}-7"
            for shard, job in zip(shards, jobs, strict=True):
                put(redis_client, shard, job, entry, waits=True)
            until(
                lambda: (
                    sum(sum(pending(redis_client, shard).values()) for shard in shards) == SHARDS
                ),
                what="all jobs to be taken",
            )
            worker.terminate()
            assert worker.wait() == 0
            assert "3 jobs given back" in worker.log
        for shard, job in zip(shards, jobs, strict=True):
            ((now, _),) = redis_client.xrange(shard.stream().key)
            assert now.decode() != entry
            assert read_flight(redis_client, shard, job)[b"job"] == now


def one_job_of(info: ModelInfo, shard: int, *, sent: int | None = None) -> Job:
    """A job that belongs to that shard, as a client would send it (`sent` in ms)."""
    digester = Digester(info.fingerprint)
    for number in itertools.count():
        tokens = np.array([shard, number % 256], "<u4").tobytes()
        digest = digester.digest(Row("f32"), tokens)
        if Placement(SHARDS).of(tokens, None)[0] == shard:
            now = int(time.time() * 1000) if sent is None else sent
            return Job(Row("f32"), digest, tokens, None, sent=now)
    raise AssertionError


def put(client: redis.Redis, shard: ShardKeys, job: Job, entry: str, *, waits: bool) -> None:
    """Queue a job as that entry, for a client that waits for it or has left."""
    with client.pipeline(transaction=True) as pipeline:
        if waits:
            pipeline.xadd(shard.reply("somebody"), {"hello": "1"})
            pipeline.pexpire(shard.reply("somebody"), 60_000)
            write_flight(pipeline, shard, job, entry, "somebody")
        pipeline.xadd(shard.stream().key, {"job": pack_job(job)}, id=entry)
        pipeline.execute()
