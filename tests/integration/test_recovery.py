"""Workers that die, freeze, hang and break: every prompt has one outcome all the same."""

from __future__ import annotations

import itertools
import re
import time
from contextlib import ExitStack

import numpy as np
import pytest

from lmpool.errors import PromptFailed
from lmpool.keys import GROUP
from lmpool.liveness import consumers
from lmpool.scripts import script
from lmpool.wire import claim_head, pack_job
from tests.support.clients import connected
from tests.support.faults import STEPS, Faults
from tests.support.gate import Gate
from tests.support.mock_rows import rows_of
from tests.support.pools import Asking, pending, pool_shards, some_prompts, until_at_rest
from tests.support.protocol import new_job
from tests.support.waiting import until
from tests.support.workers import worker_process


@pytest.mark.one_shard
def test_workers_killed_at_every_step_lose_nothing(server_url, redis_client, pool_name, tmp_path):
    prompts = some_prompts(400, seed=1)
    faults = Faults(tmp_path)
    with ExitStack() as stack:
        dying = [
            stack.enter_context(
                worker_process(
                    server_url,
                    pool_name,
                    alive=False,
                    batch_size=16,
                    **faults.settings(die_at=step, delay=0.05),
                )
            )
            for step in STEPS
        ]
        last = stack.enter_context(
            worker_process(server_url, pool_name, batch_size=16, **faults.settings(delay=0.005))
        )
        for worker in dying:
            worker.wait_until_alive()
        with connected(server_url, pool_name) as lm:
            rows = lm.batch_next_token_logprobs_sync(prompts, timeout=150)
            np.testing.assert_array_equal(rows, rows_of(prompts))
            for seed in itertools.count(2):  # who was late to read has yet to get its batch
                if all(worker.process.poll() is not None for worker in dying):
                    break
                more = some_prompts(100, seed=seed)
                rows = lm.batch_next_token_logprobs_sync(more, timeout=150)
                np.testing.assert_array_equal(rows, rows_of(more))
        assert [worker.wait() for worker in dying] == [-9] * len(STEPS)
        assert last.process.poll() is None
        until_at_rest(redis_client, pool_name)
        (shard,) = pool_shards(redis_client, pool_name)
        until(lambda: len(consumers(redis_client, shard)) == 1, what="the dead to be forgotten")


@pytest.mark.one_shard
def test_prompts_that_end_their_workers_are_set_aside(
    server_url, redis_client, pool_name, tmp_path
):
    """They alone fail, each after as many workers as there are deliveries."""
    acts = {"7": "segfault", "8": "break", "9": "hang"}
    prompts = [p for p in some_prompts(80, seed=5) if not {7, 8, 9} & set(p)]
    settings = {
        "batch_size": 4,
        "engine_timeout": 4,
        "max_deliveries": 2,
        **Faults(tmp_path).settings(acts=acts, delay=0.005),
    }
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_process(server_url, pool_name, alive=False, **settings))
            for _ in range(7)
        ]
        for worker in workers:
            worker.wait_until_alive()
        lm = stack.enter_context(connected(server_url, pool_name))
        good, bad = Asking(lm, prompts), [Asking(lm, [[int(token), 1]]) for token in acts]
        for asking in bad:
            with pytest.raises(PromptFailed, match="given up after 2 deliveries"):
                asking.rows()
        np.testing.assert_array_equal(good.rows(), rows_of(prompts))
        for worker in workers:  # one whose engine hangs takes a moment to give it up
            if "the worker cannot go on" in worker.log:
                worker.wait()
        # Two of them may have been in one batch, and ended one worker together.
        ended = [worker.process.poll() for worker in workers]
        assert set(ended) == {-11, 70, None}
        assert 3 <= sum(status is not None for status in ended) <= 6
        (shard,) = pool_shards(redis_client, pool_name)
        dead = [fields for _, fields in redis_client.xrange(shard.dead)]
        assert len(dead) == 3
        names = {name for w in workers for name in re.findall(r"(\S+) serves tiny as pool", w.log)}
        for entry in dead:
            assert entry[b"deliveries"] == b"2"
            assert entry[b"worker"].decode() in names
            assert b"given up" in entry[b"reason"]
        lm.close()
        until_at_rest(redis_client, pool_name)


def test_a_frozen_worker_that_wakes_finishes_what_it_held(
    server_url, redis_client, pool_name, tmp_path
):
    prompts = some_prompts(12, seed=9)
    gate = Gate(tmp_path)
    slow = {"batch_size": 4, **gate.settings()}
    with (
        worker_process(server_url, pool_name, **slow) as frozen,
        connected(server_url, pool_name, workers_timeout=60) as lm,
    ):
        asking = Asking(lm, prompts)
        gate.wait_for_batch()
        frozen.pause()
        with worker_process(server_url, pool_name, **slow) as other:
            gate.open(pid=other.pid)
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts))
            frozen.resume()
            gate.open()
            # It goes on as a worker of the pool, with what it held and with what comes.
            frozen.wait_until_alive()
            more = some_prompts(20, seed=10)
            rows = lm.batch_next_token_logprobs_sync(more, timeout=60)
            np.testing.assert_array_equal(rows, rows_of(more))
            lm.close()
            until_at_rest(redis_client, pool_name)


@pytest.mark.one_shard
@pytest.mark.chaos
def test_a_long_batch_is_not_a_dead_worker(server_url, redis_client, pool_name, tmp_path):
    """Idle time alone says nothing: a worker with a heartbeat keeps what it computes."""
    gate = Gate(tmp_path)
    settings = {"batch_size": 4, **gate.settings()}
    with (
        worker_process(server_url, pool_name, **settings) as busy,
        connected(server_url, pool_name, workers_timeout=60) as lm,
    ):
        asking = Asking(lm, [[1, 2]])
        gate.wait_for_batch()
        with worker_process(server_url, pool_name, **settings) as idle:
            (shard,) = pool_shards(redis_client, pool_name)
            time.sleep(8)  # more than a heartbeat and two looks
            held = pending(redis_client, shard)
            assert sorted(held.values()) == [0, 1]
            gate.open()
            np.testing.assert_array_equal(asking.rows(), rows_of([[1, 2]]))
            assert {pid for pid, _ in gate.batches()} == {busy.pid} != {idle.pid}


@pytest.mark.one_shard
def test_a_job_that_its_worker_forgot_is_run(server_url, redis_client, pool_name):
    """As when a server comes back as it was a moment ago: an entry is held, and nobody knows it."""
    with (
        worker_process(server_url, pool_name) as worker,
        connected(server_url, pool_name) as lm,
    ):
        name = worker.wait_until_alive()["id"]
        (shard,) = pool_shards(redis_client, pool_name)
        job = new_job(5, 6, fingerprint=lm.info.fingerprint)
        enqueue = [shard.stream().key, shard.prefix, "someone", 60_000, 60_000, 10, GROUP, 1, 1]
        enqueue += [claim_head(job.digest, 0, 0, None), 0, pack_job(job)]
        with redis_client.pipeline(transaction=True) as pipeline:  # before the worker can read it
            pipeline.eval(script("enqueue").source, 1, *enqueue)
            pipeline.xreadgroup(GROUP, name, {shard.stream().key: ">"})
            _, read = pipeline.execute()
        assert len(read[0][1]) == 1
        until(lambda: redis_client.exists(shard.result(job.digest)))
        lm.close()
        redis_client.delete(shard.reply("someone"))
        until_at_rest(redis_client, pool_name)


def test_out_of_memory_halves_the_batch_and_is_remembered(
    server_url, redis_client, pool_name, tmp_path
):
    log = tmp_path / "batches"
    settings = Faults(tmp_path).settings(memory=10, log=str(log))
    with (
        worker_process(server_url, pool_name, batch_size=64, timeout=0.05, **settings) as worker,
        connected(server_url, pool_name) as lm,
    ):
        for seed in range(3):
            prompts = some_prompts(64, seed=seed)
            rows = lm.batch_next_token_logprobs_sync(prompts, timeout=60)
            np.testing.assert_array_equal(rows, rows_of(prompts))
        assert lm.pool_statistics_sync()["failed"] == 0
        assert worker.log.count("out of memory") <= 3  # 64, 32, 16: it is not tried again
