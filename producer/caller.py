"""Handing jobs to the client and waiting for their answers, with timeouts and progress bars."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, cast

from lmpool.checks import said
from lmpool.errors import JobExpired, LmpoolError, PoolTimeout
from lmpool.model_info import ModelInfo
from lmpool.producer.blocking import loop_or_blocking
from lmpool.producer.call_options import CallOptions
from lmpool.producer.client import Client
from lmpool.producer.jobs import TOGETHER, JobMaker
from lmpool.producer.loop_ear import can_hear
from lmpool.producer.pending import LoneCall, PendingCall
from lmpool.producer.stacking import Taking
from lmpool.producer.waits import never_lost
from lmpool.token_ids import TokenIds
from lmpool.tracing import active, begin_call
from lmpool.wants import Answer, Row, Want
from lmpool.wire import Job

IN_CROWD: Final = 1024
"""Tokens of a prompt that is kept as it is until its turn ends: packed it takes half the room."""
LOST_AFTER: Final = 1.0
"""Seconds after which a turn ends whose end Ctrl-C took from its event loop: that may go on, as a
notebook's does."""
BAR_EVERY: Final = 0.1
"""Seconds between two looks at how many answers are there."""


class _Turn:
    """What one turn of an event loop asks for."""

    __slots__ = ("calls", "lone", "loop", "maker", "prompts", "want")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.calls: list[PendingCall] = []
        self.lone: list[LoneCall] = []
        """Those of `calls` whose jobs are made together at the end, of `prompts`."""
        self.prompts: list[TokenIds] = []
        self.maker: JobMaker | None = None
        self.want: Want | None = None

    def make_jobs(self) -> None:
        """Make those jobs. A prompt that is none ends its own call."""
        if self.maker is None or self.want is None:
            return
        for call, job in zip(self.lone, self.maker.each(self.prompts, self.want), strict=True):
            if isinstance(job, Job):
                call.give(job)
            elif not call.done:
                call.error = job
                call._wake()


class Caller:
    """Makes the calls of one client. What an event loop's turn asks for leaves together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._turns: dict[asyncio.AbstractEventLoop, _Turn] = {}
        self._looks_at: dict[asyncio.AbstractEventLoop, float] = {}
        """When a loop ends what was left of its turns, on the monotonic clock."""
        self._latest: _Turn | None = None
        """That of the loop which asked last: to look it up takes longer than all else."""

    async def answers(
        self,
        info: ModelInfo,
        jobs: Sequence[Job],
        options: CallOptions,
        stack: Taking | None = None,
    ) -> list[Answer | LmpoolError]:
        """The answers to these jobs, which were made for the model `info`. Rows that a `stack`
        takes are there.

        Whoever stops waiting, by `options`, cancellation or Ctrl-C, withdraws them. Raises
        `PoolTimeout`, and what the pool found wrong; where `options` keep errors, they stand in the
        answers' places.
        """
        call = self.begin(info, jobs, options)
        call.stack = stack
        try:
            await self.wait(call, options)
        except BaseException as error:
            self.leave(call, error)
            raise
        return self.end(call, options)

    def begin(self, info: ModelInfo, jobs: Sequence[Job], options: CallOptions) -> PendingCall:
        """A call of these jobs, for `wait`, and then `end` or `leave`. In an event loop it leaves
        with the turn's others; one that blocks leaves once it is waited for."""
        loop = loop_or_blocking()
        at, priority, keeps = options.deadline.at, options.priority, options.keeps_errors
        call: PendingCall
        if len(jobs) == 1:
            call = LoneCall(jobs[0], at, priority, info, keeps)
        else:
            call = PendingCall(jobs, at, priority=priority, info=info, keeps_errors=keeps)
        if active():
            call.span = begin_call(self._client.options.pool, info.model, jobs)
            call.trace = None if call.span is None else call.span.traceparent
        if loop is None:
            return call.for_thread()
        turn = self._latest
        if turn is None or turn.loop is not loop:
            turn = self._latest = self._turn_of(loop)
        turn.calls.append(call.for_loop(loop))
        return call

    def begin_in_crowd(
        self, info: ModelInfo, maker: JobMaker, prompt: TokenIds, want: Row, options: CallOptions
    ) -> PendingCall | None:
        """`begin` for a prompt of a turn that asks many: its job is made with the others', in less
        than half of the time, and is answered by the local cache then. None where it is to be
        asked alone.
        """
        turn = self._latest
        if turn is None or len(turn.calls) < TOGETHER or turn.loop is not loop_or_blocking():
            return None
        if active():
            return None
        if turn.maker is not maker or turn.want is not want:
            if turn.maker is not None:
                return None
            turn.maker, turn.want = maker, want
        if (type(prompt) is not list and type(prompt) is not tuple) or len(prompt) > IN_CROWD:
            return None
        call = LoneCall(None, options.deadline.at, options.priority, info)
        turn.lone.append(call)
        turn.prompts.append(tuple(prompt))  # as it is now
        turn.calls.append(call.for_loop(turn.loop))
        return call

    async def wait(self, call: PendingCall, options: CallOptions) -> None:
        """Wait until `call` is done, or its time is over."""
        if not call.has_future:
            reads = _may_be_read(call) and not options.progress
            if self._client.submit([call], reads=reads):
                self._client.read_alone(call, options.deadline.left())
        left = options.deadline.left()
        if options.progress:
            with _bar(len(call.jobs)) as update:
                await _wait_in_steps(call, left, update)
        elif call.stack is not None:
            await _wait_in_steps(call, left)
        elif not call.has_future:
            call.wait(left)
        elif left is None:
            await call.future
        else:
            await _wait(call, left)

    def leave(self, call: PendingCall, error: BaseException) -> None:
        """Wait for `call` no longer, because of `error`: its jobs are withdrawn."""
        if isinstance(error, GeneratorExit):
            # The garbage collector's doing, in whichever thread: who takes spans may have locks.
            self._client.abandon(call)
            return
        self._client.forget(call)
        if call.span is not None:
            call.span.end(error)

    def end(self, call: PendingCall, options: CallOptions) -> list[Answer | LmpoolError]:
        """The answers, once that was waited for. Raises as `answers`."""
        is_late = not call.done and self._client.forget(call)  # else it ended at the same moment
        if is_late or call.expired:
            call.failed = None
            call.error = options.deadline.error(
                f"{call.missing} of {len(call.jobs)} answers were not there",
                f"; they were withdrawn ({self._client.pool_for(options.deadline)})",
                PoolTimeout if is_late else JobExpired,
            )
        if call.span is None:
            return answers_of(call)
        try:
            answers = answers_of(call)
        except LmpoolError as error:
            call.span.end(error)
            raise
        call.span.end(next((each for each in answers if isinstance(each, LmpoolError)), None))
        return answers

    def _turn_of(self, loop: asyncio.AbstractEventLoop) -> _Turn:
        now = time.monotonic()
        if self._looks_at.get(loop, -math.inf) < now:
            loop.call_later(LOST_AFTER, self._end_lost, loop)
            self._looks_at[loop] = now + LOST_AFTER
        turn = self._turns.get(loop)
        if turn is None:
            for other in [other for other in list(self._looks_at) if other.is_closed()]:
                self._turns.pop(other, None)  # it was closed before its turn ended
                self._looks_at.pop(other, None)
            # In this order: one that Ctrl-C kept from ending would keep all that join it waiting.
            loop.call_soon(self._end_turn, loop)
            turn = self._turns[loop] = _Turn(loop)
        return turn

    def _end_lost(self, loop: asyncio.AbstractEventLoop) -> None:
        self._latest = None
        self._end_turn(loop)
        self._looks_at.pop(loop, None)  # else its time is over, and the next turn sees to it

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = None
        try:
            turn = self._turns.get(loop)
            if turn is None:
                return
            self._turns.pop(loop, None)  # what a signal's handler asks from here on is another's
            self._latest = None  # another loop's is looked up again
            turn.make_jobs()
            calls = [call for call in turn.calls if not call.is_cancelled]
            if not calls:
                return
            reads = len(calls) == 1 and _may_be_read(calls[0]) and can_hear(loop)
            if self._client.submit(calls, reads=reads):
                self._client.read_in(loop, calls[0])
        except BaseException as error:  # Ctrl-C, too, after which the loop may run on
            self._latest = None
            if turn is None or self._turns.get(loop) is turn:
                turn = self._turns.pop(loop, turn)
            failure = error if isinstance(error, LmpoolError) else LmpoolError(said(error))
            self._client.fail([] if turn is None else turn.calls, failure)
            if failure is not error:
                raise


def _may_be_read(call: PendingCall) -> bool:
    """Whether who asks this by itself may read the answer."""
    return type(call) is LoneCall and call.stack is None


async def _wait(call: PendingCall, timeout: float) -> None:
    """Wait until `call` is done, or `timeout` seconds went by."""
    # A timer costs less than asyncio.timeout, and nobody has to be cancelled.
    loop = asyncio.get_running_loop()
    timer = loop.call_later(timeout, never_lost(loop, call._wake), None)
    try:
        await call.future
    finally:
        timer.cancel()


async def _wait_in_steps(
    call: PendingCall, timeout: float | None, update: Callable[[int], None] | None = None
) -> None:
    """Wait until `call` is done, or `timeout` seconds went by; meanwhile rows that came are taken
    in by what takes them, and a bar is told how many answers are there."""
    end = None if timeout is None else time.monotonic() + timeout

    def goes_on() -> bool:
        return call.error is None and (end is None or time.monotonic() < end)

    while True:
        if call.stack is not None:
            call.stack.take_in(goes_on)
        if update is not None:
            update(len(call.jobs) - call.left)
        left = None if end is None else end - time.monotonic()
        if call.done or (left is not None and left <= 0):
            return
        if update is not None:
            left = BAR_EVERY if left is None else min(BAR_EVERY, left)
        if not call.has_future:
            call.wait(left)
            continue
        if left is None:
            await call.future
        else:
            await _wait(call, left)
        if not call.done:
            call.for_loop(call.future.get_loop())


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields a function that takes how many answers are there."""
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="prompt") as bar:

        def update(done: int) -> None:
            bar.update(done - bar.n)

        yield update


def _kept(given: Answer | LmpoolError | None, error: LmpoolError | None) -> object:
    """What stands in one place of a call that ended with `error`, or with none."""
    if given is None:
        return error
    if type(given) is JobExpired and isinstance(error, PoolTimeout):
        return JobExpired(*error.args)
    return given


def answers_of(call: PendingCall) -> list[Answer | LmpoolError]:
    """What became of a call that is done."""
    error = call.error
    # Several callers may share one error: each has its own.
    if not call.keeps_errors:
        if error is not None:
            raise error.of(call.failed)
        return cast("list[Answer | LmpoolError]", call.answers)
    found = [_kept(given, error) for given in call.answers]
    return [
        given.of(place) if isinstance(given, LmpoolError) else cast(Answer, given)
        for place, given in enumerate(found)
    ]
