"""The thread that reads a client's notices and fetches the answers they announce."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeAlias

import redis.exceptions

from lmpool.clock import to_ms
from lmpool.commands import Entry, Server
from lmpool.errors import (
    JobExpired,
)
from lmpool.keys import ShardKeys
from lmpool.pieces import piece_id
from lmpool.producer.answers import AnswerReader
from lmpool.producer.flights import Flight
from lmpool.producer.notices import DOUBTFUL, error_of
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.pieces import StreamCall
from lmpool.producer.session import Session
from lmpool.rows import LARGE
from lmpool.server import is_lost, senseless
from lmpool.servers import Servers
from lmpool.wants import Digest, Row
from lmpool.wire import Notice, read_done, read_notices

logger = logging.getLogger(__name__)

_Found: TypeAlias = Sequence[tuple[bytes, list[Entry]]] | None

DOUBTS_MOST: Final = 2

BEHIND_BYTES: Final = 256 << 10
"""Of the answers to one claim that are asked for before they are there: what is larger is received
in its place, which then saves as much as the round trip takes."""
BLOCK: Final = 5.0
"""Seconds one read of the reply stream blocks."""
TAKE_OFF_BYTES: Final = 2 << 20
"""Answers fetched after which their notices are taken off the reply stream: until then the server
keeps what these announce, and may need the room."""
TAKE_OFF_AFTER: Final = 0.05
"""Seconds after which those of fewer bytes are."""

PAUSE: Final = 0.1
"""Seconds after an answer that made no sense: the next may make none either."""


class Collector:
    """Owned by one thread, which `run` is."""

    def __init__(self, session: Session) -> None:
        self._session = session
        url = session.options.url
        self._servers = session.owned(Servers.of_url(url, blocks_for=BLOCK, name="lmpool-client"))
        self._shards: Sequence[ShardKeys] = ()
        """Those that it read last."""
        self._answers = AnswerReader(session, self._servers)
        self._begun: Counter[str] = Counter()
        """How often each reply stream was made, as far as its beginnings were read."""
        self._taken: dict[str, tuple[ShardKeys, str]] = {}
        """The last notice to be taken off, by its stream: its answers were fetched."""
        self._streamed: dict[str, dict[str, Flight]] = {}
        """What is streamed that each blocking read covers, by the prefix of its first shard."""
        self._fetched = 0
        """Bytes of answers since that was last done."""
        self._took_off = 0.0

    def run(self) -> None:
        """Read until the client closes."""
        session = self._session
        failures, told = 0, ""
        try:
            while not session.closing.is_set():
                if not session.shards:
                    session.joined.wait()  # nothing can be waited for before the pool is known
                    continue
                try:
                    with self._servers.in_step():
                        self._collect_once()
                    failures, told = 0, ""
                except (redis.exceptions.RedisError, OSError) as error:
                    if session.closing.is_set():
                        break
                    failures += 1
                    again = is_lost(error) or str(error) == told  # which may go on for ever
                    told = str(error)
                    level = logging.DEBUG if again else logging.WARNING
                    logger.log(level, "the reply stream could not be read: %s", error)
                    pause = min(1.0, 0.05 * 2 ** min(failures, 6))
                    session.closing.wait(pause * random.uniform(0.5, 1.0))
                except Exception as error:
                    if session.closing.is_set():
                        break  # cut off in the middle of a read
                    failure = senseless(session.options.url, error)
                    logger.warning("the client's collector failed: %s", failure)
                    logger.debug("which is", exc_info=error)
                    session.fail_everything(failure)
                    session.closing.wait(PAUSE)
        finally:
            self._servers.close()

    def get_behind(self, flights: Iterable[Flight]) -> None:
        """Ask for the answers to what was just claimed, behind the read that brings their notices:
        for the thread of who asks. Under the lock."""
        session, left = self._session, BEHIND_BYTES
        assert session.info is not None
        for flight in flights:
            shard, job = session.shards[flight.shard], flight.job
            server = self._servers.at_hand(shard)
            size = job.want.stored_bytes(session.info)
            if session.near.are_usual and size >= LARGE and isinstance(job.want, Row):
                continue
            if server is not None and size <= left:
                left -= size
                server.get_behind(shard.result(job.digest))

    def cut(self) -> None:
        """End a read that may be blocked on a connection that will never answer."""
        self._servers.cut()

    def _collect_once(self) -> None:
        session = self._session
        if self._shards is not session.shards:
            self._servers.forget([s for s in self._shards if s not in session.shards])
            self._shards = session.shards
        for reply, made in list(session.made.items()):
            if made > self._begun[reply]:
                # A stream made anew, whose beginning was not read: its ids may be smaller. Reading
                # another's again would give old errors to whoever asks the same prompt now.
                session.last_ids.pop(reply, None)
                self._taken.pop(reply, None)
        block = min(TAKE_OFF_AFTER if self._taken else BLOCK, self._servers.longest_block)
        ask = partial(self._ask, to_ms(block))
        try:
            for shards, found in self._servers.read(self._shards, ask, block, _left):
                self._take(shards, found)
        except redis.exceptions.ResponseError as error:
            if is_lost(error) or not any(self._streamed.values()):
                raise
            # Of what can be no pieces, or may not be read, the whole is read in the end.
            logger.warning("continuations cannot be read piece by piece: %s", error)
            for flight in chain.from_iterable(map(dict.values, self._streamed.values())):
                assert flight.pieces is not None
                flight.pieces.are_read = False
        self._take_off()

    def _ask(self, block: int, server: Server, shards: Sequence[ShardKeys]) -> _Found:
        """One blocking read: notices, and pieces of what is streamed."""
        session = self._session
        wanted = {
            reply: session.last_ids.get(reply, "0-0")
            for reply in (shard.reply(session.id) for shard in shards)
        }
        streamed = self._streamed_in(shards) if session.table.streamed else {}
        for key, flight in streamed.items():
            assert flight.pieces is not None
            wanted[key] = piece_id(flight.pieces.tokens)
        self._streamed[shards[0].prefix] = streamed
        return server.xread(wanted, count=512, block=block)

    def _take(self, shards: Sequence[ShardKeys], found: _Found) -> None:
        session = self._session
        replies = {shard.reply(session.id): shard for shard in shards}
        streamed = self._streamed.get(shards[0].prefix, {})
        done: list[tuple[ShardKeys, list[Digest]]] = []
        told: list[tuple[Flight, list[Entry]]] = []
        for name, entries in found or ():
            reply = name.decode()
            if reply in streamed:
                told.append((streamed[reply], entries))
                continue
            shard = replies[reply]
            errors: list[Notice] = []
            digests: list[Digest] = []
            for entry_id, fields in entries:
                if b"ok" in fields:
                    digests += read_done(fields)
                else:
                    errors += read_notices(fields)
                session.last_ids[reply] = entry_id.decode()
                if b"hello" in fields:  # maybe before the sender knows that it made the stream
                    self._begun[reply] = max(self._begun[reply] + 1, session.made[reply])
            if errors:
                self._take_errors(shard, errors)
            done.append((shard, digests))
        if told:
            self._take_pieces(told)
        for shard, digests in done:
            with session.near.reading:
                if digests:
                    self._fetched += session.near.settle()
                waited_for = [digest for digest in digests if digest in session.table.flights]
            if waited_for:
                server = self._servers.at_hand(shard)
                known = {} if server is None else server.behind
                self._fetched += self._answers.fetch(shard, waited_for, known)
            reply = shard.reply(session.id)
            self._taken[reply] = shard, session.last_ids[reply]

    def _take_off(self) -> None:
        """Take notices off whose answers were fetched, now and then."""
        now = time.monotonic()
        if self._fetched < TAKE_OFF_BYTES and now - self._took_off < TAKE_OFF_AFTER:
            return
        self._fetched, self._took_off = 0, now
        while self._taken:
            reply, (shard, last) = self._taken.popitem()
            ms, _, number = last.partition("-")
            minid = f"{ms}-{int(number) + 1}"
            self._servers.for_shard(shard).xtrim(reply, minid=minid, approximate=False)

    def _streamed_in(self, shards: Sequence[ShardKeys]) -> dict[str, Flight]:
        """The continuations of these shards whose pieces are read, by key."""
        session, by_number = self._session, {shard.number: shard for shard in shards}
        with session.lock:
            return {
                by_number[flight.shard].pieces(digest): flight
                for digest, flight in session.table.streamed.items()
                if flight.shard in by_number and flight.pieces and flight.pieces.are_read
            }

    def _take_pieces(self, told: Sequence[tuple[Flight, Sequence[Entry]]]) -> None:
        session, calls = self._session, []
        assert session.info is not None
        with session.lock:
            for flight, entries in told:
                assert flight.pieces is not None
                if flight.pieces.take(entries, session.info):
                    calls += [call for call, _ in flight.waiters if isinstance(call, StreamCall)]
        wake(calls)

    def _take_errors(self, shard: ShardKeys, notices: Sequence[Notice]) -> None:
        session = self._session
        ended: list[PendingCall] = []
        if any(notice.status == "expired" for notice in notices):
            # Ours may be the clock that is wrong: it stands still while a machine sleeps.
            session.clock.set(*self._servers.for_shard(shard).time())
        with session.lock:
            for notice in notices:
                flight = session.table.flights.get(notice.digest)
                if flight is None:
                    continue
                error = error_of(notice, flight)
                if isinstance(error, JobExpired):
                    if flight.deadline is None or flight.deadline > time.monotonic() + 0.05:
                        session.table.resend(flight)  # somebody joined who waits longer
                        continue
                    session.table.statistics.expired += 1
                    ended += session.table.fail(notice.digest, error)
                elif notice.status in DOUBTFUL and flight.doubts < DOUBTS_MOST:
                    flight.doubts += 1
                    session.table.resend(flight)
                else:
                    ended += session.fail(flight, error)
            if session.table.has_unsent() or session.table.withdrawn:
                session.work.notify_all()
        wake(ended)


def _left(shard: ShardKeys, error: Exception) -> None:
    """The read of one shard was lost, others go on: it is asked again, from the last notice on."""
