"""The thread that makes a client's requests: claim, look after, withdraw."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Final

import redis

from lmpool.clock import to_ms
from lmpool.commands import Server, Value
from lmpool.errors import (
    LmpoolError,
    NoWorkers,
    PoolBusy,
    ServerRefused,
    ServerUnreachable,
    UnknownAdapter,
)
from lmpool.keys import GROUP, LaneKeys
from lmpool.liveness import any_alive
from lmpool.producer.calls import Call, wake
from lmpool.producer.flights import Flight
from lmpool.producer.moving import look_at, say_goodbye
from lmpool.producer.session import CLAIM_MOST, FLIGHT_TTL, REPLY_TTL, Session, Task
from lmpool.scripts import script
from lmpool.server import explained, is_full, is_lost, open_server
from lmpool.settings import mask_url
from lmpool.wire import Job, pack_job

logger = logging.getLogger(__name__)

CHECK_EVERY: Final = 2.0
CLAIM_BYTES: Final = 1 << 20
CHECK_MOST: Final = 500


class Sender:
    """Owned by one thread, which `run` is. `farewell` waits for the collector to end."""

    def __init__(self, session: Session, farewell: Callable[[], None]) -> None:
        self._session = session
        self._farewell = farewell
        self._busy_until = [0.0, 0.0]  # of what goes first, and of what goes later
        self._next_check = 0.0
        self._alone_since: float | None = None
        self._looked = 0.0

    def run(self) -> None:
        """Serve until the client closes, then leave nothing behind on the server."""
        session = self._session
        server = open_server(session.options.url, name="lmpool-client")
        lost_since: float | None = None
        try:
            while True:
                with session.work:
                    while not self._has_work():
                        session.work.wait(self._until_check())
                    while session.abandoned:
                        session.forget(session.abandoned.popleft())
                    closing = session.closed
                    tasks, session.tasks = session.tasks, []
                while tasks:  # one left in a variable would keep its PooledLM from being collected
                    self._run_task(server, tasks.pop(0))
                if closing:
                    break
                try:
                    self._serve(server)
                    lost_since = None
                except (redis.exceptions.RedisError, OSError) as error:
                    lost_since = self._after_loss(error, lost_since)
                except Exception as error:  # a defect of ours must not leave callers waiting
                    logger.exception("the client's sender failed")
                    session.fail_everything(LmpoolError(f"{type(error).__name__}: {error}"))
            self._leave(server)
        finally:
            server.close()
            server.connection_pool.disconnect()

    def _has_work(self) -> bool:
        session = self._session
        if session.closed or session.tasks or session.table.withdrawn or session.abandoned:
            return True
        if self._what_may_go() is not None:
            return True
        return bool(session.table.flights) and self._next_check <= time.monotonic()

    def _until_check(self) -> float | None:
        session = self._session
        if not session.table.flights:
            return None
        due = self._next_check
        for later in (False, True):
            if session.may_send(later):
                due = min(due, self._busy_until[later])
        return max(0.0, due - time.monotonic())

    def _what_may_go(self) -> bool | None:
        """Whether it is what goes later that can be sent now; None if nothing can. Locked."""
        for later in (False, True):
            busy = self._busy_until[later] > time.monotonic()
            if not busy and self._session.may_send(later):
                return later
        return None

    def _run_task(self, server: Server, task: Task) -> None:
        session = self._session
        function, future = task
        if not future.set_running_or_notify_cancel():
            return
        try:
            with explained(session.options.url):
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
        session = self._session
        now, shown = time.monotonic(), mask_url(session.options.url)
        if not (is_lost(error) or is_full(error)):
            session.fail_everything(ServerRefused(f"{shown}: {error}"))
            return now
        since = now if lost_since is None else lost_since
        if now - since >= session.options.reconnect_timeout:
            if isinstance(error, redis.exceptions.ResponseError):
                session.fail_everything(
                    ServerRefused(f"{shown} has refused for {now - since:.0f} s: {error}")
                )
            else:
                session.fail_everything(
                    ServerUnreachable(f"no answer from {shown} for {now - since:.0f} s: {error}")
                )
            return since
        if lost_since is None:
            logger.warning("%s is lost or not ready: trying again (%s)", shown, error)
        # The table keeps what was waited for; the next claim or check finds what became of it.
        session.closing.wait(min(1.0, 0.05 + (now - since) / 4) * random.uniform(0.5, 1.0))
        return since

    def _serve(self, server: Server) -> None:
        session = self._session
        session.withdraw(server)
        while self._claim(server):
            pass
        if session.table.flights and self._next_check <= time.monotonic():
            self._check(server)

    def _claim(self, server: Server) -> bool:
        """Send one request's worth of flights; False when there was nothing to send."""
        session = self._session
        with session.lock:
            later = self._what_may_go()
            if later is None:
                return False
            most = min(CLAIM_MOST, session.may_send(later))
            flights = session.table.take_unsent(most, CLAIM_BYTES, later)
        try:
            for lane in session.lanes:
                mine = (
                    flights
                    if len(session.lanes) == 1
                    else [f for f in flights if session.lane(f.ask.digest) is lane]
                )
                if mine:
                    self._claim_in(server, lane, mine, later)
        except Exception:
            with session.lock:
                session.table.put_back(flights)
            raise
        return True

    def _claim_in(self, server: Server, lane: LaneKeys, flights: list[Flight], later: bool) -> None:
        session = self._session
        assert session.info is not None
        now_ms, now = session.clock.now_ms(), time.monotonic()
        arguments: list[Value] = [
            lane.prefix,
            session.id,
            to_ms(REPLY_TTL),
            to_ms(FLIGHT_TTL),
            session.info.max_backlog,
            GROUP,
            int(not later),
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
        stream = lane.batch if later else lane
        answers, fresh = script("enqueue")(server, [stream.jobs], arguments)
        session.made[lane.reply(session.id)] += fresh
        self._take_answers(server, flights, answers, later)

    def _take_answers(
        self, server: Server, flights: list[Flight], answers: bytes, later: bool
    ) -> None:
        session = self._session
        there: list[bytes] = []
        ended: list[Call] = []
        with session.lock:
            statistics, table = session.table.statistics, session.table
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
                    ended += session.fail(flight, UnknownAdapter(self._adapter_gone(name)))
                flight.since = now
            if full and session.options.when_busy == "raise":
                bound = session.info.max_backlog if session.info else 0
                error = PoolBusy(
                    f"pool {session.options.pool!r} has {bound} jobs waiting, its bound: try again "
                    "later, add workers, or raise max_backlog"
                )
                for flight in full:
                    ended += session.fail(flight, error)
            elif full:
                table.put_back(full)
                # The backlog drains at the workers' pace: ask again in a while, not at once.
                self._busy_until[later] = now + random.uniform(0.01, 0.03)
        wake(ended)
        if there:
            session.fetch(server, there)

    def _adapter_gone(self, name: str) -> str:
        pool = self._session.options.pool
        return (
            f"adapter {name!r} was removed or replaced in pool {pool!r}; "
            "register it with add_new_lora()"
        )

    def _check(self, server: Server) -> None:
        """Look after what is waited for: renew leases, find what was lost, see who is alive."""
        session = self._session
        every = min(CHECK_EVERY, max(0.1, session.options.workers_timeout / 4))
        now = time.monotonic()
        self._next_check = now + every
        with session.lock:
            flights = session.table.overdue(now, every, 10 * CHECK_MOST)
        for lane in session.lanes:
            mine = [f for f in flights if session.lane(f.ask.digest) is lane]
            for i in range(0, len(mine), CHECK_MOST):
                self._check_in(server, lane, mine[i : i + CHECK_MOST])
            last = session.last_ids.get(lane.reply(session.id))
            if last is not None:
                server.xtrim(lane.reply(session.id), minid=last, approximate=False)
        if session.table.flights:
            if now - self._looked > 4 * every:
                self._alone_since = None  # nobody waited meanwhile, or nobody could look
            self._looked = now
            self._look_for_workers(server, now)

    def _check_in(self, server: Server, lane: LaneKeys, flights: list[Flight]) -> None:
        session = self._session
        digests = [flight.ask.digest for flight in flights]
        answers, fresh = script("check")(
            server,
            [lane.jobs],
            [lane.prefix, session.id, to_ms(REPLY_TTL), to_ms(FLIGHT_TTL), *digests],
        )
        session.made[lane.reply(session.id)] += fresh
        there = []
        with session.lock:
            for flight, answer in zip(flights, answers.decode(), strict=True):
                if answer == "h":
                    there.append(flight.ask.digest)
                elif answer == "u":
                    session.table.resend(flight)
        if there:
            session.fetch(server, there)

    def _look_for_workers(self, server: Server, now: float) -> None:
        session = self._session
        # In every lane: a pool taken over in fewer lanes has nobody in the others.
        if all(any_alive(server, lane) for lane in session.lanes):
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        current = server.get(session.keys.info)
        if current is not None and look_at(session, server, current):
            self._alone_since = None
        elif now - self._alone_since >= session.options.workers_timeout * 0.75:
            self._alone_since = None
            session.fail_everything(
                NoWorkers(
                    f"pool {session.options.pool!r} has had no worker alive for "
                    f"{session.options.workers_timeout:g} s: start one with lmpool worker"
                )
            )

    def _leave(self, server: Server) -> None:
        """Withdraw everything, wake the collector, delete what is ours."""
        session = self._session
        try:
            if session.lanes:
                session.withdraw(server)
                say_goodbye(session, server, session.lanes[0].reply(session.id))
                self._farewell()
                for lane in session.lanes:
                    server.delete(lane.reply(session.id))
        except (redis.exceptions.RedisError, OSError):
            logger.debug("the server was gone when the client closed", exc_info=True)
