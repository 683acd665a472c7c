"""The client's side of the protocol: claim, collect, look after, withdraw.

Two threads, each with a connection of its own: the sender, which makes every request, and the
collector, which blocks on the client's reply stream. Callers, in any thread or event loop, leave
their asks in the flight table and are woken when the rows are there. The connections are
synchronous because rows are large: a blocking read costs half of what an event loop's does.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import redis

from lmpool.clock import ServerClock, to_ms
from lmpool.commands import Server, Value
from lmpool.errors import (
    ClientClosed,
    JobExpired,
    JobFormatError,
    LmpoolError,
    NoWorkers,
    PoolBusy,
    PoolMismatch,
    PromptFailed,
    RowFormatError,
    ServerRefused,
    ServerUnreachable,
    UnknownAdapter,
    UnknownPool,
)
from lmpool.keys import LaneKeys, PoolKeys, lane_of
from lmpool.liveness import any_alive
from lmpool.model_info import ModelInfo
from lmpool.producer.cache import RowCache
from lmpool.producer.calls import Ask, Call, wake
from lmpool.producer.flights import Flight, FlightTable
from lmpool.scripts import script
from lmpool.server import explained, greet, is_lost, open_server
from lmpool.settings import ClientOptions, mask_url
from lmpool.wire import Job, Notice, Row, pack_job, read_notices, unpack_row

logger = logging.getLogger(__name__)

REPLY_TTL: Final = 30.0
FLIGHT_TTL: Final = 600.0
BLOCK: Final = 5.0
"""Seconds one read of the reply stream blocks."""
CHECK_EVERY: Final = 2.0
CLAIM_MOST: Final = 512
"""Jobs in one claim: about 3 ms of the server's time, which is everybody's."""
CLAIM_BYTES: Final = 1 << 20
FETCH_BYTES: Final = 8 << 20
CHECK_MOST: Final = 500
MAX_TRIES: Final = 5

_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()
T = TypeVar("T")
Task = tuple[Callable[[Server], Any], "Future[Any]"]


class Client:
    """One client of one pool."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.keys = PoolKeys(options.pool)
        self.clock = ServerClock()
        self.cache = RowCache(options.cache_bytes)
        self.info: ModelInfo | None = None
        self.lanes: tuple[LaneKeys, ...] = ()
        self.id = ""
        self._table = FlightTable()
        self._reset()
        _CLIENTS.add(self)

    def _reset(self) -> None:
        """Threads, locks and connections: a forked child must have its own."""
        self.id = uuid.uuid4().hex[:16]
        statistics = self._table.statistics
        self._table = FlightTable()
        self._table.statistics = statistics
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._tasks: list[Task] = []
        self._closed = False
        self._closing = threading.Event()
        self._joined = threading.Event()  # the pool's lanes are known, or we are closing
        self._fresh = threading.Event()  # the reply stream was made anew
        self._threads: list[threading.Thread] = []
        self._last_ids: dict[str, str] = {}
        self._busy_pause = 0.0
        self._next_check = 0.0
        self._alone_since: float | None = None
        self._collector: Server | None = None
        self._loading: Future[ModelInfo] | None = None
        if self.lanes:
            self._joined.set()

    # --- what callers use ----------------------------------------------------------------------

    @property
    def statistics(self) -> dict[str, int]:
        """This client's counters."""
        with self._lock:
            return self._table.statistics.as_dict()

    def run(self, function: Callable[[Server], T]) -> Future[T]:
        """Run `function` with the sender's connection, on the sender's thread."""
        future: Future[T] = Future()
        self._start()
        with self._work:
            if self._closed:
                raise ClientClosed("this PooledLM was closed")
            self._tasks.append((function, future))
            self._work.notify()
        return future

    def load_info(self) -> Future[ModelInfo]:
        """Read the pool's model info, which every call needs first: once for all who ask now."""
        loading = self._loading
        if loading is None or loading.done():
            loading = self._loading = self.run(self._load_info)
        return loading

    def submit(self, calls: Sequence[Call]) -> None:
        """Take calls in. Rows in the local cache answer at once."""
        self._start()
        answered = []
        now = time.monotonic()
        with self._work:
            if self._closed:
                raise ClientClosed("this PooledLM was closed")
            statistics = self._table.statistics
            for call in calls:
                if call.done:
                    continue  # cancelled in the turn it was made
                statistics.requests += len(call.asks)
                for place, ask in enumerate(call.asks):
                    row = self.cache.get(ask.digest)
                    if row is not None:
                        call.rows[place] = row
                        call.left -= 1
                        statistics.local_hits += 1
                if call.left:
                    self._table.add(call, now)
                else:
                    answered.append(call)
            if self._table.unsent:
                self._work.notify()
        wake(answered)

    def lookup(self, ask: Ask) -> Row | None:
        """The row from the local cache, counted as a request, or None, counted as nothing."""
        row = self.cache.get(ask.digest)
        if row is not None:
            with self._lock:
                self._table.statistics.requests += 1
                self._table.statistics.local_hits += 1
        return row

    def withdraw_all(self) -> None:
        """Nobody waits any longer for anything asked so far."""
        with self._work:
            ended = self._fail_all(LmpoolError("withdrawn by reset_async_queries()"))
            self._work.notify()
        wake(ended)

    def forget(self, call: Call) -> None:
        """`call` waits no longer: jobs that nobody else wants are withdrawn."""
        with self._work:
            if call.done:
                return
            call.error = LmpoolError("withdrawn")
            self._table.forget(call)
            if self._table.withdrawn:
                self._work.notify()

    def close(self) -> None:
        """Withdraw what is waited for, end both threads, leave nothing on the server."""
        with self._work:
            if self._closed:
                return
            self._closed = True
            self._closing.set()
            self._joined.set()
            ended = self._fail_all(ClientClosed("this PooledLM was closed"))
            self._work.notify()
            threads = list(self._threads)
        wake(ended)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)

    # --- threads -------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._threads:
            return
        with self._lock:
            if self._threads or self._closed:
                return
            self._threads = [
                threading.Thread(target=target, name=f"lmpool-{name}-{self.id[:6]}", daemon=True)
                for name, target in (("sender", self._send), ("collector", self._collect))
            ]
            for thread in self._threads:
                thread.start()

    def _send(self) -> None:
        server = open_server(self.options.url, name="lmpool-client")
        lost_since: float | None = None
        try:
            while True:
                with self._work:
                    while not self._has_work():
                        self._work.wait(self._until_check())
                    closing = self._closed
                    tasks, self._tasks = self._tasks, []
                for task in tasks:
                    self._run_task(server, task)
                if closing:
                    break
                try:
                    self._serve(server)
                    lost_since = None
                except (redis.exceptions.RedisError, OSError) as error:
                    lost_since = self._after_loss(error, lost_since)
                except Exception as error:  # a defect of ours must not leave callers waiting
                    logger.exception("the client's sender failed")
                    self._fail_everything(LmpoolError(f"{type(error).__name__}: {error}"))
            self._leave(server)
        finally:
            server.close()
            server.connection_pool.disconnect()

    def _has_work(self) -> bool:
        if self._closed or self._tasks or self._table.withdrawn:
            return True
        if self._table.unsent and self._busy_pause <= time.monotonic():
            return True
        return bool(self._table.flights) and self._next_check <= time.monotonic()

    def _until_check(self) -> float | None:
        if not self._table.flights:
            return None
        due = self._next_check
        if self._table.unsent:
            due = min(due, self._busy_pause)
        return max(0.0, due - time.monotonic())

    def _run_task(self, server: Server, task: Task) -> None:
        function, future = task
        if not future.set_running_or_notify_cancel():
            return
        try:
            with explained(self.options.url):
                try:
                    result = function(server)
                except redis.exceptions.RedisError as error:
                    # An idle connection may have died unnoticed: once more on a new one.
                    if not is_lost(error):
                        raise
                    result = function(server)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _after_loss(self, error: Exception, lost_since: float | None) -> float:
        """The connection is gone or the server refuses: wait, or give up. Answers since when."""
        now = time.monotonic()
        if not is_lost(error):
            with_url = mask_url(self.options.url)
            self._fail_everything(ServerRefused(f"{with_url}: {error}"))
            return now
        since = now if lost_since is None else lost_since
        if now - since >= self.options.reconnect_timeout:
            self._fail_everything(
                ServerUnreachable(
                    f"no answer from {mask_url(self.options.url)} for {now - since:.0f} s: {error}"
                )
            )
            return since
        if lost_since is None:
            logger.warning("lost %s (%s): reconnecting", mask_url(self.options.url), error)
        # The table keeps what was waited for; the next claim or check finds what became of it.
        self._closing.wait(min(1.0, 0.05 + (now - since) / 4) * random.uniform(0.5, 1.0))
        return since

    def _fail_all(self, error: LmpoolError) -> list[Call]:
        ended = []
        for digest in list(self._table.flights):
            flight = self._table.flights.get(digest)
            if flight is not None:
                if flight.sent:
                    self._table.withdrawn.append(digest)
                ended += self._table.fail(digest, error)
        self._table.statistics.failed += len(ended)
        return ended

    def _fail_everything(self, error: LmpoolError) -> None:
        with self._lock:
            ended = self._fail_all(error)
            if isinstance(error, ServerUnreachable):
                self._table.withdrawn.clear()  # nobody is there to be told
        wake(ended)

    # --- the sender's work ---------------------------------------------------------------------

    def _load_info(self, server: Server) -> ModelInfo:
        version = greet(server, self.options.url, self.clock)
        found = server.get(self.keys.info)
        if found is None:
            raise UnknownPool(
                f"no pool {self.options.pool!r} on {mask_url(self.options.url)}: start a worker "
                f"with LMPOOL_POOL={self.options.pool} lmpool worker, or check the name"
            )
        info = ModelInfo.unpack(found)
        with self._lock:
            self.info = info
            self.lanes = self.keys.lanes(info.fingerprint8, info.lanes)
        self._joined.set()
        logger.debug("pool %s serves %s on %s", self.options.pool, info.model, version)
        return info

    def _serve(self, server: Server) -> None:
        self._withdraw(server)
        while self._busy_pause <= time.monotonic() and self._claim(server):
            pass
        if self._table.flights and self._next_check <= time.monotonic():
            self._check(server)

    def _lane(self, digest: bytes) -> LaneKeys:
        if len(self.lanes) == 1:
            return self.lanes[0]
        return self.lanes[lane_of(bytes.fromhex(digest.decode()), len(self.lanes))]

    def _by_lane(self, digests: Sequence[bytes]) -> dict[LaneKeys, list[bytes]]:
        if len(self.lanes) == 1:
            return {self.lanes[0]: list(digests)} if digests else {}
        lanes: dict[LaneKeys, list[bytes]] = {}
        for digest in digests:
            lanes.setdefault(self._lane(digest), []).append(digest)
        return lanes

    def _withdraw(self, server: Server) -> None:
        with self._lock:
            digests, self._table.withdrawn = self._table.withdrawn, []
        try:
            for lane, chosen in self._by_lane(digests).items():
                for i in range(0, len(chosen), CLAIM_MOST):
                    part = chosen[i : i + CLAIM_MOST]
                    script("withdraw")(server, [lane.jobs], [lane.prefix, self.id, *part])
        except Exception:
            with self._lock:
                self._table.withdrawn = digests + self._table.withdrawn
            raise

    def _claim(self, server: Server) -> bool:
        """Send one request's worth of flights; False when there was nothing to send."""
        with self._lock:
            flights = self._table.take_unsent(CLAIM_MOST, CLAIM_BYTES)
        if not flights:
            return False
        try:
            for lane in self.lanes:
                mine = (
                    flights
                    if len(self.lanes) == 1
                    else [f for f in flights if self._lane(f.ask.digest) is lane]
                )
                if mine:
                    self._claim_in(server, lane, mine)
        except Exception:
            with self._lock:
                self._table.put_back(flights)
            raise
        return True

    def _claim_in(self, server: Server, lane: LaneKeys, flights: list[Flight]) -> None:
        assert self.info is not None
        now_ms, now = self.clock.now_ms(), time.monotonic()
        arguments: list[Value] = [
            lane.prefix,
            self.id,
            to_ms(REPLY_TTL),
            to_ms(FLIGHT_TTL),
            self.info.max_backlog,
        ]
        for flight in flights:
            ask = flight.ask
            deadline = (
                None if flight.deadline is None else now_ms + int((flight.deadline - now) * 1000)
            )
            job = Job(
                op=ask.op,  # type: ignore[arg-type]
                digest=bytes.fromhex(ask.digest.decode()),  # type: ignore[arg-type]
                tokens=ask.tokens,
                adapter=ask.adapter,
                want=ask.want,
                deadline=deadline,
                sent=now_ms,
            )
            arguments += (
                ask.digest,
                "" if deadline is None else deadline,
                ask.adapter or "",
                pack_job(job),
            )
        answers, fresh = script("enqueue")(server, [lane.jobs], arguments)
        if fresh:
            self._fresh.set()
        self._take_answers(server, flights, answers)

    def _take_answers(self, server: Server, flights: list[Flight], answers: bytes) -> None:
        there: list[bytes] = []
        ended: list[Call] = []
        with self._lock:
            statistics, table = self._table.statistics, self._table
            now = time.monotonic()
            full = []
            for flight, answer in zip(flights, answers.decode(), strict=True):
                if not flight.counted and answer in "hjq":
                    flight.counted = True
                    if answer == "q":
                        statistics.queued += 1
                    elif answer == "j":
                        statistics.joined += 1
                    else:
                        statistics.cache_hits += 1
                if answer == "h":
                    there.append(flight.ask.digest)
                elif answer == "f":
                    flight.sent = False
                    full.append(flight)
                elif answer == "a":
                    name = (flight.ask.adapter or "").rpartition("@")[0]
                    ended += self._fail(flight, UnknownAdapter(self._adapter_gone(name)))
                flight.since = now
            if full and self.options.when_busy == "raise":
                bound = self.info.max_backlog if self.info else 0
                error = PoolBusy(
                    f"pool {self.options.pool!r} has {bound} jobs waiting, its bound: try again "
                    "later, add workers, or raise max_backlog"
                )
                for flight in full:
                    ended += self._fail(flight, error)
            elif full:
                table.put_back(full)
                # The backlog drains at the workers' pace: ask again in a while, not at once.
                self._busy_pause = now + random.uniform(0.01, 0.03)
        wake(ended)
        if there:
            self._fetch(server, there)

    def _adapter_gone(self, name: str) -> str:
        return (
            f"adapter {name!r} was removed or replaced in pool {self.options.pool!r}; "
            "register it with add_new_lora()"
        )

    def _fail(self, flight: Flight, error: LmpoolError) -> list[Call]:
        self._table.statistics.failed += 1
        return self._table.fail(flight.ask.digest, error)

    def _fetch(self, server: Server, digests: Sequence[bytes]) -> None:
        """Read rows that are there and hand them out; ask again for those that are gone."""
        assert self.info is not None
        width = self.info.vocab_size * (2 if self.info.encoding == "bf16" else 4)
        step = max(1, FETCH_BYTES // width)
        for lane, chosen in self._by_lane(digests).items():
            for i in range(0, len(chosen), step):
                part = chosen[i : i + step]
                keys = [f"{lane.prefix}:result:{digest.decode()}" for digest in part]
                self._hand_out(part, server.mget(keys))

    def _hand_out(self, digests: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        assert self.info is not None
        complete: list[Call] = []
        size = self.info.vocab_size
        with self._lock:
            table = self._table
            for digest, value in zip(digests, values, strict=True):
                flight = table.flights.get(digest)
                if flight is None:
                    continue
                if value is None:
                    if flight.tries < MAX_TRIES:
                        table.resend(flight)
                    else:
                        complete += self._fail(flight, _vanished(flight))
                    continue
                try:
                    row = unpack_row(value, size)
                except RowFormatError as error:
                    complete += self._fail(flight, error)
                    continue
                if flight.ask.op == "logprobs":
                    self.cache.put(digest, row)
                complete += table.land(digest, row)
            if table.unsent:
                self._work.notify()
        wake(complete)

    def _check(self, server: Server) -> None:
        """Look after what is waited for: renew leases, find what was lost, see who is alive."""
        every = min(CHECK_EVERY, max(0.1, self.options.workers_timeout / 4))
        now = time.monotonic()
        self._next_check = now + every
        with self._lock:
            flights = self._table.overdue(now, every, 10 * CHECK_MOST)
        for lane in self.lanes:
            mine = [f for f in flights if self._lane(f.ask.digest) is lane]
            for i in range(0, len(mine), CHECK_MOST):
                self._check_in(server, lane, mine[i : i + CHECK_MOST])
            last = self._last_ids.get(lane.reply(self.id))
            if last is not None:
                server.xtrim(lane.reply(self.id), minid=last, approximate=False)
        if self._table.flights:
            self._look_for_workers(server, now)

    def _check_in(self, server: Server, lane: LaneKeys, flights: list[Flight]) -> None:
        digests = [flight.ask.digest for flight in flights]
        answers, fresh = script("check")(
            server,
            [lane.jobs],
            [lane.prefix, self.id, to_ms(REPLY_TTL), to_ms(FLIGHT_TTL), *digests],
        )
        if fresh:
            self._fresh.set()
        there = []
        with self._lock:
            for flight, answer in zip(flights, answers.decode(), strict=True):
                if answer == "h":
                    there.append(flight.ask.digest)
                elif answer == "u":
                    self._table.resend(flight)
        if there:
            self._fetch(server, there)

    def _look_for_workers(self, server: Server, now: float) -> None:
        if any_alive(server, self.lanes[0]):
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        current = server.get(self.keys.info)
        assert self.info is not None
        if current is not None and ModelInfo.unpack(current).fingerprint != self.info.fingerprint:
            self._fail_everything(
                PoolMismatch(
                    f"pool {self.options.pool!r} now serves another model than the "
                    f"{self.info.model!r} this client knows: connect again"
                )
            )
        elif now - self._alone_since >= self.options.workers_timeout * 0.75:
            self._alone_since = None
            self._fail_everything(
                NoWorkers(
                    f"pool {self.options.pool!r} has had no worker alive for "
                    f"{self.options.workers_timeout:g} s: start one with lmpool worker"
                )
            )

    def _leave(self, server: Server) -> None:
        """Withdraw everything, wake the collector, delete what is ours."""
        try:
            if self.lanes:
                self._withdraw(server)
                server.xadd(self.lanes[0].reply(self.id), {"bye": "1"})
                self._threads[1].join(timeout=2)
                for lane in self.lanes:
                    server.delete(lane.reply(self.id))
        except (redis.exceptions.RedisError, OSError):
            logger.debug("the server was gone when the client closed", exc_info=True)
        if self._collector is not None and self._threads[1].is_alive():
            # It may be blocked on a connection that will never answer.
            self._collector.connection_pool.disconnect()

    # --- the collector -------------------------------------------------------------------------

    def _collect(self) -> None:
        server = open_server(self.options.url, blocks_for=BLOCK, name="lmpool-client")
        self._collector = server
        failures = 0
        try:
            while not self._closing.is_set():
                if not self.lanes:
                    self._joined.wait()  # nothing can be waited for before the pool is known
                    continue
                try:
                    self._collect_once(server)
                    failures = 0
                except (redis.exceptions.RedisError, OSError) as error:
                    if self._closing.is_set():
                        break
                    failures += 1
                    level = logging.DEBUG if is_lost(error) else logging.WARNING
                    logger.log(level, "the reply stream could not be read: %s", error)
                    self._closing.wait(min(1.0, 0.05 * 2**failures) * random.uniform(0.5, 1.0))
                except Exception as error:
                    logger.exception("the client's collector failed")
                    self._fail_everything(LmpoolError(f"{type(error).__name__}: {error}"))
        finally:
            server.close()
            server.connection_pool.disconnect()

    def _collect_once(self, server: Server) -> None:
        if self._fresh.is_set():
            # A stream made anew holds only what is unread, under ids that may be smaller.
            self._fresh.clear()
            self._last_ids = {}
        streams = {
            lane.reply(self.id): self._last_ids.get(lane.reply(self.id), "0-0")
            for lane in self.lanes
        }
        answer = server.xread(streams, count=512, block=to_ms(BLOCK))
        notices: list[Notice] = []
        for name, entries in answer or ():
            for entry_id, fields in entries:
                notices += read_notices(fields)
                self._last_ids[name.decode()] = entry_id.decode()
        self._take_notices(server, notices)

    def _take_notices(self, server: Server, notices: Sequence[Notice]) -> None:
        ended: list[Call] = []
        with self._lock:
            flights = self._table.flights
            done = [n.digest for n in notices if n.status == "ok" and n.digest in flights]
            for notice in notices:
                flight = self._table.flights.get(notice.digest)
                if notice.status == "ok" or flight is None:
                    continue
                error = _error_of(notice, flight)
                if isinstance(error, JobExpired):
                    if flight.deadline is None or flight.deadline > time.monotonic() + 0.05:
                        self._table.resend(flight)  # somebody joined who waits longer
                        continue
                    self._table.statistics.expired += 1
                    ended += self._table.fail(notice.digest, error)
                else:
                    ended += self._fail(flight, error)
            if self._table.unsent or self._table.withdrawn:
                self._work.notify()
        wake(ended)
        if done:
            self._fetch(server, done)


def _after_fork() -> None:
    for client in list(_CLIENTS):
        client.cache.unlock()
        client._reset()


os.register_at_fork(after_in_child=_after_fork)


def _vanished(flight: Flight) -> LmpoolError:
    return PromptFailed(
        f"the result was gone {flight.tries} times before it could be read: the server's memory "
        "is too small for the rows in use, or result_ttl too short"
    )


def _error_of(notice: Notice, flight: Flight) -> LmpoolError:
    if notice.status == "expired":
        return JobExpired("the job's deadline passed before a worker ran it")
    if notice.status == "unknown_adapter":
        return UnknownAdapter(notice.error)
    if notice.status == "refused":
        return JobFormatError(notice.error)
    return PromptFailed(notice.error or f"the worker answered {notice.status}")
