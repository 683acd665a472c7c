"""Waiting for rows: from event loops and from threads, with timeouts and progress bars."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

from lmpool.checks import is_number
from lmpool.errors import LmpoolError, PoolTimeout, SettingsError
from lmpool.keys import Priority
from lmpool.model_info import ModelInfo
from lmpool.producer.client import Client
from lmpool.producer.pending import PendingCall
from lmpool.wants import Answer
from lmpool.wire import Job

LONGEST_WAIT: Final = 86_400.0 * 365
"""Seconds beyond which a timeout is none."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a call waits: for how long, until when (monotonic), whether interactive jobs go first."""

    limit: float | None
    deadline: float | None
    priority: Priority
    progress: bool

    def left(self) -> float | None:
        """Seconds until the deadline; None waits without end."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


class Waiting:
    """Hands asks to the client and waits."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._timeout = client.options.request_timeout
        self._priority = client.options.priority
        self._pool = client.options.pool
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[PendingCall]] = (
            weakref.WeakKeyDictionary()
        )

    def terms(
        self, timeout: float | None, priority: Priority | None, progress: bool = False
    ) -> Terms:
        """Checked; what a call leaves out is as the client's options say."""
        if priority is None:
            priority = self._priority
        elif priority not in ("interactive", "batch"):
            raise SettingsError(f"priority={priority!r:.60}: write 'interactive' or 'batch'")
        return Terms(*self._deadline(timeout), priority, progress)

    def _deadline(self, timeout: float | None) -> tuple[float | None, float | None]:
        if timeout is None:
            timeout = self._timeout
        if timeout is None:
            return None, None
        if not is_number(timeout) or not timeout > 0:
            raise SettingsError(f"timeout={timeout!r}: write a positive number of seconds, or None")
        if timeout > LONGEST_WAIT:
            return None, None
        limit = float(timeout)
        return limit, time.monotonic() + limit

    async def rows_async(self, info: ModelInfo, jobs: Sequence[Job], terms: Terms) -> list[Answer]:
        """The rows of these asks, made for the model `info`, awaited in the running loop."""
        loop = asyncio.get_running_loop()
        call = PendingCall(jobs, terms.deadline, priority=terms.priority, info=info).for_loop(loop)
        # All that this turn of the loop asks for leaves together, at its end.
        turn = self._turns.get(loop)
        if turn is None:
            turn = self._turns[loop] = []
            loop.call_soon(self._end_turn, loop)
        turn.append(call)
        try:
            if terms.limit is None and not terms.progress:
                await call.wait_async()
            else:
                async with asyncio.timeout(terms.left()):
                    await (self._watch_async(call) if terms.progress else call.wait_async())
        except TimeoutError:
            self._client.forget(call)
            if call.left:  # else the last row came at the same moment
                raise self._timed_out(call, terms) from None
        except GeneratorExit:  # the garbage collector's doing, in whichever thread
            self._client.abandon(call)
            raise
        except BaseException:
            self._client.forget(call)
            raise
        return _outcome(call)

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = self._turns.pop(loop, [])
        try:
            self._client.submit(calls)
        except Exception as error:
            failure = (
                error
                if isinstance(error, LmpoolError)
                else LmpoolError(f"{type(error).__name__}: {error}")
            )
            for call in calls:
                if not call.done:
                    call.error = failure
                call._wake()
            if failure is not error:
                raise

    def rows_sync(self, info: ModelInfo, jobs: Sequence[Job], terms: Terms) -> list[Answer]:
        """The rows of these asks, made for the model `info`, blocking."""
        deadline = terms.deadline
        call = PendingCall(jobs, deadline, priority=terms.priority, info=info).for_thread()
        self._client.submit([call])
        try:
            if terms.progress:
                with _bar(len(jobs)) as update:
                    while not call.wait(_tick(deadline)):
                        update(len(jobs) - call.left)
                        if deadline is not None and time.monotonic() >= deadline:
                            break
                    update(len(jobs) - call.left)
                done = call.done
            else:
                done = call.wait(terms.left())
        except BaseException:
            self._client.forget(call)
            raise
        if not done:
            self._client.forget(call)
            if call.left:
                raise self._timed_out(call, terms)
        return _outcome(call)

    async def _watch_async(self, call: PendingCall) -> None:
        with _bar(len(call.jobs)) as update:
            while not call.done:
                await asyncio.wait({call.future}, timeout=0.1)
                update(len(call.jobs) - call.left)

    def _timed_out(self, call: PendingCall, terms: Terms) -> PoolTimeout:
        return PoolTimeout(
            f"{call.left} of {len(call.jobs)} rows were not there after {terms.limit:g} s; "
            f"they were withdrawn (pool {self._pool!r})"
        )


def _outcome(call: PendingCall) -> list[Answer]:
    if call.error is not None:
        # Several callers may share one error: each raises its own.
        raise type(call.error)(*call.error.args)
    return cast(list[Answer], call.answers)


def _tick(deadline: float | None) -> float:
    return 0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A progress bar; yields a function that takes how many rows are there."""
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="row") as bar:

        def update(done: int) -> None:
            bar.update(done - bar.n)

        yield update
