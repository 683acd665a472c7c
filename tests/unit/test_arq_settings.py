"""What arq is given."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.exceptions
from arq.connections import ArqRedis, log_redis_info

from lmpool.settings import WorkerOptions
from lmpool.worker import arq_settings
from lmpool.worker.arq_settings import PatientRedis


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
        done, _ = await asyncio.wait([polling], timeout=10)
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
        with pytest.raises(redis.exceptions.ConnectionError):  # what matters is not made up
            async with server.pipeline(transaction=True) as pipeline:
                await pipeline.dbsize().execute()

    asyncio.run(look())


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
