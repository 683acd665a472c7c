"""What arq is given."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from arq.connections import ArqRedis

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
