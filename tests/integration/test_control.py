"""What operators go by: control jobs, health for ``arq --check``, and what to scale by."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from arq.connections import ArqRedis

from lmpool.errors import ClientClosed, NoWorkers, PoolTimeout
from lmpool.keys import PoolKeys
from lmpool.producer import control_jobs
from lmpool.producer.control import ask_workers
from lmpool.producer.deadline import Deadline
from lmpool.producer.waits import Future
from lmpool.settings import ClientOptions
from tests.integration.test_adapters import registered, write_adapter
from tests.support import logged
from tests.support.clients import connected
from tests.support.faults import Faults
from tests.support.pools import Asking, worker_processes
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import (
    ARQ,
    clean_environment,
    in_process_worker,
    living_workers,
    settings_as_environment,
    worker_process,
)


def test_of_a_control_job_that_nobody_takes_nothing_is_left(
    server_url: str, redis_client: redis.Redis, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the time of whoever asked may end as soon as it is put."""
    keys, put, ends = PoolKeys(pool_name), ArqRedis.enqueue_job, list[Any]()

    async def is_over_then(*given: Any, **options: Any) -> None:
        await put(*given, **options)
        ends.append(redis_client.pttl(keys.control_queue("gone")))
        await asyncio.sleep(60)

    monkeypatch.setattr(ArqRedis, "enqueue_job", is_over_then)
    with pytest.raises(PoolTimeout, match="clear_cache was not answered"):
        ask_workers(
            ClientOptions(url=server_url, pool=pool_name),
            ["gone"],
            "clear_cache",
            deadline=Deadline(4.0),
        )
    assert ends
    assert -1 not in ends  # which has none
    until(lambda: not redis_client.exists(keys.control_queue("gone")))


def test_who_waits_for_a_moment_takes_no_time_from_others(
    server_url: str, redis_client: redis.Redis, pool_name: str
) -> None:
    def ask(seconds: float) -> None:
        options = ClientOptions(url=server_url, pool=pool_name)
        with pytest.raises(PoolTimeout):
            ask_workers(options, ["gone"], "clear_cache", deadline=Deadline(seconds))

    queue = PoolKeys(pool_name).control_queue("gone")
    with ThreadPoolExecutor() as others:
        patient = others.submit(ask, 10.0)
        until(lambda: redis_client.exists(queue))
        ask(0.5)
        assert redis_client.pexpiretime(queue) - time.time() * 1000 > 5_000
        patient.result(60)


def test_who_dies_before_answering_is_not_waited_for(
    server_url: str, redis_client: redis.Redis, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_jobs, "LOOK_EVERY", 0.05)
    options, looks = ClientOptions(url=server_url, pool=pool_name), list[list[str]]()

    def alive() -> Future[Collection[str]]:
        found: Future[Collection[str]] = Future()
        # Missed once, unreadable, there again: only who is missed twice in succession is dead.
        seen = {1: [living], 2: None, 3: [living], 4: [living, "gone"]}.get(
            len(looks) + 1, [living]
        )
        looks.append(seen or [])
        if seen is None:
            found.set_exception(PoolTimeout("away"))
        else:
            found.set_result(seen)
        return found

    def ask(*workers: str) -> dict[str, object]:
        return ask_workers(options, [*workers], "clear_cache", deadline=Deadline(60.0), alive=alive)

    with worker_process(server_url, pool_name, worker_name="w") as worker:
        (found,) = living_workers(server_url, pool_name)
        living = found["id"]
        assert ask(living, "gone") == {living: None}
        assert len(looks) >= 6
        with pytest.raises(NoWorkers, match="left to clear cache: gone gave no sign of life"):
            ask("gone")
        assert worker.process.poll() is None
    # What it was asked is taken back: it may have been frozen.
    assert not redis_client.exists(PoolKeys(pool_name).control_queue("gone"))
    assert not redis_client.keys(f"arq:job:*{pool_name}*")


def test_who_stops_waiting_is_told_of_no_other_errors(
    server_url: str,
    pool_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def give_up(*given: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise TimeoutError  # as its own look at the deadline does

    monkeypatch.setattr(control_jobs.ControlJobs, "_one", give_up)

    def ask() -> None:
        options = ClientOptions(url=server_url, pool=pool_name)
        with pytest.raises(PoolTimeout):
            ask_workers(options, ["a", "b"], "clear_cache", deadline=Deadline(0.2))

    ask()

    def has_ended() -> bool:
        return not any(t.name == "lmpool-control" for t in threading.enumerate())

    until(has_ended)
    gc.collect()  # asyncio tells of errors that nobody took as they go
    assert not logged.records(caplog, "lmpool", "asyncio")


def test_what_a_frozen_worker_was_asked_undoes_nothing_once_it_goes_on(
    server_url: str,
    redis_client: redis.Redis,
    pool_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_jobs, "LOOK_EVERY", 0.05)
    style = write_adapter(tmp_path / "style")
    with (
        worker_processes(server_url, pool_name, 2, adapter_dirs=[str(tmp_path)]) as workers,
        connected(server_url, pool_name) as lm,
    ):
        workers[0].pause()
        lm.add_new_lora(style, "style")
        lm.remove_lora("style")
        workers[0].resume()
        until(lambda: len(living_workers(server_url, pool_name)) == 2)
        lm.clear_kv_cache()  # behind all that it was asked
        assert registered(redis_client, pool_name) == {}


def test_what_a_frozen_worker_had_begun_undoes_nothing_once_it_goes_on(
    server_url: str,
    redis_client: redis.Redis,
    pool_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_jobs, "LOOK_EVERY", 0.05)
    style = write_adapter(tmp_path / "style")
    slow = Faults(tmp_path).settings(prefix_delay=4.0)
    with (
        worker_processes(server_url, pool_name, 2, adapter_dirs=[str(tmp_path)], **slow) as workers,
        connected(server_url, pool_name) as lm,
        ThreadPoolExecutor() as pool,
    ):

        def are_begun(count: int) -> bool:
            return len(redis_client.keys(f"arq:in-progress:*{pool_name}*")) >= count

        busy = pool.submit(lm.cache_kv, [1])
        until(lambda: are_begun(2) or busy.done())
        adding = pool.submit(lm.add_new_lora, style, "style")
        until(lambda: are_begun(4) or busy.done())  # and waits for the engine
        workers[0].pause()
        busy.result(60)
        adding.result(60)
        lm.remove_lora("style")
        workers[0].resume()
        until(lambda: len(living_workers(server_url, pool_name)) == 2)
        lm.clear_kv_cache()
        assert registered(redis_client, pool_name) == {}
        assert "Traceback" not in workers[0].log


def test_a_call_that_kills_its_workers_ends(
    server_url: str, redis_client: redis.Redis, pool_name: str, tmp_path: Path
) -> None:
    slow = Faults(tmp_path).settings(prefix_delay=100.0)
    with (
        worker_process(server_url, pool_name, **slow) as worker,
        connected(server_url, pool_name) as lm,
        ThreadPoolExecutor() as pool,
    ):
        running = pool.submit(lm.cache_kv, [1], timeout=250)
        until(lambda: redis_client.keys(f"arq:in-progress:*{pool_name}*"))
        worker.kill()
        with pytest.raises(NoWorkers, match="gave no sign of life before they answered"):
            running.result(200)


def test_a_control_job_that_runs_while_the_server_is_restarted_is_answered(
    server_binary: str, pool_name: str, tmp_path: Path
) -> None:
    """It has forgotten the job, which the worker has begun."""
    slow = Faults(tmp_path).settings(prefix_delay=1.0)
    with (
        RealServer(tcp=True, binary=server_binary) as server,
        worker_process(server.url, pool_name, **slow) as worker,
        connected(server.url, pool_name) as lm,
        ThreadPoolExecutor() as pool,
        server.client() as client,
    ):
        runs = False
        while not runs:  # it may have ended before this was looked at
            running = pool.submit(lm.cache_kv, [1], timeout=60)
            until(lambda it=running: client.keys("arq:in-progress:*") or it.done())
            runs = not running.done()
        server.kill()
        time.sleep(1.2)  # the job has ended
        server.start()
        assert running.result() is None
        assert worker.process.poll() is None


def check(url: str, pool: str, folder: Path, **settings: Any) -> int:
    """The exit status of ``arq --check`` with these settings."""
    return subprocess.run(
        [*ARQ, "--check"],
        env={
            **clean_environment(),
            **settings_as_environment({"url": url, "pool": pool, "engine": "mock", **settings}),
        },
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=150,
    ).returncode


def test_a_workers_health_is_told_by_arq(server_url: str, pool_name: str, tmp_path: Path) -> None:
    def found(name: str) -> int:
        return check(server_url, pool_name, tmp_path, worker_name=name)

    with worker_process(server_url, pool_name, worker_name="here"):
        until(lambda: found("here") == 0, 60, what="the worker to be healthy")
        assert found("there") == 1
    assert found("here") == 1


@pytest.mark.one_shard
def test_the_backlog_is_the_length_of_the_streams_and_not_the_lag(
    server_url: str, redis_client: redis.Redis, pool_name: str
) -> None:
    """As docs/engines.md says."""
    with in_process_worker(server_url, pool_name):
        pass
    with connected(server_url, pool_name, workers_timeout=60) as lm:
        (shard,) = lm.shards
        asking = Asking(lm, [[1]])
        until(lambda: lm.pool_statistics_sync()["backlog"] == 1)

        async def withdraw() -> None:
            call = asyncio.create_task(lm.batch_next_token_logprobs([[2], [3]]))
            await asyncio.to_thread(until, lambda: lm.statistics()["queued"] == 3)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

        asyncio.run(withdraw())
        other = Asking(lm, [[4]])
        until(lambda: lm.statistics()["queued"] == 4)
        until(lambda: lm.pool_statistics_sync()["backlog"] == 2)
        assert redis_client.xlen(shard.stream().key) == 2
        (group,) = redis_client.xinfo_groups(shard.stream().key)
        assert group["lag"] != 2
        lm.close()
        for caller in (asking, other):
            with pytest.raises(ClientClosed):
                caller.rows()
