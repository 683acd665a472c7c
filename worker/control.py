"""Control functions: arq jobs that reach one worker by its own queue.

Each returns ``{"result": ...}`` or ``{"error": text}``: an exception of ours is a reply, not a
failed job to be tried again. The last argument is the seconds for which their caller waits. What a
server that was lost has forgotten is done once more: twice is as good as once. A worker that fails
meanwhile, as where the engine hangs at it, answers as it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Final

import numpy as np
import redis.exceptions
from arq.constants import job_key_prefix, result_key_prefix

from lmpool.backends.engine import Engine
from lmpool.checks import said, words
from lmpool.control_connections import WITHDRAWN
from lmpool.errors import AdapterError, EngineBroken, LmpoolError
from lmpool.server import is_lost
from lmpool.worker.service import Service
from lmpool.worker.status import WorkerStatus
from lmpool.worker.watchdog import watched

ControlReply = dict[str, Any]

AGAIN: Final = 0.2
"""Seconds until what failed of a server that was lost is done again."""
LONGEST: Final = 600.0
"""Seconds that a control function may take, whoever waits for it."""
LOOKS_FOR: Final = 2.0
"""Seconds for which the engine waits to hear whether a change of adapters is still wanted."""
NOT_WAITED_FOR: Final = "this worker was taken for dead, and is not waited for"
LOOK_EVERY: Final = 0.2
"""Seconds between two looks whether the worker has failed: one that ends waits a second for control
functions to end."""


async def add_lora(
    ctx: dict[str, Any], name: str, path: str, limit: float = LONGEST
) -> ControlReply:
    """Load an adapter and register it; returns its fingerprint."""
    adapters, loop = _service(ctx).adapters, _service(ctx).loop
    assert adapters is not None
    assert loop is not None
    check = _wanted(ctx)
    return await _on_engine(
        ctx, limit, lambda: adapters.add(name, path, loop.adapters_in_use(), check)
    )


async def remove_lora(ctx: dict[str, Any], name: str, limit: float = LONGEST) -> ControlReply:
    """Unregister and unload an adapter."""
    adapters = _service(ctx).adapters
    assert adapters is not None
    check = _wanted(ctx)
    return await _on_engine(ctx, limit, lambda: adapters.remove(name, check))


async def cache_prefix(ctx: dict[str, Any], tokens: bytes, limit: float = LONGEST) -> ControlReply:
    """Compute and keep a prefix's state (ids as little-endian uint32)."""
    engine = _engine(ctx)
    ids = np.frombuffer(tokens, dtype="<u4")
    return await _on_engine(ctx, limit, lambda: engine.cache_prefix(ids))


async def clear_cache(ctx: dict[str, Any], limit: float = LONGEST) -> ControlReply:
    """Drop the engine's state."""
    return await _on_engine(ctx, limit, _engine(ctx).clear_cache)


async def drain(ctx: dict[str, Any], limit: float = LONGEST) -> ControlReply:
    """Finish what runs, give the rest back, and end this worker, as SIGTERM does."""
    asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)
    return {"result": None}


async def describe(ctx: dict[str, Any], limit: float = LONGEST) -> ControlReply:
    """Who this worker is."""
    status = _service(ctx).status
    return {"result": {**status.description, "rows_per_second": status.rows_per_second()}}


FUNCTIONS = [add_lora, remove_lora, cache_prefix, clear_cache, drain, describe]


def _service(ctx: dict[str, Any]) -> Service:
    service: Service = ctx["service"]
    return service


def _engine(ctx: dict[str, Any]) -> Engine:
    service = _service(ctx)
    assert service.engine is not None
    return watched(service.engine, service.status)


async def _on_engine(
    ctx: dict[str, Any], limit: float, function: Callable[[], Any]
) -> ControlReply:
    """What a function returns on the engine's thread.

    One that has not begun when its caller leaves never will: whoever waits for the engine does not
    wait for what nobody wants.
    """
    loop, status = _service(ctx).loop, _service(ctx).status
    assert loop is not None
    limit = await _left(ctx, limit)
    deadline = time.monotonic() + limit
    while True:
        call = loop.call(function)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return {"result": await _returned(call, status)}
        except LmpoolError as error:
            return {"error": words(error)}
        except redis.exceptions.RedisError as error:
            # A shard's server fails over, or its slot moves: not for the engine to wait for.
            if not is_lost(error) or time.monotonic() + AGAIN > deadline - limit / 10:
                return {"error": said(error)}
            await asyncio.sleep(AGAIN)
        except Exception as error:
            return {"error": said(error)}


def _wanted(ctx: dict[str, Any]) -> Callable[[], None]:
    """What looks, on the engine's thread, whether a job is still wanted, and raises `AdapterError`
    where not: this worker was taken for dead meanwhile, and more may have been done since."""
    queue: Any = ctx.get("redis")
    job, loop = result_key_prefix + ctx.get("job_id", ""), asyncio.get_running_loop()
    began = time.monotonic()

    async def is_taken_back() -> bool:
        async with asyncio.timeout(LOOKS_FOR):
            while True:
                try:
                    return bool(await queue.get(job) == WITHDRAWN)
                except (redis.exceptions.RedisError, OSError):
                    await asyncio.sleep(AGAIN)  # it may be back from where it was cut off

    def check() -> None:
        if queue is None:
            return
        if time.monotonic() - began > LONGEST:  # that it was taken back is forgotten then
            raise AdapterError(NOT_WAITED_FOR)
        looking = is_taken_back()
        try:
            taken_back = asyncio.run_coroutine_threadsafe(looking, loop).result(2 * LOOKS_FOR)
        except TimeoutError:
            return  # nobody knows
        except (CancelledError, RuntimeError):  # the process ends
            looking.close()
            return
        if taken_back:
            raise AdapterError(NOT_WAITED_FOR)

    return check


async def _left(ctx: dict[str, Any], limit: float) -> float:
    """Seconds of `limit` that are left: a job may have lain in its queue. It goes with its caller,
    and its time is the server's."""
    if "job_id" not in ctx:
        return limit
    try:
        left: int = await ctx["redis"].pttl(job_key_prefix + ctx["job_id"])
    except (redis.exceptions.RedisError, OSError):
        return limit  # nobody knows
    return min(limit, max(left, 0) / 1000)


async def _returned(call: Future[Any], status: WorkerStatus) -> Any:
    """What a call on the engine's thread returns. Raises `EngineBroken` once the worker fails."""
    future = asyncio.wrap_future(call)
    try:
        while not future.done():
            await asyncio.wait([future], timeout=LOOK_EVERY)
            if status.failure is not None and not future.done():
                raise EngineBroken(f"the worker ends: {words(status.failure)}")
        return future.result()
    finally:
        future.cancel()
