"""Handing jobs to the client and waiting for their answers, with timeouts and progress bars."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

from lmpool.errors import LmpoolError
from lmpool.model_info import ModelInfo
from lmpool.producer.blocking import is_blocking, running_loop
from lmpool.producer.call_options import CallOptions
from lmpool.producer.client import Client
from lmpool.producer.pending import PendingCall
from lmpool.tracing import active, begin_call
from lmpool.wants import Answer
from lmpool.wire import Job

BAR_EVERY: Final = 0.1
"""Seconds between two looks at how many answers are there."""


class Caller:
    """Makes the calls of one client. What an event loop's turn asks for leaves together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[PendingCall]] = (
            weakref.WeakKeyDictionary()
        )

    def answers(
        self, info: ModelInfo, jobs: Sequence[Job], options: CallOptions
    ) -> Coroutine[Any, Any, list[Answer | LmpoolError]]:
        """The answers to these jobs, which were made for the model `info`.

        Whoever stops waiting, by `options`, cancellation or Ctrl-C, withdraws them. Raises
        `PoolTimeout`, and what the pool found wrong; where `options` keep errors, they stand in the
        answers' places.
        """
        if not active():
            return self._answers(info, jobs, options, None)
        return self._traced(info, jobs, options)

    async def _traced(
        self, info: ModelInfo, jobs: Sequence[Job], options: CallOptions
    ) -> list[Answer | LmpoolError]:
        pool = self._client.options.pool
        span = begin_call(pool, info.model, jobs)
        if span is None:
            return await self._answers(info, jobs, options, None)
        try:
            answers = await self._answers(info, jobs, options, span.traceparent)
        except GeneratorExit:  # the garbage collector's doing: whoever takes spans may have locks
            raise
        except BaseException as error:
            span.end(error)
            raise
        span.end(next((each for each in answers if isinstance(each, LmpoolError)), None))
        return answers

    async def _answers(
        self, info: ModelInfo, jobs: Sequence[Job], options: CallOptions, trace: str | None
    ) -> list[Answer | LmpoolError]:
        deadline = options.deadline
        call = PendingCall(
            jobs,
            deadline.at,
            priority=options.priority,
            info=info,
            keeps_errors=options.keeps_errors,
            trace=trace,
        )
        try:
            self._submit(call)
            left = deadline.left()
            if options.progress:
                await _show_and_wait(call, left)
            elif is_blocking():
                call.wait(left)
            elif left is None:
                await call.future
            else:
                await _wait(call, left)
        except GeneratorExit:  # the garbage collector's doing, in whichever thread
            self._client.abandon(call)
            raise
        except BaseException:
            self._client.forget(call)
            raise
        if not call.done and self._client.forget(call):  # else it ended at the same moment
            call.error = deadline.error(
                f"{call.left} of {len(call.jobs)} answers were not there",
                f"; they were withdrawn (pool {self._client.options.pool!r})",
            )
        return answers_of(call)

    def _submit(self, call: PendingCall) -> None:
        if is_blocking():
            self._client.submit([call.for_thread()])
            return
        loop = running_loop()
        turn = self._turns.get(loop)
        if turn is None:
            turn = self._turns[loop] = []
            loop.call_soon(self._end_turn, loop)
        turn.append(call.for_loop(loop))

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


async def _wait(call: PendingCall, timeout: float) -> None:
    """Wait until `call` is done, or `timeout` seconds went by."""
    # A timer costs less than asyncio.timeout, and nobody has to be cancelled.
    timer = asyncio.get_running_loop().call_later(timeout, call._wake)
    try:
        await call.future
    finally:
        timer.cancel()


async def _show_and_wait(call: PendingCall, timeout: float | None) -> None:
    """Wait until `call` is done, or `timeout` seconds went by, with a progress bar."""
    end = None if timeout is None else time.monotonic() + timeout
    with _bar(len(call.jobs)) as update:
        while not call.done:
            left = BAR_EVERY if end is None else end - time.monotonic()
            if left <= 0:
                break
            if is_blocking():
                call.wait(min(BAR_EVERY, left))
            else:
                await asyncio.wait({call.future}, timeout=min(BAR_EVERY, left))
            update(len(call.jobs) - call.left)
        update(len(call.jobs) - call.left)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields a function that takes how many answers are there."""
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="prompt") as bar:

        def update(done: int) -> None:
            bar.update(done - bar.n)

        yield update


def answers_of(call: PendingCall) -> list[Answer | LmpoolError]:
    """What became of a call that is done."""
    error = call.error
    # Several callers may share one error: each has its own.
    if not call.keeps_errors:
        if error is not None:
            raise error.of(call.failed)
        return cast("list[Answer | LmpoolError]", call.answers)
    found = [error if given is None else given for given in call.answers]
    return [
        given.of(place) if isinstance(given, LmpoolError) else cast(Answer, given)
        for place, given in enumerate(found)
    ]
