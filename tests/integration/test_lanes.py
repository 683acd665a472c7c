"""Pools of several lanes with real workers: what holds for one lane, homes, and idle workers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import redis

import lmpool
from lmpool.affinity import own_lanes
from lmpool.backends.mock import mock_row
from lmpool.keys import GROUP
from lmpool.worker.intake import Intake
from tests.support.clients import connected
from tests.support.faults import Faults
from tests.support.gate import Gate
from tests.support.pools import (
    Asking,
    in_processes,
    pool_shards,
    read_batches,
    some_prompts,
    until_at_rest,
    worker_processes,
)
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process


def rows_of(prompts: list[list[int]]) -> np.ndarray:
    return np.stack([mock_row(prompt, 256) for prompt in prompts])


def connecting(url: str, pool: str) -> closing[lmpool.PooledLM]:
    """A client that may come before its workers."""
    return closing(lmpool.connect(url, pool, framework="numpy", workers_timeout=60))


def ask(url: str, pool: str, prompts: list[list[int]]) -> tuple[np.ndarray, dict[str, int]]:
    """One client process."""
    with connected(url, pool) as lm:
        return lm.batch_next_token_logprobs_sync(prompts, timeout=60), lm.statistics()


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_and_shared_work(server_url, redis_client, pool_name, shards, tmp_path):
    prompts = some_prompts(600, seed=1)
    log = tmp_path / "log"
    gate = Gate(tmp_path)
    options = {"lanes": 16, "shards": shards, "batch_size": 16}
    gated = gate.settings(delay=0.03, log=str(log))
    arguments = [(server_url, pool_name, prompts), (server_url, pool_name, prompts[::-1])]
    with (
        worker_processes(server_url, pool_name, 3, **options, **gated) as workers,
        ThreadPoolExecutor(1) as thread,
    ):
        asking = thread.submit(in_processes, ask, arguments)
        found = pool_shards(redis_client, pool_name)
        everyone = {worker.pid for worker in workers}

        def all_are_there() -> bool:
            """Each worker has begun a batch, and both clients have asked."""
            replies = list(redis_client.scan_iter(f"{found[0].prefix}:reply:*", count=1000))
            return len(replies) == 2 and {pid for pid, _ in gate.batches()} == everyone

        try:
            until(lambda: asking.done() or all_are_there(), what="all to be there", every=0.05)
        finally:
            gate.open()
        answers = asking.result()
        assert [shard.lanes for shard in found] == [16] * shards
        with connected(server_url, pool_name) as lm:
            assert lm.pool_statistics_sync()["computed"] == len(prompts)
            # Each kind of priority, and a lane's own jobs of both.
            batch = [[9, *prompt] for prompt in prompts[:40]]
            rows = lm.batch_next_token_logprobs_sync(batch, priority="batch")
            np.testing.assert_array_equal(rows, rows_of(batch))
        until_at_rest(redis_client, pool_name)
        for shard in found:
            assert not any(redis_client.xlen(stream.key) for stream in shard.streams)
    np.testing.assert_array_equal(answers[0][0], rows_of(prompts))
    np.testing.assert_array_equal(answers[1][0], rows_of(prompts[::-1]))
    assert sum(counted["joined"] for _, counted in answers) > 0
    by_worker = Counter[int]()
    for one in read_batches(log):
        by_worker[one.pid] += one.size
    assert by_worker.keys() == everyone
    # Batches fill across lanes, however few jobs each has.
    assert max(one.size for one in read_batches(log)) == 16
    # Nothing is left of those that have left.
    for shard in found:
        for key in shard.groups:
            assert redis_client.xinfo_consumers(key, GROUP) == []
        assert redis_client.zrangebyscore(shard.workers, 0, "+inf") == []


def test_prompts_meet_their_home_while_there_is_little_to_do(
    server_url, redis_client, pool_name, tmp_path
):
    log = tmp_path / "log"
    # However late the home looks, it is not the others' by then.
    patient = Faults(tmp_path).settings(log=str(log), patience=1000.0)
    with (
        worker_processes(server_url, pool_name, 3, lanes=32, shards=1, **patient) as workers,
        connected(server_url, pool_name) as lm,
    ):
        (shard,) = pool_shards(redis_client, pool_name)
        names = {w.pid: w.wait_until_alive()["id"] for w in workers}
        know_each_other(redis_client, shard, 3)
        homes = {
            lane: pid
            for pid, name in names.items()
            for lane in own_lanes(name, names.values(), 0, 32)
        }
        place = lm.info.placement()
        expected = []
        for n in range(60):
            prompt = [n % 6] * 40 + [n]
            expected.append(homes[place.of(np.array(prompt, "<u4").tobytes(), None)[1]])
            lm.next_token_logprobs_sync(prompt)
        met = [batch.pid for batch in read_batches(log)]
    assert len(met) == len(expected)
    assert sum(a == b for a, b in zip(met, expected, strict=True)) >= 0.9 * len(met)


def know_each_other(client: redis.Redis, shard, count: int) -> None:
    """Wait until all workers have been answered a beat since the last one joined."""
    until(lambda: client.zcount(shard.workers, 0, "+inf") == count)
    change = client.zscore(shard.workers, "")
    for _ in range(2):  # who has sent the second has taken the answer to the first
        beats = client.zrange(shard.workers, 0, -1, withscores=True)
        until(
            lambda beats=beats: all(
                client.zscore(shard.workers, name) != at for name, at in beats if name
            ),
            what="a beat of each",
        )
    assert client.zscore(shard.workers, "") == change


def test_no_worker_idles_while_one_lane_has_all_the_work(
    server_url, redis_client, pool_name, tmp_path
):
    gate = Gate(tmp_path)
    prompts = [[7] * 300 + [i % 256, i // 256] for i in range(320)]  # one prefix
    with (
        worker_processes(
            server_url, pool_name, 4, lanes=16, batch_size=4, **gate.settings()
        ) as workers,
        connected(server_url, pool_name) as lm,
    ):
        asking = Asking(lm, prompts)
        everyone = {worker.pid for worker in workers}
        until(lambda: {pid for pid, _ in gate.batches()} == everyone, what="each to be at work")
        gate.open()
        np.testing.assert_array_equal(asking.rows(), rows_of(prompts))


def held(client: redis.Redis, shard) -> int:
    """How many jobs of a shard workers have taken."""
    return sum(
        consumer["pending"]
        for stream in shard.streams
        for consumer in client.xinfo_consumers(stream.key, GROUP)
    )


def test_lanes_of_a_dead_home_are_served_at_once_and_its_jobs_recovered(
    server_url, redis_client, pool_name
):
    # Its batch is never full: what it takes, it holds.
    never = {"lanes": 16, "shards": 1, "batch_size": 400, "timeout": 60}
    prompts = some_prompts(200, seed=3)
    with (
        connecting(server_url, pool_name) as lm,
        worker_process(server_url, pool_name, **never) as holder,
    ):
        asking = Asking(lm, prompts)
        (shard,) = pool_shards(redis_client, pool_name)
        until(lambda: held(redis_client, shard) == 200, what="all jobs to be taken")
        with worker_process(server_url, pool_name, lanes=16, shards=1) as other:
            know_each_other(redis_client, shard, 2)
            (name,) = {w["id"] for w in lm.pool_statistics_sync()["workers"]} - {
                other.wait_until_alive()["id"]
            }
            holder.kill()
            # Half of the lanes are the dead one's until its heartbeat has ended.
            redis_client.pexpire(shard.alive(name), 600_000)
            redis_client.zincrby(shard.workers, 600_000, name)
            later = [[5, *prompt] for prompt in prompts]
            rows = lm.batch_next_token_logprobs_sync(later)
            np.testing.assert_array_equal(rows, rows_of(later))
            assert redis_client.delete(shard.alive(name)) == 1
            redis_client.zadd(shard.workers, {name: 1})
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts))
            until(lambda: "which is gone" in other.log, what="the other to say so")
            lm.close()
            until_at_rest(redis_client, pool_name)
            until(
                lambda: all(
                    len(redis_client.xinfo_consumers(key, GROUP)) <= 1 for key in shard.groups
                ),
                what="the dead one's consumers to be gone",
            )


def test_jobs_are_given_back_from_every_lane(server_url, redis_client, pool_name):
    never = {"lanes": 16, "shards": 1, "batch_size": 400, "timeout": 60}
    prompts = some_prompts(100, seed=4)
    with connecting(server_url, pool_name) as lm:
        with worker_process(server_url, pool_name, **never) as worker:
            asking = Asking(lm, prompts)
            (shard,) = pool_shards(redis_client, pool_name)
            until(lambda: held(redis_client, shard) == 100, what="all jobs to be taken")
            worker.terminate()
            assert worker.wait() == 0
            assert "100 jobs given back" in worker.log
        with worker_process(server_url, pool_name, lanes=16, shards=1):
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts))
            lm.close()
            until_at_rest(redis_client, pool_name)


@pytest.mark.one_server
def test_workers_that_place_prompts_otherwise_are_refused(server_url, pool_name: str) -> None:
    with worker_process(server_url, pool_name, lanes=4):
        for name, value in (("lanes", 8), ("block_tokens", 99), ("blocks", 3)):
            other = {"lanes": 4, name: value}
            with worker_process(server_url, pool_name, alive=False, **other) as refused:
                assert refused.wait() == 78
                assert f"{name} " in refused.log
                assert f"{value} here" in refused.log


@pytest.mark.one_server
def test_an_engines_thread_reads_where_lanes_are_more_than_there_is_room_for(
    server_url, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then those that wait are asked for first."""
    asked: Counter[str] = Counter()
    few, rest, until_called = Intake._read_few, Intake._read_rest, Intake._read_until
    had = threading.local()

    def noted_few(intake, *given):
        if on_engines_thread():
            time.sleep(0.005)  # until somebody has asked
        found = few(intake, *given)
        had.some = bool(found) and on_engines_thread()
        asked["few"] += had.some
        return found

    def noted_rest(intake, *given):
        asked["rest"] += getattr(had, "some", False)
        return rest(intake, *given)

    def noted_until(intake, *given):
        had.some = False
        return until_called(intake, *given)

    def on_engines_thread() -> bool:
        return threading.current_thread().name == "lmpool-engine"

    monkeypatch.setattr(Intake, "_read_few", noted_few)
    monkeypatch.setattr(Intake, "_read_rest", noted_rest)
    monkeypatch.setattr(Intake, "_read_until", noted_until)
    options = {"lanes": 16, "shards": 1, "batch_size": 2}
    with (
        in_process_worker(server_url, pool_name, **options),
        in_process_worker(server_url, pool_name, **options),
        connected(server_url, pool_name) as lm,
    ):
        seeds = iter(range(10**6))

        def has_read() -> bool:
            for prompt in some_prompts(20, seed=next(seeds)):
                row = lm.sync.next_token_logprobs(prompt, timeout=60)
                np.testing.assert_array_equal(row, mock_row(prompt, 256))
            return asked["few"] > 2

        until(has_read)
    assert not asked["rest"]  # a lane gave as many as it has
