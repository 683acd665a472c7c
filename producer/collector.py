"""The thread that reads a client's notices and fetches the answers they announce."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import redis.exceptions

from lmpool.clock import to_ms
from lmpool.commands import Entry, Server
from lmpool.errors import (
    JobExpired,
    JobFormatError,
    LmpoolError,
    PromptFailed,
    UnknownAdapter,
)
from lmpool.keys import ShardKeys
from lmpool.pieces import piece_id
from lmpool.producer.answers import AnswerReader
from lmpool.producer.flights import Flight
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.pieces import StreamCall
from lmpool.producer.session import Session
from lmpool.server import is_lost, senseless
from lmpool.servers import Servers
from lmpool.wants import Digest
from lmpool.wire import Notice, read_notices

logger = logging.getLogger(__name__)

DOUBTFUL: Final = ("refused", "unknown_adapter")
"""What others' jobs for the same digest may make a worker say: it is asked again."""
DOUBTS_MOST: Final = 2

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
        self._answers = AnswerReader(session, self._servers)
        self._begun: Counter[str] = Counter()
        """How often each reply stream was made, as far as its beginnings were read."""
        self._taken: dict[str, str] = {}
        """The last notice to be taken off, by reply stream: its answers were fetched."""
        self._fetched = 0
        """Bytes of answers since that was last done."""
        self._took_off = 0.0

    def run(self) -> None:
        """Read until the client closes."""
        session = self._session
        failures = 0
        try:
            while not session.closing.is_set():
                if not session.shards:
                    session.joined.wait()  # nothing can be waited for before the pool is known
                    continue
                try:
                    with self._servers.in_step():
                        self._collect_once()
                    failures = 0
                except (redis.exceptions.RedisError, OSError) as error:
                    if session.closing.is_set():
                        break
                    failures += 1
                    level = logging.DEBUG if is_lost(error) else logging.WARNING
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

    def cut(self) -> None:
        """End a read that may be blocked on a connection that will never answer."""
        self._servers.cut()

    def _collect_once(self) -> None:
        session = self._session
        for reply, made in list(session.made.items()):
            if made > self._begun[reply]:
                # A stream made anew, whose beginning was not read: its ids may be smaller. Reading
                # another's again would give old errors to whoever asks the same prompt now.
                session.last_ids.pop(reply, None)
                self._taken.pop(reply, None)
        # One blocking read covers what lies on one connection.
        for server, shards in self._servers.by_connection(session.shards):
            self._read(server, shards)

    def _read(self, server: Server, shards: Sequence[ShardKeys]) -> None:
        session = self._session
        replies = {shard.reply(session.id): shard for shard in shards}
        wanted = {reply: session.last_ids.get(reply, "0-0") for reply in replies}
        streamed = self._streamed(shards) if session.table.streamed else {}
        found = self._found(server, wanted, streamed, self._taken.keys().isdisjoint(replies))
        notices: list[Notice] = []
        done: list[tuple[ShardKeys, list[Digest]]] = []
        told: list[tuple[Flight, list[Entry]]] = []
        for name, entries in found or ():
            reply = name.decode()
            if reply in streamed:
                told.append((streamed[reply], entries))
                continue
            of_shard: list[Notice] = []
            for entry_id, fields in entries:
                of_shard += read_notices(fields)
                session.last_ids[reply] = entry_id.decode()
                if b"hello" in fields:  # maybe before the sender knows that it made the stream
                    self._begun[reply] = max(self._begun[reply] + 1, session.made[reply])
            notices += of_shard
            done.append((replies[reply], [n.digest for n in of_shard if n.status == "ok"]))
        if told:
            self._take_pieces(told)
        self._take_errors(server, [notice for notice in notices if notice.status != "ok"])
        for shard, digests in done:
            waited_for = [digest for digest in digests if digest in session.table.flights]
            if waited_for:
                self._fetched += self._answers.fetch(shard, waited_for)
            reply = shard.reply(session.id)
            self._taken[reply] = session.last_ids[reply]
        now = time.monotonic()
        if self._fetched >= TAKE_OFF_BYTES or now - self._took_off >= TAKE_OFF_AFTER:
            self._fetched, self._took_off = 0, now
            for reply in self._taken.keys() & replies.keys():
                ms, _, number = self._taken[reply].partition("-")
                server.xtrim(reply, minid=f"{ms}-{int(number) + 1}", approximate=False)
                del self._taken[reply]

    def _streamed(self, shards: Sequence[ShardKeys]) -> dict[str, Flight]:
        """The continuations of these shards whose pieces are read, by key."""
        session, by_number = self._session, {shard.number: shard for shard in shards}
        with session.lock:
            return {
                by_number[flight.shard].pieces(digest): flight
                for digest, flight in session.table.streamed.items()
                if flight.shard in by_number and flight.pieces and flight.pieces.are_read
            }

    def _found(
        self, server: Server, wanted: dict[str, str], streamed: dict[str, Flight], idle: bool
    ) -> Sequence[tuple[bytes, list[Entry]]] | None:
        """What one blocking read finds: notices, and pieces of what is streamed."""
        for key, flight in streamed.items():
            assert flight.pieces is not None
            wanted[key] = piece_id(flight.pieces.tokens)
        try:
            return server.xread(wanted, count=512, block=to_ms(BLOCK if idle else TAKE_OFF_AFTER))
        except redis.exceptions.ResponseError as error:
            if not streamed or is_lost(error):
                raise
            # Of what can be no pieces, or may not be read, the whole is read in the end.
            logger.warning("continuations cannot be read piece by piece: %s", error)
            for flight in streamed.values():
                assert flight.pieces is not None
                flight.pieces.are_read = False
            return None

    def _take_pieces(self, told: Sequence[tuple[Flight, Sequence[Entry]]]) -> None:
        session, calls = self._session, []
        assert session.info is not None
        with session.lock:
            for flight, entries in told:
                assert flight.pieces is not None
                if flight.pieces.take(entries, session.info):
                    calls += [call for call, _ in flight.waiters if isinstance(call, StreamCall)]
        wake(calls)

    def _take_errors(self, server: Server, notices: Sequence[Notice]) -> None:
        session = self._session
        if not notices:
            return
        ended: list[PendingCall] = []
        if any(notice.status == "expired" for notice in notices):
            # Ours may be the clock that is wrong: it stands still while a machine sleeps.
            session.clock.set(*server.time())
        with session.lock:
            for notice in notices:
                flight = session.table.flights.get(notice.digest)
                if flight is None:
                    continue
                error = _error_of(notice, flight)
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
                session.work.notify()
        wake(ended)


def _error_of(notice: Notice, flight: Flight) -> LmpoolError:
    if notice.status == "expired":
        return JobExpired("the job's deadline passed before a worker ran it")
    if notice.status == "unknown_adapter":
        return UnknownAdapter(notice.error)
    if notice.status == "refused":
        return JobFormatError(notice.error)
    return PromptFailed(notice.error or f"the worker answered {notice.status}")
