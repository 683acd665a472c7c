"""When a batch leaves: full, or `timeout` after its first job, or at `max_batch_tokens`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from lmpool.keys import JobStream
from lmpool.wants import Score
from lmpool.wire import Job
from lmpool.worker.baton import Baton, Reader


# Nobody changes one; but there is one for each prompt, and one that is frozen takes longer to make.
@dataclass(slots=True, eq=False)
class Delivery:
    """A job this worker holds: its entry, the stream that it stands in, and when it came.

    One that was delivered before, to a worker that died, has `settled`, which is set once it is
    answered: it is run alone.
    """

    job: Job
    entry: bytes
    stream: JobStream
    came: float
    settled: threading.Event | None = None

    @property
    def place(self) -> tuple[str, bytes]:
        """Which entry of which stream this is."""
        return self.stream.key, self.entry

    @property
    def is_batch_priority(self) -> bool:
        """Whether interactive jobs go before it."""
        return self.stream.priority == "batch"

    @property
    def size(self) -> int:
        """Prompt length in tokens."""
        return len(self.job.tokens) // 4


BATCH_PRIORITY_SHARE: Final = 8
"""One in so many places of a batch belongs to jobs of priority ``batch``, while there are any."""


BEGINNING: Final = 128
"""Bytes in which prompts agree that are compared any further."""
NEARLY: Final = 64
"""Bytes at its end by which a prompt may differ from another and be told at a glance."""


class Batcher:
    """Deliveries that wait for the engine, in the order they came.

    The intake adds and the engine's thread takes. `clock` is monotonic, in seconds. Of a batch's
    prompts of up to `shares_up_to` tokens a common beginning counts once in its tokens.
    """

    def __init__(
        self,
        batch_size: int,
        timeout: float,
        max_batch_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        shares_up_to: int = 0,
    ) -> None:
        self.batch_size = batch_size
        self.timeout = timeout
        self.max_batch_tokens = max_batch_tokens
        self._clock = clock
        self._shares_up_to = shares_up_to
        self._interactive: deque[Delivery] = deque()
        self._batch_priority: deque[Delivery] = deque()
        self._alone: deque[Delivery] = deque()
        self._alone_was_last = False
        self._passed_over = 0
        """Batches in a row that left jobs of priority ``batch`` behind, and took none."""
        self._tokens = 0
        """Of the interactive ones, each counted whole."""
        self._is_full: bool | None = None
        """Whether a batch's tokens are reached; None where they are to be counted."""
        self._closed = False
        self._waits = True
        """Whether the next batch does, for its `timeout`."""
        self.busy = False
        """Whether a batch was taken and is not done."""
        self.busy_since = 0.0
        self.goes_on = False
        """Whether it has taken a step and something of it is under way still."""
        self._lock = threading.RLock()  # reentrant: `wait` takes under it
        self.changed = threading.Condition(self._lock)
        self.baton = Baton(self._lock)

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch_priority)

    def room(self) -> int:
        """How many more jobs the next batch takes, as far as can be told before they are seen.

        Jobs of priority ``batch`` take no room from the interactive ones.
        """
        if self._has_all_tokens():
            return 0
        return max(0, self.batch_size - len(self._interactive))

    def room_for_batch_priority(self) -> int:
        """The same of jobs of priority ``batch``."""
        return max(0, min(self.room(), self.batch_size - len(self)))

    def add(self, jobs: Iterable[Delivery], waits: bool = True) -> None:
        """Take jobs in. What is over the budget stays for the batch after.

        Unless the batch `waits` it leaves as soon as the engine is free.
        """
        with self._lock:
            self._waits = self._waits and waits
            tokens = 0
            for job in jobs:
                if job.is_batch_priority:
                    self._batch_priority.append(job)
                else:
                    self._interactive.append(job)
                    tokens += job.size
            self._count(tokens)
            self._tell()

    def put_back(self, jobs: Sequence[Delivery]) -> None:
        """Take jobs in again that were taken and have to wait, before all others."""
        with self._lock:
            for job in reversed(jobs):
                if job.settled is not None:
                    self._alone.appendleft(job)
                elif job.is_batch_priority:
                    self._batch_priority.appendleft(job)
                else:
                    self._interactive.appendleft(job)
                    self._count(job.size)
            self._tell()

    def _count(self, tokens: int) -> None:
        """So many more wait, or fewer. Locked."""
        self._tokens += tokens
        self._is_full = None

    def _has_all_tokens(self) -> bool:
        """Whether as many tokens wait as a batch takes."""
        if self._tokens < self.max_batch_tokens:
            return False
        if not self._shares_up_to:
            return True
        with self._lock:
            if self._is_full is None:
                budget = self._budget()
                waiting = islice(self._interactive, self.batch_size)
                self._is_full = not all(map(budget.takes, waiting)) or budget.left <= 0
            return self._is_full

    def _budget(self) -> Budget:
        """A batch's tokens, of which none are spent."""
        return Budget(self.max_batch_tokens, self.batch_size, self._shares_up_to)

    def add_alone(self, delivery: Delivery) -> None:
        """Take in a job that is to be the only one of its batch."""
        with self._lock:
            self._alone.append(delivery)
            self._tell()

    def _tell(self) -> None:
        """There is something for the engine's thread. Locked."""
        self.changed.notify_all()
        self.baton.ring()

    def alone_is_next(self) -> bool:
        """Whether a job to be run alone has its turn: every other batch, at most, is such a job."""
        return bool(self._alone and not (self._alone_was_last and len(self)))

    def due_in(self) -> float | None:
        """Seconds until a batch leaves: 0 when one is ready, None while there is no job."""
        with self._lock:  # the engine may take the last of them meanwhile
            if self.alone_is_next():
                return 0.0
            if not (self._interactive or self._batch_priority):
                return None
            if not self._waits:
                return 0.0
            if len(self) >= self.batch_size or self._has_all_tokens():
                return 0.0
            came = min(jobs[0].came for jobs in (self._interactive, self._batch_priority) if jobs)
            return max(0.0, came + self.timeout - self._clock())

    def take(self, most: int | None = None) -> list[Delivery]:
        """The next batch's jobs now, ready or not; `most` narrows `batch_size`."""
        limit = self.batch_size if most is None else min(most, self.batch_size)
        batch: list[Delivery] = []
        budget, taken = self._budget(), 0
        with self._lock:
            self._alone_was_last = self.alone_is_next()
            if self._alone_was_last:
                batch.append(self._alone.popleft())
                limit = 1
            # Jobs of priority batch have a share of each batch all the same, and first what the
            # interactive ones leave of it: neither kind starves.
            share = (
                limit - max(1, limit // BATCH_PRIORITY_SHARE)
                if self._batch_priority and limit > 1
                else limit
            )
            # Where the others fill the batch, by its size or by its tokens, they take turns.
            turn = self._passed_over >= BATCH_PRIORITY_SHARE - 1
            for jobs, most_of_it in (
                (self._batch_priority, min(limit, 1) if turn else 0),
                (self._interactive, share),
                (self._batch_priority, limit),
                (self._interactive, limit),
            ):
                while jobs and len(batch) < most_of_it:
                    if not budget.takes(jobs[0], anyway=not batch):
                        break
                    delivery = jobs.popleft()
                    batch.append(delivery)
                    if not delivery.is_batch_priority:
                        taken += delivery.size
            self._count(-taken)
            if not self._batch_priority or any(delivery.is_batch_priority for delivery in batch):
                self._passed_over = 0
            elif batch and not self._alone_was_last:
                self._passed_over += 1
            if batch:
                self._waits = True
                # In the same step: a reader must not take the worker for idle in between.
                if not self.busy:
                    self.busy, self.busy_since = True, self._clock()
                self.changed.notify_all()
                if self._interactive or self._batch_priority:
                    self.baton.call_back()
        return batch

    def stepped(self) -> float:
        """A piece of work on what was taken is done; the seconds it took."""
        with self._lock:
            began, self.busy_since = self.busy_since, self._clock()
            return self.busy_since - began

    def goes_on_after_step(self) -> None:
        """Of what was taken something is under way still: there may be room for more meanwhile."""
        with self._lock:
            if not self.goes_on:
                self.goes_on = True
                self.baton.call_back()

    def running_for(self) -> float:
        """Seconds since the engine began the piece of work that it is at."""
        return self._clock() - self.busy_since

    def done(self) -> None:
        """What was taken is computed."""
        with self._lock:
            self.busy = self.goes_on = False
            self.changed.notify_all()

    def lend(self, reader: Reader, ended: threading.Event) -> None:
        """Sleep while the engine's thread reads in the intake's place, once it is done with what it
        has: for the intake."""
        with self._lock:
            # What waits for what runs may have to be given back, if that takes long.
            if not self.goes_on and not (self.busy and len(self)) and not ended.is_set():
                self.changed.notify_all()
                self.baton.pass_on(reader)

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> list[Delivery]:
        """Block until a batch is due and take it; nothing once closed or `interrupted`.

        Whoever makes `interrupted` true calls `wake`. Where the baton is the engine's it reads.
        """
        while True:
            with self._lock:
                reads = None
                while not self._closed and not interrupted():
                    due = self.due_in()
                    if due == 0.0:
                        return self.take()
                    if due is not None:
                        self.baton.call_back()  # there may be more to fill the batch with
                    elif reads := self.baton.take():
                        break
                    self.changed.wait(due)
            if reads is None:
                return []
            reader, bell = reads
            keeps = False
            try:
                keeps = reader.read_for_engine(bell)
            finally:
                self.baton.put_down(keeps)

    def give_up(self) -> list[Delivery]:
        """The jobs that wait for the running batch to end, which wait here no longer."""
        with self._lock:
            if not self.busy:
                return []  # the next batch is about to leave
            left = [*self._interactive, *self._batch_priority]
            self._interactive.clear()
            self._batch_priority.clear()
            self._count(-self._tokens)
            self.changed.notify_all()
        return left

    def take_out(self, unwanted: Callable[[Delivery], bool]) -> list[Delivery]:
        """The jobs that wait here and are `unwanted`, which wait here no longer."""
        left: list[Delivery] = []
        with self._lock:
            for jobs in (self._alone, self._interactive, self._batch_priority):
                kept = [job for job in jobs if not unwanted(job)]
                left += [job for job in jobs if unwanted(job)]
                jobs.clear()
                jobs.extend(kept)
            self._count(sum(job.size for job in self._interactive) - self._tokens)
            self.changed.notify_all()
        return left

    def wake(self) -> None:
        """Let whoever waits look again."""
        with self._lock:
            self.changed.notify_all()
            self.baton.call_back()

    def close(self) -> list[Delivery]:
        """End every wait; returns the jobs that were still waiting."""
        with self._lock:
            self._closed = True
            left = [*self._alone, *self._interactive, *self._batch_priority]
            self._alone.clear()
            self._batch_priority.clear()
            self._interactive.clear()
            self._count(-self._tokens)
            self.changed.notify_all()
            self.baton.call_back()
        return left


class Budget:
    """The tokens of one batch. A prompt of up to `shares_up_to` takes those that it does not share
    with the latest one in the batch which begins like it: there are never more to be computed."""

    def __init__(self, tokens: int, prompts: int, shares_up_to: int) -> None:
        self.left = tokens
        # A batch of prompts that are all shorter is within its tokens in any case.
        self._short = tokens // prompts
        self._shares_up_to = shares_up_to
        self._latest: dict[tuple[str | None, bytes], bytes] = {}
        """By adapter and beginning."""

    def takes(self, delivery: Delivery, *, anyway: bool = False) -> bool:
        """Whether there is enough left for it, which is then spent; `anyway` it need not be."""
        weight = size = delivery.size
        job, latest = delivery.job, None
        # Of a text each position is computed that is scored, had it been computed before or not.
        if self._short < size <= self._shares_up_to and not isinstance(job.want, Score):
            latest = (job.adapter, job.tokens[:BEGINNING])
            before = self._latest.get(latest)
            if before is not None:
                weight -= _shared_tokens(before, job.tokens)
        if weight > self.left and not anyway:
            return False
        self.left -= weight
        if latest is not None:
            self._latest[latest] = job.tokens
        return True


def _shared_tokens(first: bytes, second: bytes) -> int:
    """How many tokens two prompts begin with alike; some less where they differ at the end."""
    near = len(second) - NEARLY
    if 0 < near <= len(first) and second.startswith(first[:near]):
        return near // 4
    size = min(len(first), len(second)) // 4
    other = np.frombuffer(first, np.uint32, size) != np.frombuffer(second, np.uint32, size)
    return int(other.argmax()) if other.any() else size
