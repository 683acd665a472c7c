"""How control jobs reach workers: by arq, and again where the server was lost meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgpack
import redis.exceptions
from arq.connections import ArqRedis
from arq.constants import (
    in_progress_key_prefix,
    job_key_prefix,
    result_key_prefix,
    retry_key_prefix,
)
from arq.jobs import Job, ResultNotFound, SerializationError
from redis.asyncio.client import Pipeline

from lmpool.checks import quoted
from lmpool.clock import to_ms
from lmpool.control_connections import WITHDRAWN, control_pool
from lmpool.errors import LmpoolError, PoolError
from lmpool.keys import PoolKeys
from lmpool.liveness import LIFE_MS
from lmpool.producer.blocking import outcome
from lmpool.producer.deadline import Deadline
from lmpool.producer.waits import Future
from lmpool.server import is_lost
from lmpool.settings import ClientOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL: Final = 0.05
"""Seconds between two looks whether a worker has answered."""
EXPIRED: Final = "job expired"
"""What arq says of a job that it cannot find."""
AGAIN: Final = 0.1
"""Seconds until a server that was lost is tried again."""
LOOK_EVERY: Final = LIFE_MS / 2000
"""Seconds between two looks at who is alive. One that is found dead twice is not waited for."""

WITHDRAWN_MS: Final = 600_000
"""How long a worker is told that what it has begun is taken back: none takes longer."""

Alive = Callable[[], "Future[Collection[str]]"]


class _ControlPipeline(Pipeline):
    """A pipeline whose queues end by themselves, and whose errors are the server's own words:
    redis-py puts the command before them."""

    life_ms = 0

    def zadd(self, name: Any, *arguments: Any, **options: Any) -> Any:
        """Put a job into a queue. In the same step: whoever waits for it may leave at any time."""
        super().zadd(name, *arguments, **options)
        # Of a worker that died nothing is left, and of what others wait for nothing goes sooner.
        self.pexpire(name, self.life_ms, nx=True)
        return self.pexpire(name, self.life_ms, gt=True)

    def annotate_exception(self, exception: Exception, number: int, command: object) -> None:
        """Leave it as it is."""


class _ControlRedis(ArqRedis):
    queue_life_ms = 0

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> _ControlPipeline:
        given: Any = (self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipeline = _ControlPipeline(*given)
        pipeline.life_ms = self.queue_life_ms
        return pipeline


class ControlJobs:
    """Puts one function into the queues of workers, and waits for what they return.

    Where the server is lost, also to a failover, all is done again: a job keeps its id, and what a
    worker has begun it does not begin again unless the server has forgotten that.
    """

    def __init__(
        self,
        options: ClientOptions,
        function: str,
        arguments: Sequence[str | bytes],
        deadline: Deadline,
        alive: Alive | None = None,
    ) -> None:
        self._alive = alive
        self._keys = PoolKeys(options.pool)
        self._patience = options.reconnect_timeout
        self.function = function
        self._arguments = arguments
        self._deadline = deadline
        self._server = _ControlRedis(
            control_pool(options.control, self._keys),
            job_serializer=msgpack.packb,
            job_deserializer=msgpack.unpackb,
        )
        self._lost_since: float | None = None
        self.lost: Exception | None = None
        """Why the server is not reached, while it is not."""
        self._dead: set[str] = set()
        """Workers that are not waited for."""

    async def run(self, workers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What each returned, but for those that died meanwhile. Raises `TimeoutError`, and what
        arq and redis-py raise."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            async with asyncio.timeout(self._deadline.left()):
                if self._alive is not None:
                    tasks.append(asyncio.create_task(self._look_for_dead(workers, self._alive)))
                asked = {worker: asyncio.create_task(self._one(worker)) for worker in workers}
                tasks += asked.values()
                for task in tasks:  # nobody is told of those that end as this does
                    task.add_done_callback(_retrieve)
                await asyncio.wait(asked.values(), return_when=asyncio.FIRST_EXCEPTION)
            answers = {w: task.result() for w, task in asked.items() if task.done()}
            return {w: answer for w, answer in answers.items() if answer is not None}
        finally:
            for task in tasks:
                task.cancel()
            await self._server.aclose(close_connection_pool=True)

    async def _look_for_dead(self, workers: Sequence[str], alive: Alive) -> None:
        """Note workers that die: another one starts with what is registered."""
        missed: set[str] = set()
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                living = await outcome(alive(), Deadline(LIFE_MS / 1000), "no sign of life")
            except (LmpoolError, redis.exceptions.RedisError, OSError):
                missed = set()  # nobody knows
                continue
            missing = set(workers).difference(living)
            self._dead |= missing & missed
            missed = missing

    async def _one(self, worker: str) -> dict[str, Any] | None:
        """What a worker returned; None for one that is dead."""
        queue = self._keys.control_queue(worker)
        job = self._new_job(queue)
        while True:
            try:
                await self._patiently(partial(self._enqueue, job, queue))
                while not (found := await self._patiently(partial(_look, job))):
                    if worker in self._dead:
                        await self._patiently(partial(self._withdraw, job, queue))
                        logger.warning(
                            "%s gave no sign of life before it answered %s", worker, self.function
                        )
                        return None
            except ResultNotFound:
                await asyncio.sleep(AGAIN)  # the server has forgotten the job
                continue
            except SerializationError as error:
                if EXPIRED not in str(error):
                    raise
                # It was put again, and its first run ended as the worker began it once more.
                job = self._new_job(queue)
                continue
            (answer,) = found
            if not isinstance(answer, dict):
                raise PoolError(f"worker {worker} answered {self.function} with {quoted(answer)}")
            return answer

    async def _withdraw(self, job: Job, queue: str) -> None:
        """Take a job back: one that was frozen, and goes on after its caller was answered, must not
        undo what was done since. One that has begun it sees that it has a result."""
        of_job = (job_key_prefix, retry_key_prefix, in_progress_key_prefix)
        async with self._server.pipeline(transaction=True) as pipeline:
            pipeline.zrem(queue, job.job_id)
            pipeline.delete(*(prefix + job.job_id for prefix in of_job))
            pipeline.psetex(result_key_prefix + job.job_id, WITHDRAWN_MS, WITHDRAWN)
            await pipeline.execute()

    def _new_job(self, queue: str) -> Job:
        name = self._keys.control_job(uuid4().hex)
        return Job(name, self._server, _queue_name=queue, _deserializer=msgpack.unpackb)

    async def _enqueue(self, job: Job, queue: str) -> None:
        """Put a job into a queue, unless it is there: for as long as its caller waits."""
        left = max(self._deadline.left() or 0.0, 0.001)
        self._server.queue_life_ms = to_ms(2 * left)
        await self._server.enqueue_job(
            self.function,
            *(*self._arguments, left),
            _job_id=job.job_id,
            _queue_name=queue,
            _expires=left,
        )

    async def _patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """What it returns, done again while the server is away, for `reconnect_timeout`."""
        while True:
            if not self._deadline.left():  # asyncio.wait_for of Python 3.11 may lose a cancellation
                raise TimeoutError
            try:
                found = await step()
            except (redis.exceptions.RedisError, OSError) as error:
                now = time.monotonic()
                if self._lost_since is None:
                    self._lost_since = now
                if not is_lost(error) or now - self._lost_since >= self._patience:
                    raise
                self.lost = error
            else:
                self._lost_since = self.lost = None
                return found
            await asyncio.sleep(AGAIN)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _look(job: Job) -> tuple[object, ...]:
    """What a worker has answered, after `POLL` seconds at the latest; empty: nothing yet."""
    try:
        return (await job.result(timeout=0.0, poll_delay=POLL),)
    except TimeoutError:
        return ()
