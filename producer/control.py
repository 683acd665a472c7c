"""Control jobs: what a client asks of each worker by its own arq queue."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any, Final, TypeAlias

import msgpack

from lmpool.address import async_connection_pool
from lmpool.checks import quoted, said
from lmpool.clock import to_ms
from lmpool.errors import AdapterError, LmpoolError, NoWorkers, PoolError
from lmpool.keys import PoolKeys
from lmpool.producer.blocking import in_thread, result
from lmpool.producer.deadline import Deadline
from lmpool.server import understood

CONTROL_TIMEOUT: Final = 120.0
"""Seconds that a worker may take where nobody says how long: loading an adapter takes long."""

Argument: TypeAlias = str | bytes


def ask_workers(
    url: str,
    keys: PoolKeys,
    workers: list[str],
    function: str,
    *arguments: Argument,
    deadline: Deadline,
) -> dict[str, object]:
    """Run a control function on every worker; returns what each returned, by worker.

    Raises `NoWorkers` without workers, `AdapterError` or `PoolError` with every worker's error,
    `PoolTimeout` when one does not answer until the deadline: it drops what it has not begun.
    """
    if not workers:
        raise NoWorkers(f"pool {keys.pool!r} has no worker alive to {function.replace('_', ' ')}")
    if importlib.util.find_spec("arq") is None:
        raise PoolError(f"{function} travels as an arq job: pip install 'lmpool[worker]'")
    if deadline.at is None:
        deadline = Deadline(CONTROL_TIMEOUT)
    # In an event loop of its own: the caller's thread may be running one.
    ask = _ask(url, keys, workers, function, arguments, deadline)
    asking = in_thread(lambda: asyncio.run(ask), "lmpool-control")
    answers = result(asking, deadline, _missing(function, workers))
    errors = {worker: a["error"] for worker, a in answers.items() if "error" in a}
    if errors:
        text = "; ".join(f"{worker}: {error}" for worker, error in errors.items())
        kind = AdapterError if "lora" in function else PoolError
        raise kind(f"{function} failed on {len(errors)} of {len(workers)} workers: {text}")
    return {worker: answer.get("result") for worker, answer in answers.items()}


def _missing(function: str, workers: list[str]) -> str:
    return f"{function} was not answered by every one of {', '.join(workers)}"


async def _ask(
    url: str,
    keys: PoolKeys,
    workers: list[str],
    function: str,
    arguments: tuple[Argument, ...],
    deadline: Deadline,
) -> dict[str, dict[str, Any]]:
    from arq.connections import ArqRedis

    limit = deadline.left() or 0.0
    pool = ArqRedis(
        async_connection_pool(url, protocol=2),
        job_serializer=msgpack.packb,
        job_deserializer=msgpack.unpackb,
        expires_extra_ms=int(limit * 1000),
    )

    async def one(worker: str) -> dict[str, Any]:
        queue = keys.control_queue(worker)
        job = await pool.enqueue_job(
            function, *arguments, limit, _queue_name=queue, _expires=max(limit, 0.001)
        )
        await pool.pexpire(queue, to_ms(2 * limit))  # of a worker that died nothing is left
        assert job is not None
        answer = await job.result(poll_delay=0.05)
        if not isinstance(answer, dict):
            raise PoolError(f"worker {worker} answered {function} with {quoted(answer)}")
        return answer

    try:
        with understood(url):
            async with asyncio.timeout(limit):
                found = await asyncio.gather(*(one(worker) for worker in workers))
    except TimeoutError:
        raise deadline.error(_missing(function, workers)) from None
    except LmpoolError:
        raise
    except Exception as error:  # of arq's: a job that failed in another way than ours do
        raise PoolError(f"{function} failed: {said(error)}") from error
    finally:
        await pool.aclose(close_connection_pool=True)
    return dict(zip(workers, found, strict=True))
