"""Control jobs: what a client asks of each worker by its own arq queue."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Final

import msgpack

from lmpool.address import async_connection_pool
from lmpool.errors import AdapterError, NoWorkers, PoolError, PoolTimeout
from lmpool.keys import PoolKeys

CONTROL_TIMEOUT: Final = 120.0


def ask_workers(
    url: str,
    keys: PoolKeys,
    workers: list[str],
    function: str,
    *arguments: Any,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Run a control function on every worker; what each answered, by worker.

    Raises `NoWorkers` without workers, `AdapterError` or `PoolError` with every worker's error,
    `PoolTimeout` when one does not answer in time.
    """
    if not workers:
        raise NoWorkers(f"pool {keys.pool!r} has no worker alive to {function.replace('_', ' ')}")
    try:
        import arq  # noqa: F401
    except ImportError:
        raise PoolError(f"{function} travels as an arq job: pip install 'lmpool[worker]'") from None
    answers: dict[str, Any] = {}
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answers.update(asyncio.run(_ask(url, keys, workers, function, arguments, timeout)))
        except BaseException as error:
            failure.append(error)

    # A thread of its own: the caller's may be running an event loop.
    thread = threading.Thread(target=run, name="lmpool-control")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    errors = {worker: a["error"] for worker, a in answers.items() if "error" in a}
    if errors:
        text = "; ".join(f"{worker}: {error}" for worker, error in errors.items())
        kind = AdapterError if "lora" in function else PoolError
        raise kind(f"{function} failed on {len(errors)} of {len(workers)} workers: {text}")
    return {worker: answer["result"] for worker, answer in answers.items()}


async def _ask(
    url: str,
    keys: PoolKeys,
    workers: list[str],
    function: str,
    arguments: tuple[Any, ...],
    timeout: float | None,
) -> dict[str, Any]:
    from arq.connections import ArqRedis

    limit = CONTROL_TIMEOUT if timeout is None else timeout
    pool = ArqRedis(
        async_connection_pool(url, protocol=2),
        job_serializer=msgpack.packb,
        job_deserializer=msgpack.unpackb,
        expires_extra_ms=int(limit * 1000),
    )

    async def one(worker: str) -> Any:
        job = await pool.enqueue_job(
            function, *arguments, _queue_name=keys.control_queue(worker), _expires=limit
        )
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
