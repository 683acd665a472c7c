"""Control jobs: what a client asks of each worker by its own arq queue."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, TypeVar

import msgpack

from lmpool.address import async_connection_pool
from lmpool.clock import to_ms
from lmpool.errors import AdapterError, NoWorkers, PoolError, PoolTimeout
from lmpool.keys import PoolKeys

CONTROL_TIMEOUT: Final = 120.0
"""Seconds that a worker may take: loading an adapter does."""

Argument: TypeAlias = str | bytes
T = TypeVar("T")


def ask_workers(
    url: str,
    keys: PoolKeys,
    workers: list[str],
    function: str,
    *arguments: Argument,
    timeout: float | None = None,
) -> dict[str, object]:
    """Run a control function on every worker; returns what each returned, by worker.

    Raises `NoWorkers` without workers, `AdapterError` or `PoolError` with every worker's error,
    `PoolTimeout` when one does not answer within `timeout` seconds.
    """
    if not workers:
        raise NoWorkers(f"pool {keys.pool!r} has no worker alive to {function.replace('_', ' ')}")
    if importlib.util.find_spec("arq") is None:
        raise PoolError(f"{function} travels as an arq job: pip install 'lmpool[worker]'")
    answers = _run_in_thread(_ask(url, keys, workers, function, arguments, timeout))
    errors = {worker: a["error"] for worker, a in answers.items() if "error" in a}
    if errors:
        text = "; ".join(f"{worker}: {error}" for worker, error in errors.items())
        kind = AdapterError if "lora" in function else PoolError
        raise kind(f"{function} failed on {len(errors)} of {len(workers)} workers: {text}")
    return {worker: answer["result"] for worker, answer in answers.items()}


def _run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in an event loop of its own: the caller's thread may be running one."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(coroutine))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="lmpool-control")
    thread.start()
    thread.join()
    return done.result()


async def _ask(
    url: str,
    keys: PoolKeys,
    workers: list[str],
    function: str,
    arguments: tuple[Argument, ...],
    timeout: float | None,
) -> dict[str, dict[str, Any]]:
    from arq.connections import ArqRedis

    limit = CONTROL_TIMEOUT if timeout is None else timeout
    pool = ArqRedis(
        async_connection_pool(url, protocol=2),
        job_serializer=msgpack.packb,
        job_deserializer=msgpack.unpackb,
        expires_extra_ms=int(limit * 1000),
    )

    async def one(worker: str) -> Any:
        queue = keys.control_queue(worker)
        job = await pool.enqueue_job(function, *arguments, _queue_name=queue, _expires=limit)
        await pool.pexpire(queue, to_ms(2 * limit))  # of a worker that died nothing is left
        assert job is not None
        try:
            return await job.result(timeout=limit, poll_delay=0.05)
        except TimeoutError:
            raise PoolTimeout(
                f"worker {worker} did not answer {function} within {limit:g} s"
            ) from None

    try:
        found = await asyncio.gather(*(one(worker) for worker in workers))
    finally:
        await pool.aclose(close_connection_pool=True)
    return dict(zip(workers, found, strict=True))
