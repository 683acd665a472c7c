"""What arq is given."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from arq.connections import ArqRedis, log_redis_info
from arq.worker import func
from redis.asyncio.connection import ConnectionPool

from lmpool.keys import PoolKeys
from lmpool.settings import WorkerOptions
from lmpool.worker import arq_settings, control_redis
from lmpool.worker.control_redis import HEALTH_EVERY, HEALTH_MS, ControlWorker, PatientRedis
from lmpool.worker.signals import TOLD_TO_END
from lmpool.worker.status import WorkerStatus
from tests.support.server import RealServer


@pytest.fixture
def heard_before() -> Iterator[None]:
    """What this process does on signals is the same afterwards."""
    before = {told: signal.getsignal(told) for told in TOLD_TO_END}
    yield
    for told, heard in before.items():
        signal.signal(told, heard)


def test_a_cancellation_lost_on_the_way_to_the_server_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by redis-py under Python 3.11, where it comes together with the answer."""

    async def lose_it(*_: Any, **__: Any) -> list[bytes]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return []
        raise AssertionError("nobody cancelled it")

    monkeypatch.setattr(ArqRedis, "execute_command", lose_it)

    async def poll(server: PatientRedis) -> None:
        while True:
            await server.zrangebyscore("queue", 0, 1)
            await asyncio.sleep(0)

    async def cancel() -> None:
        polling = asyncio.create_task(poll(PatientRedis()))
        await asyncio.sleep(0)
        polling.cancel()
        done, _ = await asyncio.wait([polling], timeout=60)
        assert done
        assert polling.cancelled()

    asyncio.run(cancel())


def test_a_server_that_is_away_when_arq_looks_at_it_does_not_end_the_worker() -> None:
    async def look() -> None:
        server = PatientRedis(host="127.0.0.1", port=1)
        said: list[str] = []
        await log_redis_info(server, said.append)
        assert said == [
            "redis_version=? mem_usage=? clients_connected=? db_keys=?",
        ]

    asyncio.run(look())


def test_while_the_server_is_away_no_control_job_is_taken() -> None:
    async def take() -> None:
        server = PatientRedis(host="127.0.0.1", port=1)
        async with server.pipeline(transaction=True) as pipeline:
            await pipeline.watch("arq:in-progress:x")
            assert await pipeline.exists("arq:in-progress:x")  # as if another had it
            await pipeline.zscore("queue", "x")

    asyncio.run(take())


def test_what_was_asked_of_a_server_that_stays_away_comes_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_redis, "PATIENCE", 0.3)

    async def begin() -> None:
        server = PatientRedis(host="127.0.0.1", port=1)
        async with server.pipeline(transaction=True) as pipeline:
            pipeline.get("arq:job:x").incr("arq:retry:x").expire("arq:retry:x", 1)
            assert await pipeline.execute() == [None, None, None]

    asyncio.run(begin())


def test_an_end_of_a_control_job_is_written_when_the_server_is_back(
    server_binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody waits for that meanwhile, but who ends the connection."""
    for name in ("PATIENCE", "LAST_NOTES"):  # a server may be slow to start
        monkeypatch.setattr(control_redis, name, 120.0)
    server = RealServer(tcp=True, binary=server_binary)

    async def end(url: str) -> None:
        patient = PatientRedis(ConnectionPool.from_url(url))
        async with patient.pipeline(transaction=True) as pipeline:
            pipeline.set("arq:result:x", b"done").delete("arq:in-progress:x")
            assert await pipeline.execute() == []
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.start)
        await patient.aclose(close_connection_pool=True)

    try:
        asyncio.run(end(server.url))
        with server.client() as client:
            assert client.get("arq:result:x") == b"done"
    finally:
        server.stop()


@pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")  # arq's own
@pytest.mark.parametrize("turns", range(8))
def test_a_control_job_cancelled_as_its_end_is_noted_does_not_keep_a_worker_from_draining(
    turns: int, server_url: str, pool_name: str
) -> None:
    """At each turn of the loop behind the function: arq's own close ended the process with it."""
    ended: list[str] = []
    queue = PoolKeys(pool_name).control_queue("w")
    job = PoolKeys(pool_name).tag + "0a" * 16

    async def live() -> None:
        returned = asyncio.Event()

        async def function(ctx: dict[str, Any]) -> None:
            returned.set()

        async def drain(ctx: dict[str, Any]) -> None:
            ended.append("drained")

        worker = ControlWorker(
            functions=[func(function, name="function")],
            redis_pool=PatientRedis(ConnectionPool.from_url(server_url)),
            queue_name=queue,
            on_shutdown=drain,
        )
        await worker.pool.enqueue_job("function", _job_id=job, _queue_name=queue)
        worker.tasks[job] = asyncio.create_task(worker.run_job(job, 1))
        await returned.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        worker.handle_sig(signal.SIGTERM)
        await worker.close()

    asyncio.run(live())
    assert ended == ["drained"]


@pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")  # arq's own
def test_jobs_of_a_client_whose_clock_is_ahead_are_due(server_url: str, pool_name: str) -> None:
    queue = PoolKeys(pool_name).control_queue("w")
    job = PoolKeys(pool_name).tag + "0a" * 16

    async def live() -> None:
        ran = asyncio.Event()

        async def function(ctx: dict[str, Any]) -> None:
            ran.set()

        worker = ControlWorker(
            functions=[func(function, name="function")],
            redis_pool=PatientRedis(ConnectionPool.from_url(server_url)),
            queue_name=queue,
            poll_delay=0.05,
            handle_signals=False,
        )
        hour = timedelta(hours=1)
        await worker.pool.enqueue_job("function", _job_id=job, _queue_name=queue, _defer_by=hour)
        running = asyncio.create_task(worker.async_run())
        async with asyncio.timeout(60):
            await ran.wait()
        await worker.close()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(live())


@pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")  # arq's own
def test_a_worker_that_hears_no_signals_ends_without_waiting_for_its_jobs(
    server_url: str, pool_name: str
) -> None:
    queue = PoolKeys(pool_name).control_queue("w")
    job = PoolKeys(pool_name).tag + "0a" * 16

    async def live() -> None:
        began = asyncio.Event()

        async def function(ctx: dict[str, Any]) -> None:
            began.set()
            await asyncio.sleep(3600)

        worker = ControlWorker(
            functions=[func(function, name="function")],
            redis_pool=PatientRedis(ConnectionPool.from_url(server_url)),
            queue_name=queue,
            handle_signals=False,
        )
        await worker.pool.enqueue_job("function", _job_id=job, _queue_name=queue)
        worker.tasks[job] = asyncio.create_task(worker.run_job(job, 1))
        await began.wait()
        async with asyncio.timeout(60):
            await worker.close()

    asyncio.run(live())


@pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")  # arq's own
def test_a_control_job_that_is_put_again_does_not_run_twice_at_once(
    server_url: str, pool_name: str
) -> None:
    """As where a server lost it: the one that ended last answered with a KeyError of arq's."""
    queue = PoolKeys(pool_name).control_queue("w")
    job = PoolKeys(pool_name).tag + "0a" * 16

    async def live() -> None:
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def function(ctx: dict[str, Any]) -> None:
            begun.set()
            await goes_on.wait()

        worker = ControlWorker(
            functions=[func(function, name="function")],
            redis_pool=PatientRedis(ConnectionPool.from_url(server_url)),
            queue_name=queue,
        )
        try:
            tasks = []
            for _ in range(2):
                await worker.pool.enqueue_job("function", _job_id=job, _queue_name=queue)
                await worker.start_jobs([job.encode()])
                tasks.append(worker.tasks[job])
                await begun.wait()
                assert await worker.pool.delete(*await worker.pool.keys(f"arq:*{job}"))
            assert tasks[0] is tasks[1]
            goes_on.set()
            await tasks[0]
            assert worker.jobs_complete == 1
        finally:
            goes_on.set()
            await worker.close()

    asyncio.run(live())


def test_a_sign_of_life_outlives_the_next_ones_delay(
    server_binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HEALTH_MS == 3000 * HEALTH_EVERY
    monkeypatch.setattr(control_redis, "HEALTH_MS", 600_000)  # it is looked at in time

    async def live(url: str) -> None:
        patient = PatientRedis(ConnectionPool.from_url(url))
        await patient.psetex("health", 1000, b"alive")
        await patient.aclose(close_connection_pool=True)

    with RealServer(binary=server_binary) as server:
        asyncio.run(live(server.url))
        with server.client() as client:
            assert 540_000 < client.pttl("health") <= 600_000


@pytest.mark.parametrize(
    ("entry", "taken"),
    [
        ("{lmpool:p}" + "0a" * 16, True),
        ("0a" * 16, False),
        ("{lmpool:other}" + "0a" * 16, False),  # on another node: that ended the worker
        ("{lmpool:p}" + "0a" * 16 + "\n", False),
        ("{lmpool:p}job", False),
    ],
)
def test_only_jobs_of_our_clients_are_taken(
    entry: str, taken: bool, server_binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(url: str) -> list[bytes]:
        patient = PatientRedis(ConnectionPool.from_url(url))
        await patient.zadd(PoolKeys("p").control_queue("w"), {entry: 1})
        found = await patient.zrangebyscore(PoolKeys("p").control_queue("w"), 0, 2)
        await patient.aclose(close_connection_pool=True)
        return list(found)

    with RealServer(binary=server_binary) as server:
        assert asyncio.run(look(server.url)) == ([entry.encode()] if taken else [])


def test_what_a_worker_has_loaded_is_left_out_of_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Service:
        consumer = "w"

        def start(self) -> None:
            done.append("started")

    monkeypatch.setattr(
        arq_settings, "logging_config", lambda *_, **__: {"version": 1, "incremental": True}
    )
    monkeypatch.setattr(arq_settings, "keep_what_is_there", lambda: done.append("kept"))
    asyncio.run(arq_settings.startup({"options": WorkerOptions(), "service": Service()}))
    assert done == ["started", "kept"]


@pytest.mark.usefixtures("heard_before")
@pytest.mark.parametrize("fails", [False, True])
def test_who_has_left_and_is_told_to_leave_again_ends_as_if_told_once(fails: bool) -> None:
    """Nobody hears a loop's signals once it is closed: the process would be ended by one."""
    status = WorkerStatus({"id": "w", "pid": 1}, lambda: None)
    if fails:
        status.fail(RuntimeError("broken"))

    class Service:
        def __init__(self) -> None:
            self.status = status

        def stop(self) -> None:
            assert all(callable(signal.getsignal(told)) for told in TOLD_TO_END)

    async def leave() -> None:
        for told in TOLD_TO_END:
            asyncio.get_running_loop().add_signal_handler(told, print)
        with pytest.raises(SystemExit) if fails else nullcontext():
            await arq_settings.shutdown({"service": Service()})

    # Not asyncio.run, which hears Ctrl-C itself.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    assert {signal.getsignal(told) for told in TOLD_TO_END} == {signal.SIG_IGN}
