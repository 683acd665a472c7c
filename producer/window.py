"""Asking without end in bounded memory: a window that moves over the asks as answers are taken."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Generic, TypeVar, cast

from lmpool.checks import as_integer, quoted
from lmpool.errors import (
    ClientClosed,
    JobExpired,
    LmpoolError,
    PoolMismatch,
    PoolTimeout,
    SettingsError,
    UnknownAdapter,
)
from lmpool.model_info import ModelInfo
from lmpool.producer.asks import Ask
from lmpool.producer.blocking import is_blocking, running_loop
from lmpool.producer.call_options import CallOptions
from lmpool.producer.caller import answers_of
from lmpool.producer.client import Client
from lmpool.producer.pending import LoneCall, PendingCall
from lmpool.producer.waits import Event, never_lost
from lmpool.tracing import CallSpan, active, begin_call
from lmpool.wants import Answer
from lmpool.wire import Job

GivenT = TypeVar("GivenT")

TOGETHER: Final = 64
"""Asks that leave as one request, unless they are slow to come."""
SLOW: Final = 0.005
"""Seconds after which those leave that have come, and an event loop is given back."""
IN_FLIGHT_MOST: Final = 1 << 20


@dataclass(slots=True, eq=False)
class _Asked:
    """One ask that was read: its call, or the error that it ended with before there was one."""

    number: int
    ask: Ask
    options: CallOptions
    call: PendingCall | None = None
    error: LmpoolError | None = None

    @property
    def done(self) -> bool:
        return self.call is None or self.call.done


class Window(Generic[GivenT]):
    """The asks of one iterator that are under way, at most `in_flight` of them.

    `options` begins an ask's time, `job` makes its job, `alone` asks once more of a pool or an
    adapter that was replaced, `hand_out` is how a caller gets an answer.
    """

    def __init__(
        self,
        client: Client,
        asks: Iterator[Ask],
        in_flight: int,
        ordered: bool,
        options: Callable[[], CallOptions],
        job: Callable[[Ask, CallOptions], Awaitable[tuple[ModelInfo, Job]]],
        alone: Callable[[Ask, CallOptions], Awaitable[Answer]],
        hand_out: Callable[[Answer, CallOptions], Awaitable[GivenT]],
    ) -> None:
        most = as_integer(in_flight)
        if most is None or not 1 <= most <= IN_FLIGHT_MOST:
            raise SettingsError(
                f"in_flight={quoted(in_flight)}: write an integer from 1 to {IN_FLIGHT_MOST}"
            )
        if type(ordered) is not bool:
            raise SettingsError(f"ordered={quoted(ordered)}: write True or False")
        self._keeps_errors = options().keeps_errors
        self._client = client
        self._asks = asks
        self._most = most
        self._ordered = ordered
        self._options = options
        self._job = job
        self._alone = alone
        self._hand_out = hand_out
        self._under_way: deque[_Asked] = deque()
        self._read = 0
        self._exhausted = False
        self._slow = 0.0
        """Seconds that the last asks took to come, if that was long."""
        self._suspended = time.monotonic()
        self._event = Event()
        self._woken: asyncio.Future[None] | None = None
        self._span: CallSpan | None = None
        self._began = False
        """Whether the call is known to whoever takes spans."""

    async def next(self) -> tuple[int, GivenT | LmpoolError] | None:
        """The next answer with its ask's number; None after the last."""
        if not is_blocking() and time.monotonic() - self._suspended > SLOW:
            await asyncio.sleep(0)  # the loop has others to run, also where nothing is waited for
            self._suspended = time.monotonic()
        while True:
            asked = self._take_done()
            if asked is not None:
                return asked.number, await self._outcome(asked)
            if self._exhausted or len(self._under_way) == self._most:
                if not self._under_way:
                    self._end_span(None)
                    return None
                await self._wait(None)
            elif self._under_way and self._slow:
                # Those that are under way have as long as the asks took that came last.
                await self._wait(self._slow)
                self._slow = 0.0
            else:
                await self._read_more()

    def close(self) -> None:
        """Withdraw what is under way."""
        self._end_span(None)
        while self._under_way:
            call = self._under_way.popleft().call
            if call is not None:
                self._client.let_go(call)

    # --- asks ----------------------------------------------------------------------------------

    async def _read_more(self) -> None:
        """Read asks and send them, until some were read or they are slow to come."""
        began = time.monotonic()
        calls: list[PendingCall] = []
        room = min(TOGETHER, self._most - len(self._under_way))
        try:
            while len(calls) < room and time.monotonic() - began < SLOW:
                ask = next(self._asks, None)
                if ask is None:
                    self._exhausted = True
                    break
                call = await self._begin(ask)
                if call is None:
                    break  # it has ended already
                calls.append(call)
        finally:
            took = time.monotonic() - began
            self._slow = took if took >= SLOW else 0.0
            if calls:
                self._client.submit(calls)

    async def _begin(self, ask: Ask) -> PendingCall | None:
        """Make the call of an ask; None where it failed before anything was sent."""
        number, options = self._read, self._options()
        self._read += 1
        asked = _Asked(number, ask, options)
        self._under_way.append(asked)
        try:
            info, job = await self._job(ask, options)
        except LmpoolError as error:
            asked.error = error
            return None
        # What the caller gave may be another by the time that it is asked again.
        asked.ask = replace(ask, token_ids=job.token_ids())
        if not self._began and active():
            self._began, pool = True, self._client.options.pool
            self._span = begin_call(pool, info.model, [job], "lmpool ask_iter")
        trace = None if self._span is None else self._span.traceparent
        call: PendingCall = LoneCall(job, options.deadline.at, options.priority, info, trace=trace)
        asked.call = call
        if is_blocking():
            return call.for_event(self._event)
        loop = running_loop()
        call.for_loop(loop).future.add_done_callback(never_lost(loop, self._wake))
        return call

    # --- answers -------------------------------------------------------------------------------

    def _take_done(self) -> _Asked | None:
        """The first that is done, or whose time is over."""
        self._event.clear()  # before they are looked at: what ends from now on is waited for
        for place, asked in enumerate(self._candidates()):
            if asked.done:
                del self._under_way[place]
                return asked
        # Those that were asked first have the least time left.
        if self._under_way and self._under_way[0].options.deadline.left() == 0.0:
            asked = self._under_way.popleft()
            assert asked.call is not None
            self._client.forget(asked.call)
            if asked.call.left:  # else its answer came at the same moment
                asked.call, asked.error = None, self._overdue(asked)
            return asked
        return None

    def _candidates(self) -> Iterator[_Asked]:
        """Those that may be yielded next."""
        return islice(self._under_way, 1) if self._ordered else iter(self._under_way)

    async def _wait(self, seconds: float | None) -> None:
        """Wait until one is done, or the first one's time is over, or so many seconds."""
        ends = (seconds, self._under_way[0].options.deadline.left())
        left = min((end for end in ends if end is not None), default=None)
        if is_blocking():
            self._event.wait(left)
            return
        loop = running_loop()
        woken = self._woken = loop.create_future()
        timer = None if left is None else loop.call_later(left, never_lost(loop, self._wake), None)
        try:
            if not any(asked.done for asked in self._candidates()):
                await woken
        finally:
            self._woken = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _outcome(self, asked: _Asked) -> GivenT | LmpoolError:
        """What became of one: its answer, or its error, which is raised unless errors are kept."""
        try:
            return await self._hand_out(await self._answer(asked), asked.options)
        except LmpoolError as error:
            if self._keeps_errors and not isinstance(error, ClientClosed):
                return error.of(asked.number)
            self._end_span(error)
            raise error.of(asked.number) from None

    def _end_span(self, error: LmpoolError | None) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.asked(self._read)
            span.end(error)

    async def _answer(self, asked: _Asked) -> Answer:
        if asked.error is not None:
            raise asked.error
        assert asked.call is not None
        try:
            (answer,) = answers_of(asked.call)
        except JobExpired:
            raise self._overdue(asked, JobExpired) from None
        except (PoolMismatch, UnknownAdapter):
            return await self._alone(asked.ask, asked.options)
        return cast(Answer, answer)  # a call that keeps no errors raises them

    def _overdue(self, asked: _Asked, kind: type[PoolTimeout] = PoolTimeout) -> PoolTimeout:
        deadline = asked.options.deadline
        withdrawn = f"; it was withdrawn ({self._client.pool_for(deadline)})"
        return deadline.error("the answer was not there", withdrawn, kind)
