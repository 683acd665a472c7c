"""The thread that makes a client's requests: claim, look after, withdraw."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import redis.exceptions

from lmpool.address import is_sentinel
from lmpool.clock import to_ms
from lmpool.commands import Server
from lmpool.errors import (
    LmpoolError,
    NoWorkers,
    ServerRefused,
    ServerUnreachable,
)
from lmpool.isolation import isolate
from lmpool.keys import PRIORITIES, Priority, ShardKeys
from lmpool.liveness import LIFE_MS, are_in
from lmpool.producer.alone import Alone
from lmpool.producer.answers import AnswerReader
from lmpool.producer.claims import (
    ClaimAhead,
    adapter_gone,
    by_shard,
    claim_ahead,
    claim_arguments,
    pool_busy,
)
from lmpool.producer.flights import Flight
from lmpool.producer.notices import bring_forward
from lmpool.producer.outages import Outage, Outages
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.replacement import is_known, lies_elsewhere, look_at, wake_collector
from lmpool.producer.session import (
    CLAIM_BYTES,
    CLAIM_MOST,
    CONFIRMED_FOR,
    FLIGHT_TTL,
    REPLY_TTL,
    Session,
    Task,
    closed,
)
from lmpool.producer.withdrawal import withdraw
from lmpool.reasons import Reasons
from lmpool.scripts import ScriptsMissing, script
from lmpool.server import (
    ANSWER_TIMEOUT,
    REFUSALS,
    explained,
    get_string,
    is_full,
    is_lost,
    remedy,
    senseless,
    understood,
    why_not_now,
)
from lmpool.server_url import mask_url
from lmpool.servers import Servers
from lmpool.wants import Digest

logger = logging.getLogger(__name__)

FAILOVER_TIMEOUT: Final = 5.0
"""Seconds without an answer after which the Sentinels are asked for the primary again."""
TASK_PATIENCE: Final = 20.0
"""Seconds for which a task is tried again whose shard is away while others are served."""
TASK_PAUSE: Final = 0.1
_AWAY: Final = b"away"
"""Told apart by what it is, not by what it holds: an info that was damaged may be empty."""
CHECK_MOST: Final = 500
REFUSAL_AGAIN: Final = 60.0
"""Seconds after which a refusal that lasts is logged again."""


class Sender:
    """Owned by one thread, which `run` is. `farewell` waits for the collector to end."""

    def __init__(self, session: Session, alone: Alone, farewell: Callable[[], None]) -> None:
        self._session = session
        self._alone = alone
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
        self._outages = Outages()
        self._delayed: list[tuple[float, float, Task]] = []
        """Tasks whose shard was away: when each is run again, and since when it is tried."""
        self._alone_since: float | None = None
        self._looked = 0.0
        self._rests = False
        """Whether its thread waits for work, and so uses no connection before it has the lock. One
        that was lost it tries itself."""
        self._ahead: ClaimAhead | None = None
        self._confirm_failed = -math.inf
        self._reasons = Reasons()
        """Why the server is lost or not ready, as it was logged."""
        self._refused = "", -math.inf
        """What the server refused last, and when that was logged. What it permits, as to withdraw
        what it refused, says nothing of it."""

    def run(self) -> None:
        """Serve until the client closes, then leave nothing behind on the server."""
        session = self._session
        lost_since: float | None = None
        try:
            while True:
                with session.work:
                    while not self._has_work():
                        self._rests = lost_since is None
                        session.work.wait(self._until_check())
                        self._rests = False
                    while session.abandoned:
                        session.forget(session.abandoned.popleft())
                    closing = session.closed
                    tasks, session.tasks = session.tasks, []
                if self._ahead is not None:
                    lost_since = self._attempt(self._end_ahead, lost_since)
                while tasks:  # one left in a variable would keep its PooledLM from being collected
                    self._run_task(tasks.pop(0))
                self._run_delayed(closing)
                if closing:
                    break
                lost_since = self._attempt(self._serve, lost_since)
            self._leave()
        finally:
            session.near.leave()  # also where Ctrl-C kept who closes the client from it
            self._servers.close()
            self._alone.close()

    def _attempt(self, step: Callable[[], None], lost_since: float | None) -> float | None:
        """Take a step. Returns since when the connection is lost, if it is."""
        try:
            with self._servers.in_step():
                step()
        except (redis.exceptions.RedisError, OSError) as error:
            return self._after_loss(error, lost_since)
        except Exception as error:  # whatever it is, it must not leave callers waiting
            self._after_nonsense(error)
            return lost_since
        if lost_since is not None:
            self._session.troubles.pop("server", None)
        return None

    def claim_ahead(self) -> Sequence[Flight]:
        """Send what may go now, for the thread of who asks: the sender's wakes up meanwhile, and
        reads the answer. Where that might wait it is left to the sender. Under the lock.

        Returns what was sent.
        """
        priority = self.may_go_ahead()
        if priority is not None:
            self._ahead = claim_ahead(self._session, self._servers, priority)
            if self._ahead is not None:
                self._ahead.command.send()
                return self._ahead.flights
        return ()

    def may_go_ahead(self) -> Priority | None:
        """Whose jobs the thread of who asks may claim now; None if nobody's. Under the lock."""
        if not self._rests or self._ahead is not None or self._session.table.withdrawn:
            return None
        if self._confirms_at() <= time.monotonic():
            return None
        return self._what_may_go()

    def _end_ahead(self) -> None:
        """Take the answer to what was claimed ahead."""
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        try:
            self._take_answer(ahead.shard, ahead.flights, ahead.answer(), ahead.priority)
        except Exception as error:
            with self._session.lock:
                self._session.put_back(ahead.flights)
            if not isinstance(error, redis.exceptions.ResponseError):
                raise
            # The claim as it is made here finds what is to blame, or meets the same.

    def cut(self) -> None:
        """End whatever waits for a server that may never answer; for another thread to call."""
        self._servers.cut()
        self._alone.cut()

    def _has_work(self) -> bool:
        session = self._session
        if session.closed or session.tasks or session.table.withdrawn or session.abandoned:
            return True
        if self._ahead is not None or self._what_may_go() is not None or self._until_look() == 0.0:
            return True
        if self._alone.has_work:
            return True
        return bool(session.table.flights) and self._next_check <= time.monotonic()

    def _until_check(self) -> float | None:
        session, until = self._session, self._until_look()
        if not session.table.flights:
            return until
        due = self._next_check
        for priority, unsent in session.table.unsent.items():
            if unsent and session.may_send(priority):
                due = min(due, self._busy_until[priority])
        left = max(0.0, due - time.monotonic())
        return left if until is None else min(left, until)

    def _until_look(self) -> float | None:
        """Seconds until shards that are away, or tasks that wait for them, are tried again."""
        due = self._outages.due_in()
        if self._delayed:
            left = max(0.0, self._delayed[0][0] - time.monotonic())
            due = left if due is None else min(due, left)
        return due

    def _what_may_go(self) -> Priority | None:
        """Whose jobs can be sent now; None if nothing can. Locked."""
        session = self._session
        for priority, unsent in session.table.unsent.items():
            if (
                unsent
                and self._busy_until[priority] <= time.monotonic()
                and session.may_send(priority)
            ):
                return priority
        return None

    def _run_task(self, task: Task) -> None:
        if task[1].set_running_or_notify_cancel():
            self._run_running(task, time.monotonic())

    def _run_delayed(self, closing: bool) -> None:
        """Run tasks again that a shard was away for."""
        now = time.monotonic()
        delayed, self._delayed = self._delayed, []
        for due, began, task in delayed:
            if closing or due <= now:
                self._run_running(task, began)
            else:
                self._delayed.append((due, began, task))

    def _run_running(self, task: Task, began: float) -> None:
        session = self._session
        function, future = task
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
                    patient = time.monotonic() - began < TASK_PATIENCE
                    if patient and self._servers.may_return():
                        self._delayed.append((time.monotonic() + TASK_PAUSE, began, task))
                        return
                    with self._servers.in_step():
                        result = function(self._servers)
        except BaseException as error:
            future.set_exception(closed() if session.closing.is_set() else error)
        else:
            future.set_result(result)

    def _after_loss(self, error: Exception, lost_since: float | None) -> float | None:
        """The connection is gone or the server refuses: wait, or give up. Returns since when it is
        lost or not ready; None where it refuses for good, and so is there."""
        session = self._session
        now, shown = time.monotonic(), mask_url(session.options.url)
        if not (is_lost(error) or is_full(error)):
            refusal = _refusal(session.options.url, error)
            words, logged = self._refused
            if str(refusal) != words or now - logged >= REFUSAL_AGAIN:
                # A gateway's callers are not to hear it.
                logger.warning("what is asked is refused: %s", refusal)
                self._refused = str(refusal), now
            session.fail_everything(refusal)
            session.troubles.pop("server", None)
            return None  # it has answered
        since = now if lost_since is None else lost_since
        session.troubles["server"] = now, _why(error)
        self._next_check = 0.0  # what asks nothing does not find out whether it is back
        if now - since >= session.options.reconnect_timeout:
            if isinstance(error, REFUSALS):
                session.fail_everything(
                    ServerUnreachable(
                        f"{shown} has refused for {now - since:.0f} s: {why_not_now(error)}"
                    ),
                    hears=True,
                )
            else:
                self._alone.lose()
                session.fail_everything(
                    ServerUnreachable(
                        f"no answer from {shown} for {now - since:.0f} s: {error}. "
                        + remedy(session.options.url)
                    )
                )
            return since
        if lost_since is None:
            self._reasons.clear()
        if self._reasons.is_new(error):
            logger.warning("%s is lost or not ready: trying again (%s)", shown, error)
        if isinstance(error, ScriptsMissing):
            # A worker will load them, if there is one. Into a replica nobody does, and a failover
            # may have led here: the next connection is to the primary of then.
            self._servers.renew()
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                self._look_for_workers(now)
        else:
            self._alone_since = None  # workers may have to come back, too
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
        if session.table.withdrawn:
            for number, digest in withdraw(session, self._servers):
                self._outages.of(session.shards[number]).withdrawn.append((number, digest))
        if self._outages.due_in() == 0.0:
            self._look_after_outages()
        # Before each claim: who was told that the pool is another one may ask before this ends.
        while session.table.has_unsent() and self._confirm() and self._claim():
            pass
        if session.table.flights and self._next_check <= time.monotonic():
            self._check()
        if self._alone.has_work:
            self._alone.look_after(self._servers)

    def _confirm(self) -> bool:
        """See before a claim, now and then, that the model which the client knows is served.

        False where it is not: there is nothing to claim of it.
        """
        session = self._session
        now = time.monotonic()
        if now < self._confirms_at():
            return True
        if session.info is not None:
            session.near.enter(session.options.pool, session.info)
        current = self._read_info()
        if current is _AWAY:
            self._confirm_failed = time.monotonic()  # it may have taken long
            return True
        if current is not None and not is_known(session, current):
            may_leave = lies_elsewhere(session, current) or not self._are_served()
            if may_leave and look_at(session, self._servers, current):
                return False
        with session.lock:
            stale = not session.is_confirmed(now)
            session.confirmed = now
            ended = session.land_cached() if stale else []
        wake(ended)
        return True

    def _confirms_at(self) -> float:
        return max(self._session.confirmed, self._confirm_failed) + CONFIRMED_FOR / 2

    def _read_info(self) -> bytes | None:
        """What the pool says that it serves; `_AWAY` where that is away while others are served."""
        key = self._session.keys.info
        try:
            return get_string(self._servers.for_key(key), key)
        except (redis.exceptions.RedisError, OSError) as error:
            if not (self._servers.fails_apart and is_lost(error)):
                raise
            return _AWAY

    def _claim(self) -> bool:
        """Send one request's worth of flights; False when there was nothing to send."""
        session = self._session
        with session.lock:
            priority = self._what_may_go()
            if priority is None:
                return False
            most = min(CLAIM_MOST, session.may_send(priority))
            flights = session.table.take_unsent(most, CLAIM_BYTES, priority)
        away: list[Flight] = []
        try:
            for shard, mine in by_shard(self._session.shards, flights):
                if not self._apart(shard, mine, partial(self._claim_in, shard, priority=priority)):
                    away += mine
        except Exception:
            with session.lock:
                session.put_back(flights)
            raise
        if away:
            with session.lock:
                for flight in away:  # which must not be in the way of others
                    session.table.give_back(flight)
                session.will_not_be_counted(away)
        for flight in away:
            self._outages.of(session.shards[flight.shard]).claims.append(flight)
        return True

    def _apart(
        self,
        shard: ShardKeys,
        flights: Sequence[Flight],
        send: Callable[[Sequence[Flight]], None],
    ) -> bool:
        """Send what is of one shard; false where it is away while others are served."""

        def send_all(server: Server) -> bool:
            isolate(flights, send, self._refuse)
            return True

        return bool(self._servers.apart([shard], send_all))

    def _look_after_outages(self) -> None:
        """See whether shards that were away are back: all that waited for them goes on at once."""
        session = self._session
        for shard, outage in self._outages.looked():
            if shard not in session.shards:  # the pool lies elsewhere now
                self._outages.end(shard)
                session.troubles.pop(shard.number, None)
                continue
            number = shard.number
            look = partial(_look_for, shard.steady)
            found = self._servers.apart([shard], look, outage.note)
            if found is not None and self._check_all(shard, self._claimed(number, outage)):
                self._outages.end(shard)
                session.troubles.pop(number, None)
                with session.lock:
                    session.put_back(outage.claims)
                    session.table.withdrawn += outage.withdrawn
                continue
            now = time.monotonic()
            session.troubles[number] = now, f", whose shard {number} was away"
            if now - outage.since >= session.options.reconnect_timeout:
                outage.claims.clear()  # whoever asks from now on is told at once
                outage.withdrawn.clear()  # nobody is there to be told
                self._give_up(number, now - outage.since, outage.error)

    def _claimed(self, number: int, outage: Outage) -> list[Flight]:
        """The flights of a shard that its server may know of."""
        unclaimed, table = set(map(id, outage.claims)), self._session.table
        with self._session.lock:
            return [
                flight
                for flight in table.flights.values()
                if flight.sent and flight.shard == number and id(flight) not in unclaimed
            ]

    def _give_up(self, number: int, seconds: float, met: Exception | None) -> None:
        """Nobody has answered for a shard for too long, or all that was asked was refused."""
        session = self._session
        shown, place = mask_url(session.options.url), self._servers.place(session.shards[number])
        said, helps = "no answer from", remedy(session.options.url)
        if isinstance(met, REFUSALS):
            said, helps = "all is refused by", f"The last was: {why_not_now(met)}"
        error = ServerUnreachable(
            f"{said} {place or shown} for {seconds:.0f} s, where {shown} has shard {number} of "
            f"pool {session.options.pool!r}; its other shards may be well. {helps}"
        )
        with session.lock:
            ended = [
                call
                for flight in list(session.table.flights.values())
                if flight.shard == number
                for call in session.fail(flight, error)
            ]
        wake(ended)

    def _refuse(self, flight: Flight, error: redis.exceptions.RedisError) -> None:
        """The server takes this one in no company."""
        shown = mask_url(self._session.options.url)
        logger.warning("%s refused one prompt: %s", shown, error)
        with self._session.lock:
            self._session.will_not_be_counted([flight])
            ended = self._session.fail(flight, _refusal(self._session.options.url, error))
        wake(ended)

    def _claim_in(self, shard: ShardKeys, flights: Sequence[Flight], priority: Priority) -> None:
        arguments = claim_arguments(self._session, shard, flights, priority)
        assert arguments is not None  # there is no bound
        first = shard.stream(priority).key
        answer = script("enqueue")(self._servers.for_shard(shard), [first], arguments)
        self._take_answer(shard, flights, answer, priority)

    def _take_answer(
        self, shard: ShardKeys, flights: Sequence[Flight], answer: Any, priority: Priority
    ) -> None:
        session = self._session
        claims, fresh = answer
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
            now, uncounted = time.monotonic(), session.table.uncounted
            for flight, claim in zip(flights, claims, strict=True):
                if not flight.counted and claim in "hjq":
                    flight.counted = True
                    counted.append(claim)
                if uncounted:
                    session.table.will_not_be_counted(flight)
                if claim == "h":
                    there.append(flight.job.digest)
                elif claim in "fb":
                    flight.sent = False
                    (full if claim == "f" else damaged).append(flight)
                elif claim == "a":
                    name = (flight.job.adapter or "").rpartition("@")[0]
                    ended += session.fail(flight, adapter_gone(session, name))
                flight.since = now
            statistics = session.table.statistics
            statistics.cache_hits += counted.count("h")
            statistics.joined += counted.count("j")
            statistics.queued += counted.count("q")
            session.note_counted()
            if full:
                ended += self._wait_for_room(full, priority, now)
            if damaged:  # the stream: a worker mends it at its next heartbeat
                session.put_back(damaged)
                self._busy_until[priority] = now + random.uniform(0.1, 0.2)
        wake(ended)
        return there

    def _wait_for_room(
        self, full: list[Flight], priority: Priority, now: float
    ) -> list[PendingCall]:
        """The backlog is at its bound: the calls that this ends, if any. Under the lock."""
        session = self._session
        if session.options.when_busy == "raise":
            error = pool_busy(session)
            return [call for flight in full for call in session.fail(flight, error)]
        session.put_back(full)
        # The backlog drains at the workers' pace: ask again in a while, not at once.
        self._busy_until[priority] = now + random.uniform(0.01, 0.03)
        return []

    def _check(self) -> None:
        """Look after what is waited for: renew leases, find what was lost, see who is alive."""
        session = self._session
        every = session.check_every
        now = time.monotonic()
        self._next_check = now + every
        with contextlib.suppress(redis.exceptions.RedisError, OSError):  # Sentinels may be away
            self._servers.follow()
        with session.lock:
            flights = session.table.overdue(now, every, 10 * CHECK_MOST)
            for call in [c for flight in flights for c, _ in flight.waiters if c.is_left]:
                session.forget(call)
            flights = [flight for flight in flights if session.table.is_waiting(flight)]
        for shard, mine in by_shard(self._session.shards, flights):
            if not self._check_all(shard, mine):
                self._outages.of(shard)
        if session.table.flights:
            if now - self._looked > 4 * every:
                self._alone_since = None  # nobody waited meanwhile, or nobody could look
            self._looked = now
            self._look_for_workers(now)

    def _check_all(self, shard: ShardKeys, flights: Sequence[Flight]) -> bool:
        """Look after flights of one shard; false where it is away while others are served."""
        parts = (flights[i : i + CHECK_MOST] for i in range(0, len(flights), CHECK_MOST))
        return all(self._apart(shard, part, partial(self._check_in, shard)) for part in parts)

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
        return are_in(self._servers, self._session.shards)

    def _look_for_workers(self, now: float) -> None:
        session = self._session
        servers = self._servers
        if self._are_served():
            self._alone_since = None
            session.troubles.pop("workers", None)
            current = self._read_info()
            if current not in (None, _AWAY) and lies_elsewhere(session, current):
                look_at(session, servers, current)
            return
        if self._alone_since is None:
            self._alone_since = now
        current = self._read_info()
        if current is _AWAY:
            self._alone_since = None  # nobody can say what is served
            return
        if current is not None and look_at(session, servers, current):
            self._alone_since = None
            return
        alone_for = now - self._alone_since
        if alone_for >= LIFE_MS / 1000:  # else one may have yet to come back
            session.troubles["workers"] = now, ", which had no worker alive"
        if alone_for >= session.options.workers_timeout * 0.75:
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
                self._alone.leave(servers)
                self._farewell()
                for shard in session.shards:
                    servers.apart([shard], partial(_delete, shard.reply(session.id)))
        except Exception:  # cut off in the middle of a read, or an answer that makes no sense
            logger.debug("the server was gone when the client closed", exc_info=True)


def _refusal(url: str, error: Exception) -> LmpoolError:
    """What a refusal of the server means, as where a client comes."""
    try:
        with explained(url):
            raise error
    except LmpoolError as meant:
        return meant
    except Exception:  # no server's word
        return ServerRefused(f"{mask_url(url)}: {error}")


def _why(error: Exception) -> str:
    """Why nothing is answered, behind the pool's name. It tells no address: a gateway's callers are
    not to know it."""
    if is_full(error):
        return ", whose server's memory was full"
    if isinstance(error, REFUSALS):
        return ", whose server was not ready"
    return ", whose server did not answer"


def _look_for(key: str, server: Server) -> int:
    return server.exists(key)


def _delete(key: str, server: Server) -> int:
    return server.delete(key)
