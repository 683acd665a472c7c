"""The thread that reads a client's notices and fetches the rows they announce."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import redis

from lmpool.clock import to_ms
from lmpool.commands import Server
from lmpool.errors import (
    JobExpired,
    JobFormatError,
    LmpoolError,
    PromptFailed,
    UnknownAdapter,
)
from lmpool.producer.calls import Call, wake
from lmpool.producer.flights import Flight
from lmpool.producer.session import Session
from lmpool.server import is_lost, open_server
from lmpool.wire import Notice, read_notices

logger = logging.getLogger(__name__)

BLOCK: Final = 5.0
"""Seconds one read of the reply stream blocks."""


class Collector:
    """Owned by one thread, which `run` is."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._server: Server | None = None
        self._begun: Counter[str] = Counter()
        """How often each reply stream was made, as far as its beginnings were read."""

    def run(self) -> None:
        """Read until the client closes."""
        session = self._session
        server = open_server(session.options.url, blocks_for=BLOCK, name="lmpool-client")
        self._server = server
        failures = 0
        try:
            while not session.closing.is_set():
                if not session.lanes:
                    session.joined.wait()  # nothing can be waited for before the pool is known
                    continue
                try:
                    self._collect_once(server)
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
                    logger.exception("the client's collector failed")
                    session.fail_everything(LmpoolError(f"{type(error).__name__}: {error}"))
        finally:
            server.close()
            server.connection_pool.disconnect()

    def cut(self) -> None:
        """End a read that may be blocked on a connection that will never answer."""
        if self._server is not None:
            self._server.connection_pool.disconnect()

    def _collect_once(self, server: Server) -> None:
        session = self._session
        for reply, made in list(session.made.items()):
            if made > self._begun[reply]:
                # A stream made anew, whose beginning was not read: its ids may be smaller. Reading
                # another's again would give old errors to whoever asks the same prompt now.
                session.last_ids.pop(reply, None)
        streams = {
            lane.reply(session.id): session.last_ids.get(lane.reply(session.id), "0-0")
            for lane in session.lanes
        }
        answer = server.xread(streams, count=512, block=to_ms(BLOCK))
        notices: list[Notice] = []
        for name, entries in answer or ():
            for entry_id, fields in entries:
                notices += read_notices(fields)
                session.last_ids[name.decode()] = entry_id.decode()
                if b"hello" in fields:  # maybe before the sender knows that it made the stream
                    begun, made = self._begun[name.decode()], session.made[name.decode()]
                    self._begun[name.decode()] = max(begun + 1, made)
        self._take_notices(server, notices)

    def _take_notices(self, server: Server, notices: Sequence[Notice]) -> None:
        session = self._session
        ended: list[Call] = []
        if any(notice.status == "expired" for notice in notices):
            # Ours may be the clock that is wrong: it stands still while a machine sleeps.
            session.clock.set(*server.time())
        with session.lock:
            flights = session.table.flights
            done = [n.digest for n in notices if n.status == "ok" and n.digest in flights]
            for notice in notices:
                flight = session.table.flights.get(notice.digest)
                if notice.status == "ok" or flight is None:
                    continue
                error = _error_of(notice, flight)
                if isinstance(error, JobExpired):
                    if flight.deadline is None or flight.deadline > time.monotonic() + 0.05:
                        session.table.resend(flight)  # somebody joined who waits longer
                        continue
                    session.table.statistics.expired += 1
                    ended += session.table.fail(notice.digest, error)
                else:
                    ended += session.fail(flight, error)
            if any(session.table.unsent) or session.table.withdrawn:
                session.work.notify()
        wake(ended)
        if done:
            session.fetch(server, done)


def _error_of(notice: Notice, flight: Flight) -> LmpoolError:
    if notice.status == "expired":
        return JobExpired("the job's deadline passed before a worker ran it")
    if notice.status == "unknown_adapter":
        return UnknownAdapter(notice.error)
    if notice.status == "refused":
        return JobFormatError(notice.error)
    return PromptFailed(notice.error or f"the worker answered {notice.status}")
