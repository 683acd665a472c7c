"""A prompt that a blocking call asks by itself, claimed and read by the caller's own thread.

While a client has nothing else to do, its two threads would be woken for each such prompt, and wake
the caller in the end: longer, together, than a small model computes. So the caller says what they
would, on a connection and under a name that nobody else uses meanwhile, as another client might.
The flight is in the table as any other is. What does not go as it mostly does is theirs: the flight
goes back into the queue, name and connection are given up, and nothing of what was read counts. So
Ctrl-C, which may come between any two steps, leaves nothing half done that anybody goes on with.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final

import redis.exceptions

from lmpool.address import is_cluster, is_sentinel
from lmpool.bell import CAN_WAIT, Bell
from lmpool.exchange import Exchange, waited_for
from lmpool.interrupts import frees
from lmpool.keys import Priority
from lmpool.model_info import ModelInfo
from lmpool.neighbours import Neighbourhood
from lmpool.producer.answers import Landing
from lmpool.producer.claims import claim_ahead
from lmpool.producer.flights import Flight
from lmpool.producer.line import Found, Line
from lmpool.producer.loop_ear import LoopEar
from lmpool.producer.near_place import NearPlace
from lmpool.producer.notices import DOUBTFUL, error_of
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.session import GivenUp, Session
from lmpool.producer.stacking import LARGE
from lmpool.producer.withdrawal import withdraw_in
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.wants import Row
from lmpool.wire import Job, Notice

logger = logging.getLogger(__name__)

IN_A_ROW: Final = 8
"""Calls without company after which the next are read by who asks."""
IN_A_ROW_MOST: Final = 4096
"""The same where that fails again and again."""
ANSWERED_WITHIN: Final = 1.0
"""Seconds in which a server answers that is asked for no answer of anybody's."""
CONNECTS_AGAIN_AFTER: Final = 5.0
"""Seconds after a connection that was not to be had."""
CONNECTS_AGAIN_MOST: Final = 600.0
"""The same where that goes on: the client's threads are kept waiting meanwhile."""


class Alone:
    """What callers ask by themselves, one at a time. Under the session's lock, but for `read`."""

    def __init__(self, session: Session, knows: Callable[[str], bool]) -> None:
        """`knows` whether a worker of this machine is this pool's."""
        self._session = session
        self._knows = knows
        self._landing = Landing(session)
        self._servers: Servers | None = None
        self._bell: Bell | None = None
        self._ear: LoopEar | None = None
        """Of the event loop in which a prompt was read last."""
        self._line: Line | None = None
        """What callers ask and read by, until it is given up."""
        self._names = count(1)
        self._call: PendingCall | None = None
        """Who asks. It may have left without a word, if Ctrl-C came twice."""
        self._flight: Flight | None = None
        self._reads = False
        """Whether a caller's thread may be reading."""
        self._in_a_row = 0
        self._needed = IN_A_ROW
        """Doubled by each answer that was not to be had. What Ctrl-C or a deadline ended says
        nothing about the next one."""
        self._connects_at = -math.inf
        self._places_at = -math.inf
        """When a place is next looked for, after one that was not to be had."""
        self._pause = CONNECTS_AGAIN_AFTER

    # --- for who asks --------------------------------------------------------------------------

    def claim(self, call: PendingCall, priority: Priority | None) -> bool:
        """Claim the only prompt that this client waits for. Whether its caller is to `read` the
        answer; else it is the client's threads'. `priority` is that of what may go now, if any may.
        """
        (job,) = call.jobs
        session = self._session
        assert session.info is not None
        self._end_at_rest()
        if self._call is not None:
            if not self._is_read:
                self.give_up()
            return False
        is_large = job.want.stored_bytes(session.info) >= LARGE
        if len(session.shards) != 1 or (is_large and not self._comes_near(job)):
            return False
        self._in_a_row += 1
        line, servers = self._line, self._servers
        if line is None or servers is None or priority is None or session.given_up:
            return False
        flight = session.table.flights[job.digest]
        self._call, self._reads = call, True
        if not line.is_clear():
            self._call, self._reads = None, False
            return False
        ahead = claim_ahead(session, servers, priority, line.name)
        if ahead is None:
            self.give_up()
            return False
        self._flight, call.called_away = flight, self.call_away
        is_sent = line.begin(job, is_large)
        if is_sent:
            ahead.command.send()
            is_sent = ahead.command.is_sent
        if not is_sent:
            self._hand_over()
        return is_sent

    def _end_at_rest(self) -> None:
        """End what was called away too late for its loop, which stopped before it heard of that."""
        call, ear = self._call, self._ear
        if call is not None and call.done and ear is not None:
            ear.stop_at_rest()

    def _comes_near(self, job: Job) -> bool:
        """Whether a large row is likely to be laid where its caller finds it."""
        if not (isinstance(job.want, Row) and self._session.near.are_usual):
            return False
        if self._line is not None and self._line.place is None:
            if time.monotonic() < self._places_at:
                return False
            self.give_up()  # the next one is to have a place
        return True

    def has_company(self) -> None:
        """More is asked for. Who waits for the prompt that is read waits for no caller: one may be
        this thread's, in a signal's handler."""
        self._in_a_row = 0
        flight = self._flight
        if flight is not None and flight.others:
            self._count(flight)
            self._session.put_back([flight])

    @frees("_session.lock")
    def read(self, call: PendingCall, seconds: float | None) -> None:
        """Wait for the answer to what was claimed, for so many seconds at most. Where `call` is not
        done then, the client's threads see to it."""
        session, flight, line = self._session, self._flight, self._line
        if self._call is not call or flight is None or line is None:
            return
        most = session.check_every
        until = time.monotonic() + (most if seconds is None else min(seconds, most))
        found = None if call.done else waited_for(line.answer(flight.job, until))
        self._end(call, flight, line, found, time.monotonic() < until)

    @frees("_session.lock")
    def read_in(self, loop: asyncio.AbstractEventLoop, call: PendingCall) -> None:
        """`read` for a call that is awaited in the event loop of this thread, which wakes it."""
        flight, line, ear = self._flight, self._line, self._ear
        if self._call is not call or flight is None or line is None:
            return
        if ear is None or ear.loop is not loop:
            ear = self._ear = LoopEar(loop)
        call.called_away = ear.call_away
        until = time.monotonic() + self._session.check_every
        if call.done:
            self._end(call, flight, line, None, False)
            return
        end = partial(self._end_in_loop, ear, call, flight, line, until)
        ear.take(line.answer(flight.job, until, ear), end)
        self._reads = False
        ear.begin()

    @frees("_session.lock")
    def _end_in_loop(
        self,
        ear: LoopEar,
        call: PendingCall,
        flight: Flight,
        line: Line,
        until: float,
        found: Found | None,
        came_to_its_end: bool,
    ) -> None:
        with self._session.lock:
            if self._call is call:
                ear.leave()
            self._end(call, flight, line, found, came_to_its_end and time.monotonic() < until)

    def _end(
        self, call: PendingCall, flight: Flight, line: Line, found: Found | None, in_time: bool
    ) -> None:
        """What was claimed is read, or is the threads' to see to. `in_time`: nothing kept it from
        being read."""
        session = self._session
        with session.lock:
            if self._call is not call:
                return
            self._reads = False
            call.called_away = None
            if found is not None and self._land(flight, found):
                self._call = self._flight = None
                self._needed = IN_A_ROW
                if not line.is_found:
                    self.give_up()
                elif session.closed:
                    self.close()
            else:
                if in_time and not call.done and not _is_expired(found):
                    self._needed = min(2 * self._needed, IN_A_ROW_MOST)
                self._hand_over()

    def _land(self, flight: Flight, found: Found) -> bool:
        """Hand out what was found; whether the client's threads have nothing more to do."""
        session = self._session
        line = self._line
        self._count(flight)
        if not session.table.is_waiting(flight):
            session.will_not_be_counted([flight])
            return True
        if not isinstance(found, Notice):
            values: Any = [found]
            is_hit = line is not None and line.is_hit
            are_near = None if is_hit else not isinstance(found, bytes)
            return not self._landing.hand_out([flight.job.digest], values, are_near=are_near)
        if _is_expired(found) or found.status in DOUBTFUL:
            return False
        wake(session.fail(flight, error_of(found, flight)))
        return True

    def _count(self, flight: Flight) -> None:
        """Count what the server has said of the claim."""
        if self._line is not None:
            self._session.table.count(flight, self._line.take_claim())

    def _count_withdrawn(self, flight: Flight | None, line: Line) -> None:
        """The same of a claim that nobody waits for any more."""
        with self._session.lock:
            if flight is not None and not self._session.table.is_waiting(flight):
                self._session.table.count(flight, line.take_claim())

    # --- what goes otherwise -------------------------------------------------------------------

    def forget(self, call: PendingCall) -> None:
        """`call` waits no longer: others may."""
        if self._call is call:
            call.called_away = None
            if self._flight is not None:
                self._flight.leave(call)  # or else it would be asked for again
            ear = self._ear
            if ear is not None and ear.is_busy:
                if not ear.is_here:
                    ear.call_away()
                    return
                ear.leave()
            self._hand_over()

    def call_away(self) -> None:
        """Wake who reads: there is nothing to be waited for. For any thread."""
        bell = self._bell
        if self._reads and bell is not None:
            bell.ring()

    def give_up(self) -> None:
        """Nobody reads what was claimed under this name any more: it is withdrawn."""
        session, flight, line = self._session, self._flight, self._line
        self._line, self._reads, self._in_a_row = None, False, 0
        if line is not None:
            session.given_up.append(GivenUp(line, flight))
        if flight is not None:
            self._tell_waiters(flight)
        self._call = self._flight = None
        session.work.notify_all()
        if session.closed:
            if line is not None:
                line.close()
            self.close()

    def lose(self) -> None:
        """The server is gone: nothing is kept open for it."""
        with self._session.lock:
            if self._line is not None and not self._is_read:
                self.give_up()

    @property
    def _is_read(self) -> bool:
        """Whether somebody may be reading, whose connection nobody else ends."""
        return self._reads or (self._ear is not None and self._ear.is_busy)

    def _hand_over(self) -> None:
        """The client's threads are to see to what was claimed."""
        flight = self._flight
        if flight is not None:
            self._count(flight)
        self.give_up()
        if flight is not None:
            self._session.put_back([flight])

    def _tell_waiters(self, flight: Flight) -> None:
        """Tell who waits for it, where Ctrl-C came as the answer was handed out. Who asked may, in
        an event loop that goes on."""
        waiters = [call for call, _ in flight.waiters]
        if waiters and not self._session.table.is_waiting(flight):
            if not all(call.done for call in waiters):
                self._session.table.reinstate(flight)
            wake(call for call in waiters if call.done)

    # --- for the sender's thread ---------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether who asks alone may read by itself."""
        return self._line is not None

    @property
    def has_work(self) -> bool:
        """Whether there is something to be looked after."""
        return bool(self._session.given_up) or self._is_worth_it()

    def look_after(self, servers: Servers) -> None:
        """Withdraw what was given up, with the sender's connections; connect where that is worth
        it. Raises redis-py's exceptions where the server of the former is lost."""
        session = self._session
        with session.lock:
            left, session.given_up = session.given_up, []
            is_worth_it = self._is_worth_it()
        try:
            self._withdraw(servers, left)
        except (redis.exceptions.RedisError, OSError) as error:
            if is_lost(error):
                with session.lock:
                    session.given_up = left + session.given_up
                raise
            logger.debug("what was given up ends by itself: %s", error)
        if is_worth_it:
            self._connect()

    def leave(self, servers: Servers) -> None:
        """Leave nothing on the server, as the client closes."""
        session = self._session
        with session.lock:
            left, session.given_up = session.given_up, []
            if self._line is not None:
                left.append(GivenUp(self._line, self._flight, is_read=self._is_read))
        self._withdraw(servers, left)

    def _withdraw(self, servers: Servers, left: list[GivenUp]) -> None:
        """Say what nobody waits for under these names; what was said is taken from the list."""
        while left:
            line, flight, is_read = left[0]
            if is_read:
                line.leave()
            else:
                line.close()
                if self._bell is not None:
                    self._bell.quiet()
                    line.hear(time.monotonic() + ANSWERED_WITHIN)
                    self._count_withdrawn(flight, line)
            if not line.has_claimed:
                left.pop(0)
                continue
            client, shard = line.name, line.shard
            server = servers.for_shard(shard)
            digests = () if flight is None else (flight.job.digest,)
            withdraw_in(shard, client, digests, server)
            server.delete(shard.reply(client))
            left.pop(0)
        if self._servers is not None and self._line is None and not self._is_read:
            self._servers.renew()  # what was asked there is not to be answered

    def close(self) -> None:
        """End the connection, unless somebody reads: they do it then. For any thread."""
        if self._ear is not None:
            self._ear.call_away()
        servers, bell, line = self._servers, self._bell, self._line
        if not self._is_read:
            self._line = self._servers = self._bell = None
            if line is not None:
                line.close()
            if servers is not None:
                servers.close()
            if bell is not None:
                bell.close()

    def after_fork(self) -> None:
        """In a forked child, which is another client."""
        line, self._line = self._line, None
        if line is not None and line.place is not None:
            line.place.after_fork()

    def cut(self) -> None:
        """End a read that may wait for a server which never answers."""
        servers = self._servers
        if servers is not None:
            servers.cut()

    def _is_worth_it(self) -> bool:
        return (
            self._in_a_row >= self._needed
            and self._line is None
            and not self._is_read
            and CAN_WAIT
            and _is_plain(self._session.options.url)
            and len(self._session.shards) == 1
            and time.monotonic() >= self._connects_at
        )

    def _connect(self) -> None:
        session = self._session
        shard, info, url = session.shards[0], session.info, session.options.url
        if self._servers is None:
            self._servers = session.owned(
                Servers.of_url(url, name="lmpool-client", answers_within=ANSWERED_WITHIN)
            )
        name = f"{session.id}-{next(self._names)}"
        try:
            self._servers.renew()
            self._servers.for_shard(shard).ping()
            server = self._servers.at_hand(shard)
            if server is None or info is None or not server.may_go_ahead():
                raise redis.exceptions.ConnectionError("nobody but its own thread can wait for it")
        except (redis.exceptions.RedisError, OSError) as error:
            logger.debug("there is no connection for who asks alone: %s", error)
            self._connects_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, CONNECTS_AGAIN_MOST)
            return
        self._pause = CONNECTS_AGAIN_AFTER
        if self._bell is None:
            self._bell = Bell()
        self._bell.quiet()
        exchange = Exchange(server, self._bell)
        place = self._place_of(name, info) if session.near.are_usual else None
        with session.lock:
            self._line = Line(name, shard, exchange, info, place, self._knows)

    def _place_of(self, name: str, info: ModelInfo) -> NearPlace | None:
        """Where workers of this machine tell of large rows; None where there is no room for it."""
        pool = self._session.options.pool
        try:
            place = NearPlace(Neighbourhood.of_pool(pool, info.fingerprint8), name)
        except OSError as error:
            logger.debug("there is no place among the neighbours for who asks alone: %s", error)
            self._places_at = time.monotonic() + CONNECTS_AGAIN_MOST
            return None
        place.look()
        return place


def _is_expired(found: Found | None) -> bool:
    return isinstance(found, Notice) and found.status == "expired"


def _is_plain(url: str) -> bool:
    """Whether it is of one server, and of connections that other threads may wait for."""
    return not (is_cluster(url) or is_sentinel(url) or url.startswith("rediss"))
