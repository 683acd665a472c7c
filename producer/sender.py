"""The thread that makes a client's requests: claim, look after, withdraw."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import redis.exceptions

from lmpool.address import is_sentinel
from lmpool.clock import to_ms
from lmpool.commands import Value
from lmpool.errors import (
    LmpoolError,
    NoWorkers,
    PoolBusy,
    ServerRefused,
    ServerUnreachable,
    UnknownAdapter,
)
from lmpool.isolation import isolate
from lmpool.keys import GROUP, PRIORITIES, Priority, ShardKeys
from lmpool.liveness import any_alive
from lmpool.producer.answers import AnswerReader
from lmpool.producer.flights import Flight
from lmpool.producer.notices import bring_forward
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.replacement import is_known, look_at, wake_collector
from lmpool.producer.session import (
    CLAIM_MOST,
    CONFIRMED_FOR,
    FLIGHT_TTL,
    REPLY_TTL,
    Session,
    Task,
    closed,
)
from lmpool.producer.withdrawal import withdraw
from lmpool.scripts import ScriptsMissing, script
from lmpool.server import ANSWER_TIMEOUT, get_string, is_full, is_lost, senseless, understood
from lmpool.servers import Servers
from lmpool.settings import mask_url
from lmpool.wants import Digest
from lmpool.wire import JobPacker

logger = logging.getLogger(__name__)

CHECK_EVERY: Final = 2.0
FAILOVER_TIMEOUT: Final = 5.0
"""Seconds without an answer after which the Sentinels are asked for the primary again."""
CLAIM_BYTES: Final = 1 << 20
CHECK_MOST: Final = 500


class Sender:
    """Owned by one thread, which `run` is. `farewell` waits for the collector to end."""

    def __init__(self, session: Session, farewell: Callable[[], None]) -> None:
        self._session = session
        self._farewell = farewell
        url = session.options.url
        # A primary that was replaced may never answer.
        within = FAILOVER_TIMEOUT if is_sentinel(url) else ANSWER_TIMEOUT
        self._servers = session.owned(
            Servers.of_url(url, name="lmpool-client", answers_within=within)
        )
        self._answers = AnswerReader(session, self._servers)
        self._busy_until: dict[Priority, float] = dict.fromkeys(PRIORITIES, 0.0)
        self._next_check = 0.0
        self._alone_since: float | None = None
        self._looked = 0.0

    def run(self) -> None:
        """Serve until the client closes, then leave nothing behind on the server."""
        session = self._session
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
                    self._run_task(tasks.pop(0))
                if closing:
                    break
                try:
                    with self._servers.in_step():
                        self._serve()
                    lost_since = None
                except (redis.exceptions.RedisError, OSError) as error:
                    lost_since = self._after_loss(error, lost_since)
                except Exception as error:  # whatever it is, it must not leave callers waiting
                    self._after_nonsense(error)
            self._leave()
        finally:
            self._servers.close()

    def cut(self) -> None:
        """End whatever waits for a server that may never answer; for another thread to call."""
        self._servers.cut()

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
        for priority in PRIORITIES:
            if session.may_send(priority):
                due = min(due, self._busy_until[priority])
        return max(0.0, due - time.monotonic())

    def _what_may_go(self) -> Priority | None:
        """Whose jobs can be sent now; None if nothing can. Locked."""
        for priority in PRIORITIES:
            busy = self._busy_until[priority] > time.monotonic()
            if not busy and self._session.may_send(priority):
                return priority
        return None

    def _run_task(self, task: Task) -> None:
        session = self._session
        function, future = task
        if not future.set_running_or_notify_cancel():
            return
        try:
            if session.closing.is_set():
                raise closed()
            with understood(session.options.url):
                try:
                    with self._servers.in_step():
                        result = function(self._servers)
                except redis.exceptions.RedisError as error:
                    # An idle connection may have died unnoticed: once more on a new one.
                    if not is_lost(error) or session.closing.is_set():
                        raise
                    with self._servers.in_step():
                        result = function(self._servers)
        except BaseException as error:
            future.set_exception(closed() if session.closing.is_set() else error)
        else:
            future.set_result(result)

    def _after_loss(self, error: Exception, lost_since: float | None) -> float:
        """The connection is gone or the server refuses: wait, or give up. Returns since when."""
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
        if isinstance(error, ScriptsMissing):
            # A worker will load them, if there is one. Into a replica nobody does, and a failover
            # may have led here: the next connection is to the primary of then.
            self._servers.renew()
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                self._look_for_workers(now)
        # The table keeps what was waited for; the next claim or check finds what became of it.
        session.closing.wait(min(1.0, 0.05 + (now - since) / 4) * random.uniform(0.5, 1.0))
        return since

    def _after_nonsense(self, error: Exception) -> None:
        """An answer made no sense, or it is a defect of ours: nobody waits for more of the kind."""
        session = self._session
        if not session.closing.is_set():  # else cut off in the middle of a read
            failure = (
                error if isinstance(error, LmpoolError) else senseless(session.options.url, error)
            )
            logger.warning("the client's sender failed: %s", failure)
            logger.debug("which is", exc_info=error)
            session.fail_everything(failure)

    def _serve(self) -> None:
        session = self._session
        withdraw(session, self._servers)
        if session.table.has_unsent():
            self._confirm()
        while self._claim():
            pass
        if session.table.flights and self._next_check <= time.monotonic():
            self._check()

    def _confirm(self) -> None:
        """See before a claim, now and then, that the model which the client knows is served."""
        session = self._session
        now = time.monotonic()
        if now - session.confirmed < CONFIRMED_FOR / 2:
            return
        current = get_string(self._servers.pool, session.keys.info)
        if current is not None and not is_known(session, current) and not self._are_served():
            look_at(session, self._servers, current)
            return
        with session.lock:
            stale = not session.is_confirmed(now)
            session.confirmed = now
            ended = session.land_cached() if stale else []
        wake(ended)

    def _claim(self) -> bool:
        """Send one request's worth of flights; False when there was nothing to send."""
        session = self._session
        with session.lock:
            priority = self._what_may_go()
            if priority is None:
                return False
            most = min(CLAIM_MOST, session.may_send(priority))
            flights = session.table.take_unsent(most, CLAIM_BYTES, priority)
        try:
            for shard, mine in self._by_shard(flights):
                isolate(mine, partial(self._claim_in, shard, priority=priority), self._refuse)
        except Exception:
            with session.lock:
                session.table.put_back(flights)
            raise
        return True

    def _by_shard(self, flights: list[Flight]) -> Iterator[tuple[ShardKeys, list[Flight]]]:
        shards = self._session.shards
        if len(shards) == 1:
            if flights:
                yield shards[0], flights
            return
        for shard in shards:
            mine = [flight for flight in flights if flight.shard == shard.number]
            if mine:
                yield shard, mine

    def _refuse(self, flight: Flight, error: redis.exceptions.RedisError) -> None:
        """The server takes this one in no company."""
        shown = mask_url(self._session.options.url)
        logger.warning("%s refused one prompt: %s", shown, error)
        with self._session.lock:
            ended = self._session.fail(flight, ServerRefused(f"{shown}: {error}"))
        wake(ended)

    def _claim_in(self, shard: ShardKeys, flights: Sequence[Flight], priority: Priority) -> None:
        session = self._session
        assert session.info is not None
        now_ms, now = session.clock.now_ms(), time.monotonic()
        arguments: list[Value] = [
            shard.prefix,
            session.id,
            to_ms(REPLY_TTL),
            to_ms(FLIGHT_TTL),
            session.info.max_backlog,
            GROUP,
            int(priority == "interactive"),
        ]
        pack = JobPacker(now_ms).pack
        for flight in flights:
            job, due = flight.job, flight.deadline
            deadline = None if due is None else now_ms + int((due - now) * 1000)
            arguments += (
                job.digest.hex(),
                "" if deadline is None else deadline,
                job.adapter or "",
                pack(job.want, job.adapter, job.digest, job.tokens, deadline, flight.trace),
            )
        claims, fresh = script("enqueue")(
            self._servers.for_shard(shard), [shard.stream(priority).key], arguments
        )
        session.made[shard.reply(session.id)] += fresh
        if session.table.streamed and any(flight.pieces for flight in flights):
            wake_collector(session, self._servers, [shard])  # to read their pieces, too
        there = self._take_claims(flights, claims.decode(), priority)
        if there:
            self._answers.fetch(shard, there)

    def _take_claims(
        self, flights: Sequence[Flight], claims: str, priority: Priority
    ) -> list[Digest]:
        """Take what the server said of each flight, a letter each; those whose result is there."""
        session = self._session
        there: list[Digest] = []
        full: list[Flight] = []
        damaged: list[Flight] = []
        counted: list[str] = []
        ended: list[PendingCall] = []
        with session.lock:
            now = time.monotonic()
            for flight, claim in zip(flights, claims, strict=True):
                if not flight.counted and claim in "hjq":
                    flight.counted = True
                    counted.append(claim)
                if claim == "h":
                    there.append(flight.job.digest)
                elif claim in "fb":
                    flight.sent = False
                    (full if claim == "f" else damaged).append(flight)
                elif claim == "a":
                    name = (flight.job.adapter or "").rpartition("@")[0]
                    ended += session.fail(flight, UnknownAdapter(self._adapter_gone(name)))
                flight.since = now
            statistics = session.table.statistics
            statistics.cache_hits += counted.count("h")
            statistics.joined += counted.count("j")
            statistics.queued += counted.count("q")
            if full:
                ended += self._wait_for_room(full, priority, now)
            if damaged:  # the stream: a worker mends it at its next heartbeat
                session.table.put_back(damaged)
                self._busy_until[priority] = now + random.uniform(0.1, 0.2)
        wake(ended)
        return there

    def _wait_for_room(
        self, full: list[Flight], priority: Priority, now: float
    ) -> list[PendingCall]:
        """The backlog is at its bound: the calls that this ends, if any. Under the lock."""
        session = self._session
        if session.options.when_busy == "raise":
            bound = session.info.max_backlog if session.info else 0
            error = PoolBusy(
                f"pool {session.options.pool!r} has {bound} jobs waiting, its bound: try again "
                "later, add workers, or raise max_backlog"
            )
            return [call for flight in full for call in session.fail(flight, error)]
        session.table.put_back(full)
        # The backlog drains at the workers' pace: ask again in a while, not at once.
        self._busy_until[priority] = now + random.uniform(0.01, 0.03)
        return []

    def _adapter_gone(self, name: str) -> str:
        pool = self._session.options.pool
        return (
            f"adapter {name!r} was removed or replaced in pool {pool!r}; "
            "register it with add_new_lora()"
        )

    def _check(self) -> None:
        """Look after what is waited for: renew leases, find what was lost, see who is alive."""
        session = self._session
        every = min(CHECK_EVERY, max(0.1, session.options.workers_timeout / 4))
        now = time.monotonic()
        self._next_check = now + every
        with contextlib.suppress(redis.exceptions.RedisError, OSError):  # Sentinels may be away
            self._servers.follow()
        with session.lock:
            flights = session.table.overdue(now, every, 10 * CHECK_MOST)
        for shard, mine in self._by_shard(flights):
            for i in range(0, len(mine), CHECK_MOST):
                isolate(mine[i : i + CHECK_MOST], partial(self._check_in, shard), self._refuse)
        if session.table.flights:
            if now - self._looked > 4 * every:
                self._alone_since = None  # nobody waited meanwhile, or nobody could look
            self._looked = now
            self._look_for_workers(now)

    def _check_in(self, shard: ShardKeys, flights: Sequence[Flight]) -> None:
        session = self._session
        reply = shard.reply(session.id)
        last = session.last_ids.get(reply)
        states, fresh, newest = script("check")(
            self._servers.for_shard(shard),
            [shard.stream().key],
            [
                shard.prefix,
                session.id,
                to_ms(REPLY_TTL),
                to_ms(FLIGHT_TTL),
                *(flight.job.digest.hex() for flight in flights),
            ],
        )
        session.made[reply] += fresh
        there = []
        with session.lock:
            for flight, state in zip(flights, states.decode(), strict=True):
                if state == "h":
                    there.append(flight.job.digest)
                elif state == "u":
                    session.table.resend(flight)
        if last is not None and newest:
            bring_forward(self._servers.for_shard(shard), reply, last, newest.decode())
        if there:
            self._answers.fetch(shard, there)

    def _are_served(self) -> bool:
        """Whether workers of the model that the client knows live: in every shard, as a pool taken
        over in fewer shards has nobody in the others."""
        shards = self._session.shards
        return all(any_alive(self._servers.for_shard(shard), shard) for shard in shards)

    def _look_for_workers(self, now: float) -> None:
        session = self._session
        servers = self._servers
        if self._are_served():
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        current = get_string(servers.pool, session.keys.info)
        if current is not None and look_at(session, servers, current):
            self._alone_since = None
        elif now - self._alone_since >= session.options.workers_timeout * 0.75:
            self._alone_since = None
            session.fail_everything(
                NoWorkers(
                    f"pool {session.options.pool!r} has had no worker alive for "
                    f"{session.options.workers_timeout:g} s: start one with lmpool worker"
                )
            )

    def _leave(self) -> None:
        """Withdraw everything, wake the collector, delete what is ours."""
        session, servers = self._session, self._servers
        try:
            if session.shards:
                with servers.in_step():
                    withdraw(session, servers)
                    wake_collector(session, servers, session.shards)
                self._farewell()
                for shard in session.shards:
                    servers.for_shard(shard).delete(shard.reply(session.id))
        except Exception:  # cut off in the middle of a read, or an answer that makes no sense
            logger.debug("the server was gone when the client closed", exc_info=True)
