"""arq's worker and its connection to the queue of control jobs, which end no process by themselves.

The streams outlive a server that restarts, hangs, fails over or is full, and so must the process
that reads them; arq ends with the first command that fails.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final

from arq.connections import ArqRedis
from arq.utils import timestamp_ms
from arq.worker import Worker
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, WatchError

from lmpool.errors import LmpoolError
from lmpool.server import is_full, is_lost, understood
from lmpool.stderr import say

logger = logging.getLogger(__name__)

Commands = Sequence[tuple[Any, Any]]

AGAIN: Final = 0.2
"""Seconds until what failed is done again."""
PATIENCE: Final = 30.0
"""Seconds for which a control job's beginning or end is written again and again: more than a
failover takes. Its caller may be told later, or hears that nobody answered."""
LAST_NOTES: Final = 2.0
"""The same while a worker leaves."""
HEALTH_EVERY: Final = 2
"""Seconds between two signs of life for ``arq --check``."""
HEALTH_MS: Final = 6_000
"""How long one holds: arq's own would end a second after the next is due, and a busy worker is late
by more."""
CHECK_WITHIN: Final = 5.0
"""Seconds for which ``arq --check`` tries to reach a server that is away."""


class _ServerReport(Pipeline):
    """What arq logs of the server before it calls `startup`, which waits where there is none."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            return await super().execute(raise_on_error)
        except (RedisError, OSError) as error:
            logger.debug("arq's look at the server failed: %s", error)
            return [{}, {}, {}, "?"]


class _Refusals:
    """What the server refuses of what is asked again and again: told once, where it does not pass
    by itself."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def took(self, command: str) -> None:
        self._told.discard(command)

    def refused(self, command: str, error: Exception) -> None:
        logger.debug("arq's %s failed: %s", command, error)
        # A connection that is lost while a key is watched is a WatchError in redis-py.
        passes = is_lost(error) or is_full(error) or isinstance(error, WatchError)
        if command not in self._told and not passes:
            self._told.add(command)
            logger.warning(
                "adapters and other calls to every worker may not be answered: the server of their "
                "jobs refused %s: %s",
                *(command, error),
            )


class _OwnWords(Pipeline):
    """A pipeline whose errors are the server's own words, as `OwnWordsPipeline`."""

    def annotate_exception(self, exception: Exception, number: int, command: object) -> None:
        """Leave it as it is: a job's tokens are not for a log."""


class _Transaction(_OwnWords):
    """One MULTI of arq's: a job is taken, is begun, or has ended.

    One that is not taken is found again at the next look. One that has begun is read until the
    server is back. An end is written meanwhile: nothing waits for that.
    """

    def __init__(
        self,
        *given: Any,
        run: Callable[[Commands], Awaitable[list[Any]]],
        write: Callable[[Commands], None],
        refusals: _Refusals,
    ) -> None:
        super().__init__(*given)
        self._run, self._write, self._refusals = run, write, refusals

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        """What arq asks before it takes a job; where that fails, as if another had taken it."""
        try:
            found = await super().immediate_execute_command(*args, **options)  # type: ignore[no-untyped-call]
            self._refusals.took(args[0])
            # Of a client whose clock is ahead: it is due.
            return min(found, timestamp_ms()) if args[0] == "ZSCORE" and found else found
        except (RedisError, OSError) as error:
            self._refusals.refused(args[0], error)
            return None if args[0] == "ZSCORE" else True

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Where it took a job it raises redis-py's exceptions, a `WatchError` for a lost server."""
        commands = list(self.command_stack)
        if self.watching:
            asked = _asked(commands)
            try:
                found = await super().execute(raise_on_error)
            except (RedisError, OSError) as error:
                self._refusals.refused(asked, error)  # arq takes it for another's job
                raise
            self._refusals.took(asked)
            return found
        await self.reset()
        if any(words[0] == "GET" for words, _ in commands):
            return await self._run(commands)
        self._write(commands)
        return []

    async def reset(self) -> None:
        """As redis-py's, which does not expect that a server hangs."""
        try:
            await super().reset()  # type: ignore[no-untyped-call]
        except (RedisError, OSError):
            self.watching = False  # it was disconnected
            await super().reset()  # type: ignore[no-untyped-call]


class PatientRedis(ArqRedis):
    """arq's connection: what it asks again and again is answered as if there were nothing."""

    _NOTHING: ClassVar[dict[str, Any]] = {
        "ZRANGEBYSCORE": [],
        "ZCARD": 0,
        "PSETEX": None,
        "DEL": 0,
    }

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._refusals = _Refusals()
        self._notes: set[asyncio.Task[list[Any]]] = set()
        """What is being written of jobs that have ended."""

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """As redis-py's; arq's only one that is no transaction is its report of the server."""
        given: Any = (self.connection_pool, self.response_callbacks, transaction, shard_hint)
        if transaction:
            return _Transaction(*given, run=self._run, write=self._write, refusals=self._refusals)
        return _ServerReport(*given)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's, less those failures."""
        if args[0] == "PSETEX":
            args = (args[0], args[1], HEALTH_MS, *args[3:])
        if args[0] == "ZRANGEBYSCORE":
            # All that are there, not those until now: by the clocks of clients.
            args = (*args[:3], "+inf", *args[4:])
        try:
            answer = await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
            self._refusals.took(args[0])
        except (RedisError, OSError) as error:
            if args[0] not in self._NOTHING:
                raise
            self._refusals.refused(args[0], error)
            answer = self._NOTHING[args[0]]
        if args[0] == "ZRANGEBYSCORE":
            found = answer if type(answer) is list else []
            answer = [job for job in found if _is_job_of(args[1], job)]
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # redis-py waits with asyncio.wait_for, and that of Python 3.11 loses a cancellation
            # that comes together with the answer: a worker would not hear of its SIGTERM.
            raise asyncio.CancelledError
        return answer

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """End the connections, after what is yet to be written, if that does not take long."""
        notes = list(self._notes)
        if notes:
            await asyncio.wait(notes, timeout=LAST_NOTES)
        for note in notes:
            note.cancel()
        await asyncio.gather(*notes, return_exceptions=True)
        await super().aclose(close_connection_pool)

    def _write(self, commands: Commands) -> None:
        note = asyncio.create_task(self._run(commands))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def _run(self, commands: Commands) -> list[Any]:
        """What one MULTI is answered, done again while that fails, for `PATIENCE`.

        Nothings after that, and when its job is told to stop: which arq takes for one that has
        expired.
        """
        nothing, asked = [None] * len(commands), _asked(commands)
        deadline = time.monotonic() + PATIENCE
        while True:
            given: Any = (self.connection_pool, self.response_callbacks, True, None)
            pipeline = _OwnWords(*given)
            pipeline.command_stack = list(commands)
            try:
                found = list(await pipeline.execute())
                self._refusals.took(asked)
                return found
            except (RedisError, OSError) as error:
                self._refusals.refused(asked, error)
                if time.monotonic() >= deadline:
                    logger.warning(
                        "a control job is given up, as the server is away or refuses: %s", error
                    )
                    return nothing
            except asyncio.CancelledError:
                return nothing
            try:
                await asyncio.sleep(AGAIN)
            except asyncio.CancelledError:
                return nothing


class ControlWorker(Worker):
    """arq's worker, whose jobs do not keep it from draining, and of which none runs twice."""

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """As arq's, but for what runs here: a server that lost it was given it once more."""
        running = {job for job, task in self.tasks.items() if not task.done()}
        await super().start_jobs([job for job in job_ids if job.decode() not in running])

    async def close(self) -> None:
        """As arq's, which waits for its jobs, and ends before anything is drained where one was
        cancelled while its end was noted."""
        if not self._handle_signals:  # nobody has told them to end
            for task in self.tasks.values():
                task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.tasks.clear()
        await super().close()


class CheckingRedis(ArqRedis):
    """What ``arq --check`` asks for a worker's sign of life.

    A server that stays away ends the process with status `failed`, and a message.
    """

    def __init__(self, pool: Any, url: str, failed: int) -> None:
        super().__init__(pool)
        self._url, self._failed = url, failed

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's, again where the server is lost, for `CHECK_WITHIN`."""
        deadline = time.monotonic() + CHECK_WITHIN
        try:
            with understood(self._url):
                while True:
                    try:
                        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
                    except (RedisError, OSError) as error:
                        if not is_lost(error) or time.monotonic() >= deadline:
                            raise
                    await asyncio.sleep(AGAIN)
        except LmpoolError as error:
            say(f"lmpool worker: {error}")
            raise SystemExit(self._failed) from None


def _asked(commands: Commands) -> str:
    """What a transaction asks: another kind may be permitted where it is refused."""
    return " ".join(["MULTI of", *(str(words[0]) for words, _ in commands)])


def _is_job_of(queue: str, found: object) -> bool:
    """Whether it is what clients of ours put there: all else may lie on another node."""
    tag = queue.partition(":control:")[0].encode()
    return (
        isinstance(found, bytes)
        and re.fullmatch(re.escape(tag) + b"[0-9a-f]{32}", found) is not None
    )
