"""Workers and clients come and go without losing a prompt, and leave nothing behind."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import numpy as np
import psutil
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import LmpoolError, PoolMismatch
from lmpool.keys import GROUP
from lmpool.liveness import consumers
from lmpool.testing import worker as testing_worker
from lmpool.wire import pack_job
from lmpool.worker import intake, service
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.hold import Hold
from tests.support.mock_rows import rows_of
from tests.support.pools import (
    Asking,
    assert_at_rest,
    pending,
    pool_shards,
    some_prompts,
    until_at_rest,
    worker_processes,
)
from tests.support.ports import free_port
from tests.support.protocol import new_job
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess, in_process_worker, worker_process


class Load:
    """A client that keeps asking, in several requests at once, until told to stop."""

    def __init__(self, url: str, pool: str) -> None:
        self.asked = 0
        self._url, self._pool = url, pool
        self._enough = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._ask())
        except BaseException as error:
            self._failure = error

    async def _ask(self) -> None:
        async with lmpool.connect(self._url, self._pool, framework="numpy") as lm:
            await asyncio.gather(*(self._keep_asking(lm, number) for number in range(3)))

    async def _keep_asking(self, lm: lmpool.PooledLM, number: int) -> None:
        turn = 0
        while not self._enough.is_set():
            turn += 1
            prompts = [[number, turn % 256, turn // 256, i] for i in range(24)]
            rows = await lm.batch_next_token_logprobs(prompts, timeout=60)
            np.testing.assert_array_equal(rows, rows_of(prompts))
            self.asked += len(prompts)


@pytest.mark.one_shard
@pytest.mark.usefixtures("unhurried_closing")
def test_replacing_every_worker_under_load_loses_no_prompt(server_url, redis_client, pool_name):
    slow = {"batch_size": 8, "engine_opts": {"delay": 0.02}}
    with ExitStack() as stack:
        workers = list(stack.enter_context(worker_processes(server_url, pool_name, 2, **slow)))
        names = [worker.wait_until_alive()["id"] for worker in workers]
        (shard,) = pool_shards(redis_client, pool_name)
        with Load(server_url, pool_name) as load:
            for _ in range(2):
                asked = load.asked
                until(lambda asked=asked: load.asked > asked + 100, what="the load to go on")
                leaving, name = workers.pop(0), names.pop(0)
                leaving.terminate()
                assert leaving.wait() == 0, leaving.log
                assert f"{name} left the pool" in leaving.log
                assert "ERROR" not in leaving.log
                assert name not in consumers(redis_client, shard)
                assert not redis_client.exists(shard.alive(name))
                workers.append(stack.enter_context(worker_process(server_url, pool_name, **slow)))
                names.append(workers[-1].wait_until_alive()["id"])
        with connected(server_url, pool_name) as lm:
            statistics = lm.pool_statistics_sync()
        assert sorted(consumers(redis_client, shard)) == sorted(names)
        assert_at_rest(redis_client, pool_name)
    # Nothing was asked twice, and nothing computed twice: what was given back had not been run.
    assert statistics["computed"] == load.asked
    assert statistics["failed"] == statistics["expired"] == 0


@pytest.mark.one_shard
def test_a_leaving_worker_finishes_its_batch_and_gives_the_rest_back(
    server_url, redis_client, pool_name, tmp_path
):
    prompts = some_prompts(30, seed=1)
    gate = Gate(tmp_path)
    with (
        worker_process(server_url, pool_name, batch_size=4, **gate.settings()) as one,
        connected(server_url, pool_name, workers_timeout=60) as lm,
    ):
        asking = Asking(lm, prompts)
        gate.wait_for_batch()
        one.terminate()
        with worker_process(server_url, pool_name, batch_size=4, **gate.settings()) as two:
            gate.open(pid=two.pid)
            (shard,) = pool_shards(redis_client, pool_name)
            # All but the batch that runs is done elsewhere, while it runs.
            until(lambda: redis_client.xlen(shard.stream().key) == 4, what="26 jobs to be done")
            assert one.process.poll() is None
            gate.open(pid=one.pid)
            assert one.wait() == 0
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts))
            assert lm.pool_statistics_sync()["computed"] == 30
    assert [size for pid, size in gate.batches() if pid == one.pid] == [4]


def test_what_waits_in_a_worker_that_leaves_waits_for_no_batch(any_server, pool_name, caplog):
    """A batch may run for minutes, while others are idle."""
    caplog.set_level("INFO", "lmpool.worker.service")
    prompts = [[n] * 10 for n in range(1, 7)]
    leaving = ExitStack()
    # It takes all of them at once, and two a batch.
    small = {"batch_size": 8, "max_prompt_tokens": 10, "max_batch_tokens": 20, "shards": 1}
    worker = leaving.enter_context(
        in_process_worker(any_server, pool_name, timeout=0.5, drain_timeout=150.0, **small)
    )
    with (
        leaving,
        connected(any_server, pool_name) as lm,
        ThreadPoolExecutor(1) as threads,
        Hold(worker.service.engine) as hold,
    ):
        asking = Asking(lm, prompts)
        assert hold.begun.wait(60)
        ending = threads.submit(leaving.close)
        until(worker.service.status.stopping.is_set, what="it to begin to leave")
        with in_process_worker(any_server, pool_name, **small):
            until(
                lambda: lm.pool_statistics_sync()["computed"] == 4, what="the others to be computed"
            )
            assert not ending.done()
            hold.open()
            ending.result(60)
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts))
            assert lm.pool_statistics_sync()["computed"] == 6
    assert "took over" not in caplog.text


@pytest.mark.one_shard
def test_a_job_taken_over_and_never_run_counts_no_delivery(
    server_url, redis_client, pool_name, tmp_path
):
    """Workers that leave one after the other use up no innocent's deliveries."""
    gate, port = Gate(tmp_path), free_port()
    options = {"batch_size": 1, "metrics_port": port, **gate.settings()}
    with (
        worker_process(server_url, pool_name, **options) as worker,
        connected(server_url, pool_name) as lm,
    ):
        asking = Asking(lm, [[1, 2]])
        gate.wait_for_batch()
        (shard,) = pool_shards(redis_client, pool_name)
        # One that has died: it holds a job, and has no heartbeat.
        entry = redis_client.xadd(
            shard.stream().key, {"job": pack_job(new_job(3, fingerprint=lm.info.fingerprint))}
        )
        redis_client.xgroup_createconsumer(shard.stream().key, GROUP, "died")
        redis_client.xclaim(shard.stream().key, GROUP, "died", 0, [entry], retrycount=2, force=True)

        def held():
            (found,) = redis_client.xpending_range(shard.stream().key, GROUP, entry, entry, 1)
            return found["consumer"] != b"died" and found["times_delivered"]

        assert until(held, what="the job to be taken over") == 3
        worker.terminate()
        # Or it might begin the job yet.
        until(
            lambda: httpx.get(f"http://127.0.0.1:{port}/ready").json()["status"] == "stopping",
            what="the worker to hear of it",
        )
        gate.open()
        assert worker.wait() == 0
        assert held() == 2
        asking.rows()


@pytest.mark.one_server
def test_a_leaving_worker_does_not_wait_for_jobs(
    server_url, redis_client, pool_name, monkeypatch, caplog
):
    for module in (intake, service, testing_worker):
        monkeypatch.setattr(module, "IDLE_BLOCK_MS", 30_000)

    def blocked() -> set[str]:
        return {each["id"] for each in redis_client.client_list() if "b" in each["flags"]}

    before = blocked()  # of which some may be about to end
    with in_process_worker(server_url, pool_name, shards=1, lanes=1) as worker:
        until(lambda: blocked() - before, what="the worker to wait")
        began = time.monotonic()
        worker.stop()
        assert time.monotonic() - began < 10
    assert "jobs cannot be read" not in caplog.text
    until_at_rest(redis_client, pool_name)


@pytest.mark.one_shard
def test_a_leaving_worker_does_not_wait_for_its_batch_to_fill(server_url, redis_client, pool_name):
    with ExitStack() as stack:
        with worker_process(server_url, pool_name, timeout=50, batch_size=4) as worker:
            lm = stack.enter_context(connected(server_url, pool_name, workers_timeout=60))
            asking = Asking(lm, [[1, 2, 3]])
            (shard,) = pool_shards(redis_client, pool_name)
            until(
                lambda: sum(pending(redis_client, shard).values()) == 1,
                what="the worker to take the job",
            )
            worker.terminate()
            assert worker.wait(25) == 0  # sooner than the batch would have left
            assert "1 jobs given back" in worker.log
        with worker_process(server_url, pool_name):
            np.testing.assert_array_equal(asking.rows(), rows_of([[1, 2, 3]]))


def test_a_worker_told_to_stop_while_it_loads_ends_promptly(
    server_url, redis_client, pool_name, tmp_path
):
    gate = Gate(tmp_path, hold_loading=True)
    with worker_process(server_url, pool_name, alive=False, **gate.settings()) as worker:
        gate.wait_for_loading()
        worker.terminate()
        assert worker.wait(60) == 0, worker.log
        assert "Traceback" not in worker.log
        assert not redis_client.exists(f"lmpool:{pool_name}")
        assert not list(redis_client.scan_iter(f"*{pool_name}*"))


@pytest.mark.one_server
def test_a_worker_whose_terminal_goes_away_leaves_in_order(server_url, pool_name):
    with worker_process(server_url, pool_name) as worker:
        worker.process.send_signal(signal.SIGHUP)
        assert worker.wait() == 0, worker.log
        assert "left the pool" in worker.log


# --- what is left ------------------------------------------------------------------------------


@pytest.mark.one_shard
@pytest.mark.usefixtures("unhurried_closing")
def test_nothing_is_left_behind(server_binary, tmp_path):
    """After all kinds of use: no task, thread, process, and no key that does not end by itself."""
    adapter = tmp_path / "adapters" / "one"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_text("one")
    prompts = some_prompts(200, seed=3, vocab_size=255)
    threads = set(threading.enumerate())
    processes = set(psutil.Process().children(recursive=True))

    async def use(url: str, workers: list[WorkerProcess]) -> None:
        async with (
            lmpool.connect(url, "p", framework="numpy") as lm,
            lmpool.connect(url, "p", framework="numpy", cache_bytes=0) as other,
        ):
            await asyncio.gather(
                *(lm.next_token_logprobs(prompt) for prompt in prompts),
                other.batch_next_token_logprobs(prompts),
                lm.batch_sample(prompts[:5], 10, [254], seed=1),
                other.sample(prompts[5], 10, [254], seed=1),
            )
            await asyncio.to_thread(lm.add_new_lora, str(adapter), "one")
            await lm.batch_next_token_logprobs(prompts[:20], lora_name="one")
            await asyncio.to_thread(lm.cache_kv, prompts[0])
            await asyncio.to_thread(lm.clear_kv_cache)
            with pytest.raises(LmpoolError):
                await lm.next_token_logprobs([255])  # fails in the engine
            with pytest.raises(ValueError, match="empty"):
                await lm.next_token_logprobs([])
            for worker in workers:
                worker.pause()  # or all might be there before this thread is awake again
            with pytest.raises(TimeoutError):
                await lm.batch_next_token_logprobs([[7, i] for i in range(200)], timeout=0.001)
            for worker in workers:
                worker.resume()
            cancelled = asyncio.create_task(
                other.batch_next_token_logprobs([[8, i] for i in range(200)])
            )
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await lm.pool_statistics()
            lm.clear_cache()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with RealServer(binary=server_binary) as server, server.client() as client:
        options = {"adapter_dirs": [str(tmp_path / "adapters")], "engine_opts": {"fail_token": 255}}
        with worker_processes(server.url, "p", 2, **options) as workers:
            (shard,) = pool_shards(client, "p")
            fingerprint8 = shard.prefix.split(":")[2]
            lasting = {"lmpool:p", f"lmpool:p:{fingerprint8}:vocabulary", *shard.groups}
            asyncio.run(use(server.url, workers))
            until_at_rest(client, "p")
            # An idle worker's next look takes off the index what waits no more.
            until(lambda: not client.exists(shard.waiting), what="the index to be empty")
            assert _lasting_keys(client) == {*lasting, shard.adapters}
            with connected(server.url, "p") as lm:
                assert lm.pool_statistics_sync()["backlog"] == 0
                lm.remove_lora("one")
            until(lambda: not set(threading.enumerate()) - threads, what="its threads to end")
        assert_at_rest(client, "p")
        assert _lasting_keys(client) == lasting
        # The workers have left in order: no consumer, no heartbeat, no queue of theirs.
        assert consumers(client, shard) == []
        assert not list(client.scan_iter("*:alive:*"))
        assert not list(client.scan_iter("*:control:*"))
    assert set(psutil.Process().children(recursive=True)) <= processes


def _lasting_keys(client: redis.Redis) -> set[str]:
    """The keys that stay until somebody deletes them."""
    return {key.decode() for key in client.scan_iter(count=10_000) if client.ttl(key) == -1}


# --- workers that cannot serve -----------------------------------------------------------------


@pytest.mark.one_shard
@pytest.mark.usefixtures("unhurried_closing")
def test_a_worker_whose_engine_breaks_gives_its_jobs_back(server_url, redis_client, pool_name):
    prompts = some_prompts(12, seed=4, vocab_size=255)
    prompts[1][0] = 255
    breaks = {"batch_size": 4, "engine_opts": {"break_token": 255}}
    with ExitStack() as stack:
        with worker_process(server_url, pool_name, **breaks) as broken:
            lm = stack.enter_context(connected(server_url, pool_name, workers_timeout=60))
            asking = Asking(lm, prompts)
            assert broken.wait() == 70, broken.log
            assert "the worker cannot go on: a prompt contains the token 255" in broken.log
            ((given_back, left),) = re.findall(
                r"left the pool; (\d+) jobs given back, (\d+) left for others", broken.log
            )
            assert 4 <= int(given_back) + int(left) <= 12
            assert 1 <= int(left) <= 4  # what its engine had is tried elsewhere, one by one
        with worker_process(server_url, pool_name, batch_size=4):
            np.testing.assert_array_equal(asking.rows(), rows_of(prompts))
            lm.close()
            assert_at_rest(redis_client, pool_name)


def test_one_pool_serves_one_model(server_url, redis_client, pool_name):
    first = {"model": "model-one", "revision": "r1"}
    second = {"model": "model-two", "revision": "r2"}
    prompt = [1, 2, 3]
    with (
        worker_process(server_url, pool_name, **first) as one,
        connected(server_url, pool_name, workers_timeout=4) as old_client,
    ):
        packed = redis_client.get(f"lmpool:{pool_name}")
        with worker_process(server_url, pool_name, alive=False, **second) as refused:
            assert refused.wait() == 78, refused.log
            for part in (
                "serves 'model-one' with living workers",
                "fingerprint",
                "LMPOOL_REPLACE=1",
            ):
                assert part in refused.log
            assert "Traceback" not in refused.log
        assert redis_client.get(f"lmpool:{pool_name}") == packed
        old_client.next_token_logprobs_sync(prompt)

        # Told to take over, it does so while the first lives.
        with worker_process(server_url, pool_name, replace=True, **second) as new:
            assert "now serves model-two instead of model-one" in new.log
            with connected(server_url, pool_name) as lm:
                assert lm.info.model == "model-two"
                np.testing.assert_array_equal(
                    lm.next_token_logprobs_sync(prompt), mock_row(prompt, 256)
                )
                assert lm.statistics()["queued"] == 1
            # Clients of the old model are still served by its worker, and told once it left.
            np.testing.assert_array_equal(
                old_client.next_token_logprobs_sync([4, 5]), mock_row([4, 5], 256)
            )
            one.terminate()
            assert one.wait() == 0
            with pytest.raises(PoolMismatch, match=r"now serves another model.*'model-one'"):
                old_client.next_token_logprobs_sync([5, 6], timeout=60)

    # Nobody serves: whoever comes may.
    with (
        worker_process(server_url, pool_name, **first) as back,
        connected(server_url, pool_name) as lm,
    ):
        assert "now serves model-one instead of model-two" in back.log
        assert lm.info.model == "model-one"
