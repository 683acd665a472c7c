"""What a worker's threads share: how it fares, and whether it is to stop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import msgpack

from lmpool.affinity import LEAST_PATIENCE, patience
from lmpool.checks import words
from lmpool.clock import ServerClock
from lmpool.counters import OWN, STOLEN, TOKENS_ASKED, TOKENS_COMPUTED, Counter
from lmpool.keys import JobStream
from lmpool.worker.batching import Delivery
from lmpool.worker.metrics import Failure, WorkerMetrics

logger = logging.getLogger(__name__)

RATE_WINDOW: Final = 10.0
FAILURES_MOST: Final = 5
"""So many of the latest failures each heartbeat tells: it lies in the server's memory."""
REASON_CHARS: Final = 200


class _Step:
    """`WorkerStatus.step`: one for all, as the engine has one thread."""

    __slots__ = ("_status",)

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def __enter__(self) -> None:
        self._status.step_since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._status.step_since = None


class WorkerStatus:
    """The worker's flags and counters. Any thread may use it."""

    def __init__(self, description: dict[str, Any], on_failure: Callable[[], None]) -> None:
        self.description = description
        self.metrics = WorkerMetrics()
        self.stopping = threading.Event()
        """Set once: claim nothing more, finish the running batch, leave."""
        self.failure: BaseException | None = None
        self.batch_seconds = 0.0
        """How long a batch takes, averaged over the last ones."""
        self.step_since: float | None = None
        """Since when the engine has been at what it is doing, on the monotonic clock."""
        self._pace = (0.0, 0.0, 0.0, 0.0)
        """Of the last batches: prompts, their tokens, those computed, seconds."""
        self.own_jobs = 0
        """Jobs that it took of its own lanes, and `stolen_jobs` of others'."""
        self.stolen_jobs = 0
        self.prompt_tokens = 0
        """Of the prompts that an engine was given which tells what it computes, and
        `computed_tokens` what it did."""
        self.computed_tokens = 0
        self.visited: set[str] = set()
        """Streams that it has taken jobs of: own lanes, which may be others' later, and others'."""
        self.held: set[tuple[str, bytes]] = set()
        """Entries, by stream and id, that this worker took and has not acknowledged."""
        self.clock = ServerClock()
        self._step = _Step(self)
        self._on_failure = on_failure
        self._recent: deque[tuple[float, int]] = deque()
        self._taken: deque[tuple[float, int, int]] = deque()
        """Own and stolen jobs as of the last heartbeats, and when that was."""
        self._failures: deque[dict[str, Any]] = deque(maxlen=FAILURES_MOST)
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """A thread cannot go on, and so the worker cannot."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        try:
            logger.error("the worker cannot go on: %s", words(error), exc_info=error)
        finally:
            self._on_failure()  # also where there is no memory to say so

    def step(self) -> AbstractContextManager[None]:
        """While the engine works: the watchdog looks how long."""
        return self._step

    def let_go(self, jobs: Iterable[Delivery]) -> None:
        """These are acknowledged, or given back."""
        for delivery in jobs:
            self.held.discard(delivery.place)
            if delivery.settled is not None:
                delivery.settled.set()

    def end_batch(self, rows: int, took: float) -> None:
        """The engine is done with a batch, or a step of one, in `took` seconds; it gave `rows`."""
        now = time.monotonic()
        self.metrics.compute.add(took)
        self.batch_seconds += (took - self.batch_seconds) * (0.25 if self.batch_seconds else 1.0)
        with self._lock:
            self._recent.append((now, rows))
            self._forget(now)

    def note_pace(self, prompts: int, tokens: int, computed: int, took: float) -> None:
        """The engine began prompts of so many tokens, and computed so many in `took` seconds."""
        a, b, c, d = self._pace
        self._pace = (
            0.75 * a + prompts,
            0.75 * b + tokens,
            0.75 * c + computed,
            0.75 * d + took,
        )

    def note_tokens(self, tokens: int, computed: int) -> None:
        """Of prompts of so many tokens, so many were computed. Of the engine's thread."""
        self.prompt_tokens += tokens
        self.computed_tokens += computed

    def counts(self) -> dict[Counter, int]:
        """What the pool counts of its workers' lanes and prefixes, since this worker began."""
        return {
            OWN: self.own_jobs,
            STOLEN: self.stolen_jobs,
            TOKENS_ASKED: self.prompt_tokens,
            TOKENS_COMPUTED: self.computed_tokens,
        }

    def patience(self) -> float:
        """Seconds after which a waiting job is anyone's, as this worker estimates."""
        prompts, tokens, computed, took = self._pace
        if not prompts or not computed:
            return LEAST_PATIENCE
        return patience(tokens / prompts, took / computed)

    def stole(self, found: Iterable[tuple[JobStream, Sequence[object]]]) -> None:
        """It took jobs of others' lanes."""
        self.stolen_jobs += sum(len(entries) for _, entries in found)

    def rows_per_second(self) -> float:
        """Rows a second over the last ten seconds."""
        with self._lock:
            self._forget(time.monotonic())
            return sum(rows for _, rows in self._recent) / RATE_WINDOW

    def note_failure(self, failure: Failure, reason: str) -> None:
        """A job ended in an error. Those that fail alike, one after another, are told as one."""
        reason = reason[:REASON_CHARS]
        with self._lock:
            self.metrics.failures[failure] += 1
            alike = bool(self._failures) and self._failures[-1]["reason"] == reason
            jobs = self._failures.pop()["jobs"] if alike else 0
            at = self.clock.now_ms() / 1000
            self._failures.append({"at": at, "reason": reason, "jobs": jobs + 1})

    def heartbeat(self, lanes: int = 0) -> bytes:
        """What the heartbeat key holds of the home of so many lanes."""
        beat = {
            **self.description,
            "rows_per_second": round(self.rows_per_second(), 1),
            "lanes": lanes,
            **{counter.field: count for counter, count in self.counts().items()},
        }
        with self._lock:
            beat["stolen_per_second"] = round(self._stolen_per_second(), 1)
            if self._failures:
                beat["failures"] = list(self._failures)
        # Reasons, and what an engine says of itself, may quote paths that are no UTF-8.
        packed: bytes = msgpack.packb(beat, unicode_errors="backslashreplace")
        return packed

    def _stolen_per_second(self) -> float:
        """Since the first heartbeat of the last ten seconds."""
        now = time.monotonic()
        self._taken.append((now, self.own_jobs, self.stolen_jobs))
        while now - self._taken[0][0] > RATE_WINDOW:
            self._taken.popleft()
        began, _, before = self._taken[0]
        return (self.stolen_jobs - before) / (now - began) if now > began else 0.0

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > RATE_WINDOW:
            self._recent.popleft()
