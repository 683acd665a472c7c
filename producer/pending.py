"""A caller's wait for answers, from a thread or from an event loop."""

from __future__ import annotations

import asyncio
import threading
from asyncio.events import _get_running_loop
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from lmpool.errors import JobExpired, LmpoolError
from lmpool.keys import Priority
from lmpool.model_info import ModelInfo
from lmpool.producer.stacking import STACKED, Taking
from lmpool.producer.waits import Event, never_lost
from lmpool.rows import EncodedRow
from lmpool.tracing import CallSpan
from lmpool.wants import Answer
from lmpool.wire import Job


class PendingCall:
    """One caller's wait for the answers to its jobs.

    Filled by the client's threads under the client's lock. `deadline` is on the monotonic clock;
    `info` is the model that the jobs were made for.
    """

    __slots__ = (
        "_asleep", "_event", "_future", "answers", "called_away", "deadline", "error", "failed",
        "info", "jobs", "keeps_errors", "left", "placed", "priority", "span", "stack",
        "trace",
    )  # fmt: skip

    answers: list[Answer | LmpoolError | None]
    jobs: Sequence[Job]

    def __init__(
        self,
        jobs: Sequence[Job],
        deadline: float | None,
        *,
        priority: Priority = "interactive",
        info: ModelInfo | None = None,
        keeps_errors: bool = False,
        trace: str | None = None,
    ) -> None:
        self.jobs = jobs
        self.answers = [None] * len(jobs)
        self.left = len(jobs)
        self.priority: Priority = priority
        self.span: CallSpan | None = None
        """To be ended with the call."""
        self.trace = trace
        """The traceparent of its span, where it has one."""
        self.stack: Taking | None = None
        """What takes its rows as they come: who waits is woken for those, too."""
        self.placed = 0
        """How many of its rows it asked for first."""
        self.info = info
        self.keeps_errors = keeps_errors
        """Whether a job's error stands where its answer would, and ends nothing else."""
        self.deadline = deadline
        self.error: LmpoolError | None = None
        self.failed: int | None = None
        """Which job `error` is about, if it is about one."""
        self._future: asyncio.Future[None] | None = None
        self._event: Event | None = None
        self.called_away: Callable[[], object] | None = None
        """Wakes its thread, where that waits for something else."""
        self._asleep: threading.Lock | None = None
        """Held until the call is done, by nobody in particular: an event would take three locks."""

    @property
    def done(self) -> bool:
        """Whether every answer is there, or an error."""
        return self.left == 0 or self.error is not None

    @property
    def expired(self) -> bool:
        """Whether a worker was the first to see that its time is over."""
        if self.error is not None:
            return isinstance(self.error, JobExpired)
        return self.keeps_errors and JobExpired in map(type, self.answers)

    @property
    def missing(self) -> int:
        """How many answers are not there, those included that a worker saw to be late."""
        return self.left + [*map(type, self.answers)].count(JobExpired)

    def take(self, place: int, answer: Answer) -> bool:
        """A job's answer is there. Whether who waits is to be woken: the call is done by that, or
        there is something to be taken in. Under the client's lock."""
        if self.answers[place] is not None:
            return False
        is_first = False
        if self.stack is not None and self.stack.takes(answer):
            is_first = self.stack.land(place, cast(EncodedRow, answer))
            answer = STACKED
        self.answers[place] = answer
        self.left -= 1
        return is_first or self.left == 0

    def fail(self, place: int, error: LmpoolError) -> bool:
        """A job failed. Whether the call is done by that. Under the client's lock."""
        if self.done or self.answers[place] is not None:
            return False
        if self.keeps_errors:
            self.answers[place] = error
            self.left -= 1
            return self.left == 0
        self.failed, self.error = place, error
        return True

    def for_event(self, event: Event) -> PendingCall:
        """Prepare to be waited for among others, by a thread that waits for `event`."""
        self._event = event
        return self

    def for_thread(self) -> PendingCall:
        """Prepare to be waited for by a thread."""
        self._asleep = threading.Lock()
        self._asleep.acquire()
        return self

    def for_loop(self, loop: asyncio.AbstractEventLoop) -> PendingCall:
        """Prepare to be awaited in `loop`."""
        self._future = loop.create_future()
        return self

    def wait(self, timeout: float | None) -> bool:
        """Block until done; False when `timeout` seconds went by first."""
        assert self._asleep is not None
        return self.done or self._asleep.acquire(timeout=-1 if timeout is None else timeout)

    @property
    def is_left(self) -> bool:
        """Whether nobody can wait for it any more: its event loop was closed."""
        return self._future is not None and self._future.get_loop().is_closed()

    @property
    def is_cancelled(self) -> bool:
        """Whether the task that awaits it was cancelled, which will say so soon."""
        return self._future is not None and self._future.cancelled()

    @property
    def has_future(self) -> bool:
        """Whether it was prepared to be awaited."""
        return self._future is not None

    @property
    def future(self) -> asyncio.Future[None]:
        """Done when the call is (only in the loop it was prepared for)."""
        assert self._future is not None
        return self._future

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class LoneCall(PendingCall):
    """The same of one job, without lists: of those that wait by the thousand each holds little,
    which the garbage collector goes through again and again. Its job may be made after it.
    """

    __slots__ = ("_answer", "_job")

    def __init__(
        self,
        job: Job | None,
        deadline: float | None,
        priority: Priority,
        info: ModelInfo | None,
        keeps_errors: bool = False,
        trace: str | None = None,
    ) -> None:
        self._job = job
        self._answer: Answer | LmpoolError | None = None
        self.left = 1
        self.priority = priority
        self.span = None
        self.trace = trace
        self.stack = None
        self.placed = 0
        self.info = info
        self.keeps_errors = keeps_errors
        self.deadline = deadline
        self.error = None
        self.failed = None
        self._future = None
        self._event = None
        self.called_away = None
        self._asleep = None

    def give(self, job: Job) -> None:
        """The job, for a call that was made before it."""
        self._job = job

    @property
    def jobs(self) -> Sequence[Job]:  # type: ignore[override]
        """The one job, once there is one."""
        return () if self._job is None else (self._job,)

    @property
    def answers(self) -> list[Answer | LmpoolError | None]:  # type: ignore[override]
        """Its answer, as it is now."""
        return [self._answer]

    def take(self, place: int, answer: Answer) -> bool:
        if self._answer is not None:
            return False
        self._answer = answer
        self.left = 0
        return True

    def fail(self, place: int, error: LmpoolError) -> bool:
        if self.done:
            return False
        if self.keeps_errors:
            self._answer = error
            self.left = 0
        else:
            self.failed, self.error = place, error
        return True


def wake(calls: Iterable[PendingCall]) -> None:
    """Wake whoever waits for these calls: one crossing for each event loop but this thread's."""
    loops: dict[asyncio.AbstractEventLoop, list[PendingCall]] = {}
    for call in calls:
        called_away = call.called_away
        if called_away is not None:
            called_away()
        if call._asleep is not None:
            try:
                call._asleep.release()
            except RuntimeError:
                pass  # woken before
        elif call._event is not None:
            call._event.set()
        elif call._future is not None:
            loop = call._future.get_loop()
            if loop is _get_running_loop():
                call._wake()
            else:
                loops.setdefault(loop, []).append(call)
    for loop, waiting in loops.items():
        try:
            loop.call_soon_threadsafe(never_lost(loop, _wake_all, waiting), None)
        except RuntimeError:
            if not loop.is_closed():  # else nobody is left who waits
                raise


def _wake_all(calls: list[PendingCall]) -> None:
    for call in calls:
        call._wake()
