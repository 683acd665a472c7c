"""The one thread that owns the engine: loads it, feeds it, hands out what it computed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

import redis.exceptions

from lmpool.backends.engine import Engine, Outcome, Part, Request
from lmpool.checks import words
from lmpool.clock import ServerClock
from lmpool.errors import EngineBroken, PromptFailed
from lmpool.keys import COUNTERS_TTL_MS, GROUP
from lmpool.scripts import script
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.worker.adapters import Adapters
from lmpool.worker.batching import Batcher, Delivery
from lmpool.worker.by_stream import by_shard, counted, digest_and_entry, stream_of
from lmpool.worker.pieces import Tellings
from lmpool.worker.publishing import Done, Finished, Publisher, Told
from lmpool.worker.status import WorkerStatus
from lmpool.worker.traces import LONGEST_MS, BatchTraces

logger = logging.getLogger(__name__)

LONG_WAIT: Final = 0.05
"""Seconds after which a waiting job's callers may have left: ask before it is run."""
REVIEW_SECONDS: Final = 0.25
"""How often an engine is told, between two steps, of callers that have left."""
LONG_BACKLOG_MS: Final = 5_000
"""The same for the time since a job was sent: who leaves in order takes unread jobs along, and of
whoever just died the server knows only after `REPLY_TTL`."""

REGISTRY_PAUSE: Final = 0.05
"""Seconds until a registry that was asked in vain is asked again."""
_NO_OUTCOME: Final = "the engine gave no outcome for this prompt"

T = TypeVar("T")


class EngineLoop:
    """Batches in, outcomes out, with control calls in between."""

    def __init__(
        self,
        engine: Engine,
        batcher: Batcher,
        publisher: Publisher,
        adapters: Adapters,
        servers: Servers,
        clock: ServerClock,
        status: WorkerStatus,
        tellings: Tellings,
        traces: BatchTraces,
    ) -> None:
        self._engine = engine
        self._batcher = batcher
        self._publisher = publisher
        self._adapters = adapters
        self._servers = servers
        self._clock = clock
        self._status = status
        self._metrics = status.metrics
        self._tellings = tellings
        self._traces = traces
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._held: dict[bytes, list[Delivery]] = {}
        self._ended = False
        self._review_due = 0.0
        self._alone = False
        """Whether what is in flight is to have no company."""
        self._begun = (0, 0)
        """Prompts that the engine was given since the last step, and their tokens."""
        self._computed = 0

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on this thread, between two batches; cancelled once it has ended."""
        future: Future[T] = Future()
        self._calls.append((function, future))
        if self._ended:
            self._cancel_calls()
        self._batcher.wake()
        return future

    def run(self) -> None:
        """Serve until the worker stops and what runs is done."""
        try:
            with self._batcher.baton.accepted():
                self._serve()
        finally:
            self._ended = True
            self._cancel_calls()
            self._traces.end_all()

    def _serve(self) -> None:
        while True:
            self._run_calls()
            if self._status.stopping.is_set() and not self._engine.in_flight():
                break
            batch = self._next_batch()
            if batch:
                self._start(self._admit(batch))
            if self._engine.in_flight():
                self._step()
                self._review()
                self._look()
            elif batch:
                self._batcher.done()  # nothing of it had to be run

    def _cancel_calls(self) -> None:
        with suppress(IndexError):  # the thread that ends and one that calls may both be here
            while True:
                self._calls.popleft()[1].cancel()

    def _next_batch(self) -> list[Delivery]:
        running = self._engine.in_flight()
        if self._status.stopping.is_set():
            return []
        if not running:
            batch = self._batcher.wait(lambda: bool(self._calls) or self._status.stopping.is_set())
            self._alone = bool(batch) and batch[0].settled is not None
            return batch
        with self._batcher.changed:  # a job to be run alone must not come between look and take
            if self._alone or self._batcher.alone_is_next():
                return []
            return self._batcher.take(self._batcher.batch_size - running)

    def running(self) -> list[Delivery]:
        """The jobs that the engine has; for once it has ended."""
        return [delivery for held in self._held.values() for delivery in held]

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
                self._look()
            except BaseException as error:
                future.set_exception(error)
                if isinstance(error, EngineBroken):
                    raise

    def _admit(self, batch: list[Delivery]) -> list[Delivery]:
        """Drop what nobody waits for any more, what expired, and what is there already.

        Only jobs that have waited are asked about: for the others it would cost a round trip to
        learn nothing.
        """
        now, now_ms = time.monotonic(), self._clock.now_ms()
        doubtful = [
            delivery
            for delivery in batch
            if now - delivery.came > LONG_WAIT
            or now_ms - delivery.job.sent > LONG_BACKLOG_MS
            or (delivery.job.deadline is not None and delivery.job.deadline <= now_ms)
        ]
        if not doubtful:
            return batch
        dropped: dict[Delivery, str] = {}  # not by entry: two streams may share an id
        try:
            with self._servers.in_step():
                for shard, mine in by_shard(doubtful, stream_of):
                    streams, mine, jobs = counted(mine, stream_of, digest_and_entry)
                    verdicts = script("admit")(
                        self._servers.for_shard(shard),
                        streams,
                        [shard.prefix, GROUP, COUNTERS_TTL_MS, *jobs],
                    )
                    judged = zip(mine, verdicts.decode(), strict=True)
                    dropped |= {delivery: verdict for delivery, verdict in judged if verdict != "r"}
        except (redis.exceptions.RedisError, OSError) as error:
            logger.debug("running jobs without asking who waits: %s", error)
        there = [Done(c, None) for c in batch if dropped.get(c) == "x"]
        if there:
            self._metrics.hit("result", len(there))
            self._publisher.put(there)
        for _ in range([*dropped.values()].count("e")):
            self._status.note_failure("expired", "its deadline passed before it was computed")
        self._status.let_go(delivery for delivery, verdict in dropped.items() if verdict != "x")
        return [delivery for delivery in batch if delivery not in dropped]

    def adapters_in_use(self) -> set[str]:
        """The adapters of the jobs that the engine has."""
        jobs = [held[0].job for held in self._held.values()]
        return {job.adapter for job in jobs if job.adapter is not None}

    def _start(self, batch: list[Delivery]) -> None:
        refused: list[Finished] = []
        waiting: list[Delivery] = []
        unusable: dict[str, str] = {}
        in_use: set[str] | None = None
        started: list[Delivery] = []
        for delivery in batch:
            job = delivery.job
            held = self._held.get(job.digest)
            if held is not None:
                held.append(delivery)  # a second delivery of what is being computed
                self._tellings.follow(delivery)
                self._metrics.hit("flight")
                continue
            if job.adapter is not None:
                if in_use is None:
                    in_use = self.adapters_in_use()
                # Behind one that waits for room all wait, or it might never get any.
                if waiting or not self._adapters.has_room(job.adapter, in_use):
                    waiting.append(delivery)
                    continue
                try:
                    text = self._why_not(job.adapter, unusable, in_use)
                except redis.exceptions.RedisError as error:
                    logger.debug("waiting to know adapter %s: %s", job.adapter, error)
                    time.sleep(REGISTRY_PAUSE)
                    waiting.append(delivery)
                    continue
                if text:
                    refused.append(Done(delivery, None, "unknown_adapter", text))
                    continue
                in_use.add(job.adapter)
            self._held[job.digest] = [delivery]
            started.append(delivery)
        if waiting:
            self._batcher.put_back(waiting)
        if refused:
            self._publisher.put(refused)
        if started:
            begun = self._tellings.begin(started)
            requests = [
                Request(
                    job.digest, job.token_ids(), job.adapter, job.want, begun.get(job.digest, ())
                )
                for job in [delivery.job for delivery in started]
            ]
            self._note(started)
            prompts, tokens = self._begun
            self._begun = (prompts + len(started), tokens + sum([d.size for d in started]))
            with self._status.step():
                self._engine.submit(requests)
            self._look()

    def _look(self) -> None:
        """What a scraper is to see of the engine."""
        if self._metrics.on:
            self._metrics.running = self._engine.in_flight()
            self._metrics.engine = self._engine.measures()

    def _note(self, started: Sequence[Delivery]) -> None:
        if self._metrics.on:
            # Clocks differ, and anybody may write a job.
            now_ms = self._clock.now_ms()
            waited = [min(max(0, now_ms - d.job.sent), LONGEST_MS) / 1000 for d in started]
            self._metrics.begin(waited, sum(delivery.size for delivery in started))
        self._traces.begin(started, self._clock.now_ms)

    def _why_not(self, adapter: str, unusable: dict[str, str], in_use: set[str]) -> str:
        """Why an adapter cannot be used ('' if it can), found out once a batch."""
        if adapter not in unusable:
            try:
                self._adapters.ensure(adapter, in_use)
                unusable[adapter] = ""
            except EngineBroken:
                raise
            except Exception as error:  # a registry or a folder that holds nonsense
                if isinstance(error, redis.exceptions.RedisError) and is_lost(error):
                    raise  # the server was asked in vain: that says nothing of the adapter
                unusable[adapter] = words(error) or type(error).__name__
        return unusable[adapter]

    def _step(self) -> None:
        with self._status.step():
            outcomes = self._engine.step()
            parts = self._engine.parts()
        # A step, not all that is in flight: between two tokens of continuations there is room for
        # other prompts, and the intake must know when.
        took = self._batcher.stepped()
        self._status.end_batch(len(outcomes), took)
        self._note_pace(took)
        if parts:
            self._tell(parts)
        idle = not self._engine.in_flight()
        finished = self._finish(outcomes)
        if idle and self._held:
            logger.error("the engine gave no outcome for %d requests", len(self._held))
            forgotten = PromptFailed(_NO_OUTCOME)
            finished += self._finish([Outcome(asked, error=forgotten) for asked in self._held])
        at_leisure = idle and not len(self._batcher)
        begun = bool(finished) and self._publisher.put(finished, at_leisure)
        if idle:
            self._batcher.done()
        else:
            self._batcher.goes_on_after_step()
        if begun:
            self._publisher.end()

    def _note_pace(self, took: float) -> None:
        prompts, tokens = self._begun
        self._begun = (0, 0)
        computed = self._engine.measures().computed_tokens
        # Where it cannot tell, none of them were kept.
        new = tokens if computed is None else max(0, computed - self._computed)
        self._computed = computed or 0
        self._status.note_pace(prompts, tokens, new, took)
        if computed is not None:
            self._status.note_tokens(tokens, new)

    def _tell(self, parts: Sequence[Part]) -> None:
        """Tell what was drawn of continuations that go on; end those that others draw."""
        self._publisher.tell(self._tellings.of(parts))
        lost = self._tellings.lost()
        if lost:
            for digest in lost:
                self._tellings.end(digest)
                # Not acknowledged: found again if whoever is faster does not end it.
                self._status.let_go(self._held.pop(digest))
            with self._status.step():
                self._engine.cancel(lost)
            self._traces.end(lost)

    def _review(self) -> None:
        """End what nobody waits for any more, between two steps of what the engine has."""
        now = time.monotonic()
        if now < self._review_due or not self._held:
            return
        self._review_due = now + REVIEW_SECONDS
        running = self.running()
        dropped = set(running) - set(self._admit(running))
        if not dropped:
            return
        ended = []
        for digest, held in list(self._held.items()):
            left = [delivery for delivery in held if delivery not in dropped]
            if left:
                self._held[digest] = left
            else:
                del self._held[digest]
                self._tellings.end(digest)
                ended.append(digest)
        logger.debug("ended %d requests that nobody waits for", len(ended))
        with self._status.step():
            self._engine.cancel(ended)
        self._traces.end(ended)
        if not self._engine.in_flight():
            self._batcher.done()

    def _finish(self, outcomes: Sequence[Outcome]) -> list[Finished]:
        self._traces.end_of(outcomes)
        finished: list[Finished] = []
        for outcome in outcomes:
            held = self._held.pop(outcome.id, None)
            if held is None:
                logger.error("the engine gave an outcome for an unknown request: dropped")
                continue
            telling = self._tellings.end(outcome.id)
            # Others of the same job end as it does, also where its answer cannot be stored.
            for delivery in held:
                told = None if telling is None else Told(delivery, outcome, telling)
                finished.append(told or (delivery, outcome))
        return finished


def spawn(name: str, target: Callable[[], None], status: WorkerStatus) -> threading.Thread:
    """A started thread whose failure ends the worker."""

    def guarded() -> None:
        try:
            target()
        except BaseException as error:
            status.fail(error)

    thread = threading.Thread(target=guarded, name=f"lmpool-{name}", daemon=True)
    thread.start()
    return thread
