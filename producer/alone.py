"""A prompt that a blocking call asks by itself, claimed and read by the caller's own thread.

While a client has nothing else to do, its two threads would be woken for each such prompt, and wake
the caller in the end: longer, together, than a small model computes. So the caller says what they
would, on a connection and under a name that nobody else uses meanwhile, as another client might.
The flight is in the table as any other is. What does not go as it mostly does is theirs: the flight
goes back into the queue, name and connection are given up, and nothing of what was read counts. So
Ctrl-C, which may come between any two steps, leaves nothing half done that anybody goes on with.
"""

from __future__ import annotations

import logging
import math
import time
from itertools import count
from typing import Any, Final

import redis.exceptions

from lmpool.address import is_cluster, is_sentinel
from lmpool.bell import CAN_WAIT, Bell
from lmpool.commands import fields_of
from lmpool.exchange import Exchange, pack
from lmpool.interrupts import frees
from lmpool.keys import Priority, ShardKeys
from lmpool.producer.answers import Landing
from lmpool.producer.claims import claim_ahead
from lmpool.producer.flights import Flight
from lmpool.producer.notices import DOUBTFUL, error_of
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.session import GivenUp, Session
from lmpool.producer.stacking import LARGE
from lmpool.producer.withdrawal import withdraw_in
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.wants import Digest
from lmpool.wire import Notice, read_notices

logger = logging.getLogger(__name__)

IN_A_ROW: Final = 8
"""Calls without company after which the next are read by who asks."""
IN_A_ROW_MOST: Final = 4096
"""The same where that fails again and again."""
BLOCK_MS: Final = "5000"
"""Of one read of notices: longer than anybody waits for it."""
ANSWERED_WITHIN: Final = 1.0
"""Seconds in which a server answers that is asked for no answer of anybody's."""
CONNECTS_AGAIN_AFTER: Final = 5.0
"""Seconds after a connection that was not to be had."""
CONNECTS_AGAIN_MOST: Final = 600.0
"""The same where that goes on: the client's threads are kept waiting meanwhile."""


class Alone:
    """What callers ask by themselves, one at a time. Under the session's lock, but for `read`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._landing = Landing(session)
        self._servers: Servers | None = None
        self._bell: Bell | None = None
        self._exchange: Exchange | None = None
        """The connection, while it may be used."""
        self._names = count(1)
        self._name = ""
        """That of a client, until it is given up: its reply stream is empty between two calls."""
        self._call: PendingCall | None = None
        """Who asks. It may have left without a word, if Ctrl-C came twice."""
        self._flight: Flight | None = None
        self._claimed = b""
        """What the server has said of it, a letter, until that is counted."""
        self._unanswered: Exchange | None = None
        """Where that is still to come."""
        self._shard: ShardKeys | None = None
        """Where this name has asked."""
        self._reads = False
        """Whether a caller's thread may be reading, which nobody ends the connection of."""
        self._in_a_row = 0
        self._needed = IN_A_ROW
        self._connects_at = -math.inf
        self._pause = CONNECTS_AGAIN_AFTER

    # --- for who asks --------------------------------------------------------------------------

    def claim(self, call: PendingCall, priority: Priority | None) -> bool:
        """Claim the only prompt that this client waits for. Whether its caller is to `read` the
        answer; else it is the client's threads'. `priority` is that of what may go now, if any may.
        """
        (job,) = call.jobs
        session = self._session
        assert session.info is not None
        if self._call is not None:
            if not self._reads:
                self.give_up()
            return False
        if len(session.shards) != 1 or job.want.stored_bytes(session.info) >= LARGE:
            return False
        self._in_a_row += 1
        servers = self._servers
        if self._exchange is None or servers is None or priority is None or session.given_up:
            return False
        flight = session.table.flights[job.digest]
        self._call, self._shard, self._reads = call, session.shards[0], True
        ahead = claim_ahead(session, servers, priority, self._name)
        if ahead is None:
            self.give_up()
            return False
        self._flight, self._claimed, call.called_away = flight, b"", self.call_away
        self._unanswered = self._exchange
        ahead.command.send()
        if not ahead.command.is_sent:
            self._hand_over()
            return False
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
        session, flight = self._session, self._flight
        if self._call is not call or flight is None:
            return
        most = session.check_every
        until = time.monotonic() + (most if seconds is None else min(seconds, most))
        found = None if call.done else self._answer(flight, until)
        with session.lock:
            if self._call is not call:
                return
            self._reads = False
            call.called_away = None
            if found is not None and self._land(flight, found):
                self._call = self._flight = None
                self._needed = IN_A_ROW
                if session.closed:
                    self.close()
            else:
                if not call.done and time.monotonic() < until:
                    self._needed = min(2 * self._needed, IN_A_ROW_MOST)
                self._hand_over()

    def _answer(self, flight: Flight, until: float) -> bytes | Notice | None:
        """What the server has for us once it has said what becomes of the claim: an answer as it is
        stored, or why there is none. None where that goes any other way, or the call is done.
        """
        exchange, shard, digest = self._exchange, self._shard, flight.job.digest
        if exchange is None or shard is None:
            return None
        claimed = exchange.reply(until)
        if not _is_list(claimed, 2) or claimed[0] not in (b"h", b"j", b"q"):
            return None
        claim, is_fresh = claimed[0], claimed[1] != 0
        self._claimed, self._unanswered = claim, None
        get, reply = ("GET", shard.result(digest)), shard.reply(self._name)
        take_off = ("XTRIM", reply, "MAXLEN", "0")
        if claim == b"h":
            if not exchange.send(pack(get, take_off)):
                return None
            value, taken_off = exchange.reply(until), exchange.reply(until)
            return value if type(value) is bytes and type(taken_off) is int else None
        last: str | bytes = "0-0"
        while True:
            read = ("XREAD", "BLOCK", BLOCK_MS, "STREAMS", reply, last)
            # A stream that is taken off to its end leaves nothing to be remembered. One that was
            # just made begins with a greeting, behind which the notice may come at any time.
            if not exchange.send(pack(read, get) if is_fresh else pack(read, get, take_off)):
                return None
            told, value = _told(exchange.reply(until)), exchange.reply(until)
            if told is None or not (is_fresh or type(exchange.reply(until)) is int):
                return None
            last, notices = told
            mine = notices.get(digest)
            if mine is not None:
                break
            if not is_fresh:  # it may have been taken off
                return None
        if is_fresh:
            is_taken_off = exchange.send(pack(take_off)) and type(exchange.reply(until)) is int
            if not is_taken_off:
                return None
        if mine.status != "ok":
            return mine
        return value if type(value) is bytes else None

    def _land(self, flight: Flight, found: bytes | Notice) -> bool:
        """Hand out what was found; whether the client's threads have nothing more to do."""
        session = self._session
        self._count(flight)
        if not session.table.is_waiting(flight):
            session.will_not_be_counted([flight])
            return True
        if isinstance(found, bytes):
            values: list[bytes | None] = [found]
            return not self._landing.hand_out([flight.job.digest], values)
        if found.status == "expired" or found.status in DOUBTFUL:
            return False
        wake(session.fail(flight, error_of(found, flight)))
        return True

    def _count(self, flight: Flight) -> None:
        """Count what the server has said of the claim."""
        claim, self._claimed = self._claimed, b""
        if not claim or flight.counted:
            return
        flight.counted = True
        statistics = self._session.table.statistics
        if claim == b"h":
            statistics.cache_hits += 1
        elif claim == b"j":
            statistics.joined += 1
        else:
            statistics.queued += 1

    # --- what goes otherwise -------------------------------------------------------------------

    def forget(self, call: PendingCall) -> None:
        """`call` waits no longer: others may."""
        if self._call is call:
            call.called_away = None
            self._hand_over()

    def call_away(self) -> None:
        """Wake who reads: there is nothing to be waited for. For any thread."""
        bell = self._bell
        if self._reads and bell is not None:
            bell.ring()

    def give_up(self) -> None:
        """Nobody reads what was claimed under this name any more: it is withdrawn."""
        session, flight, shard = self._session, self._flight, self._shard
        self._exchange, self._reads, self._in_a_row = None, False, 0
        if shard is not None:
            digest = None if flight is None else flight.job.digest
            session.given_up.append(GivenUp(self._name, shard, digest, self._unanswered))
        if flight is not None:
            self._tell_others(flight)
        self._call = self._flight = self._shard = self._unanswered = None
        session.work.notify_all()
        if session.closed:
            self.close()

    def _hand_over(self) -> None:
        """The client's threads are to see to what was claimed."""
        flight = self._flight
        if flight is not None:
            self._count(flight)
        self.give_up()
        if flight is not None:
            self._session.put_back([flight])

    def _tell_others(self, flight: Flight) -> None:
        """Tell who waits for it, too, where Ctrl-C came as the answer was handed out."""
        others = [call for call, _ in flight.others or ()]
        if others and not self._session.table.is_waiting(flight):
            if not all(call.done for call in others):
                self._session.table.reinstate(flight)
            wake(call for call in others if call.done)

    # --- for the sender's thread ---------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether who asks alone may read by itself."""
        return self._exchange is not None

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
            if self._shard is not None:
                digest = None if self._flight is None else self._flight.job.digest
                left.append(GivenUp(self._name, self._shard, digest))
        self._withdraw(servers, left)

    def _withdraw(self, servers: Servers, left: list[GivenUp]) -> None:
        """Say what nobody waits for under these names; what was said is taken from the list."""
        while left:
            client, shard, digest, unanswered = left[0]
            if unanswered is not None and self._bell is not None:
                self._bell.quiet()
                # Or else it might be claimed behind this.
                unanswered.reply(time.monotonic() + ANSWERED_WITHIN)
            server = servers.for_shard(shard)
            withdraw_in(shard, client, () if digest is None else (digest,), server)
            server.delete(shard.reply(client))
            left.pop(0)
        if self._servers is not None and self._exchange is None and not self._reads:
            self._servers.renew()  # what was asked there is not to be answered

    def close(self) -> None:
        """End the connection, unless somebody reads: they do it then. For any thread."""
        servers, bell = self._servers, self._bell
        if not self._reads:
            self._exchange = self._servers = self._bell = None
            if servers is not None:
                servers.close()
            if bell is not None:
                bell.close()

    def cut(self) -> None:
        """End a read that may wait for a server which never answers."""
        servers = self._servers
        if servers is not None:
            servers.cut()

    def _is_worth_it(self) -> bool:
        return (
            self._in_a_row >= self._needed
            and self._exchange is None
            and not self._reads
            and CAN_WAIT
            and _is_plain(self._session.options.url)
            and len(self._session.shards) == 1
            and time.monotonic() >= self._connects_at
        )

    def _connect(self) -> None:
        session = self._session
        shard, url = session.shards[0], session.options.url
        if self._servers is None:
            self._servers = session.owned(
                Servers.of_url(url, name="lmpool-client", answers_within=ANSWERED_WITHIN)
            )
        try:
            self._servers.renew()
            self._servers.for_shard(shard).ping()
            server = self._servers.at_hand(shard)
            if server is None or not server.may_go_ahead():
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
        with session.lock:
            self._name = f"{session.id}-{next(self._names)}"
            self._exchange = Exchange(server, self._bell)


def _told(read: Any) -> tuple[bytes, dict[Digest, Notice]] | None:
    """The last id of what a blocking read brought, and its notices; None where it is no such."""
    if type(read) is dict:  # as RESP3 says it
        read = [*map(list, read.items())]
    if not _is_list(read, 1) or not _is_list(read[0], 2) or type(read[0][1]) is not list:
        return None
    last, notices = b"", {}
    for entry in read[0][1]:
        if not _is_list(entry, 2) or type(entry[0]) is not bytes or type(entry[1]) is not list:
            return None
        last, values = entry
        if len(values) % 2 or not all(type(value) is bytes for value in values):
            return None
        for notice in read_notices(fields_of(values)):
            notices[notice.digest] = notice
    return (last, notices) if last else None


def _is_list(found: Any, length: int) -> bool:
    return type(found) is list and len(found) == length


def _is_plain(url: str) -> bool:
    """Whether it is of one server, and of connections that other threads may wait for."""
    return not (is_cluster(url) or is_sentinel(url) or url.startswith("rediss"))
