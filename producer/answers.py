"""Reading answers from the server and handing them to whoever waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import redis.exceptions

from lmpool.commands import Values
from lmpool.errors import AnswerFormatError, LmpoolError, PromptFailed
from lmpool.keys import ShardKeys
from lmpool.producer.flights import Flight
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.session import Session
from lmpool.rows import ROW_HEADER_BYTES
from lmpool.servers import Servers
from lmpool.wants import Digest, Row, Want, decode_all

logger = logging.getLogger(__name__)

FETCH_BYTES: Final = 2 << 20
"""Answers read by one command."""
LARGE: Final = 32 << 10
"""Bytes from which a row is received into memory of its own: less is copied as quickly."""
SMALLEST: Final = 1 << 10
"""Bytes that any answer counts as at least: a command reads some thousands of them."""
MAX_TRIES: Final = 5
NOTHING: Final[Mapping[str, bytes | None]] = {}


class AnswerReader:
    """Reads answers with the connections of the thread that owns it."""

    def __init__(self, session: Session, servers: Servers) -> None:
        self._session = session
        self._servers = servers

    def fetch(
        self,
        shard: ShardKeys,
        digests: Sequence[Digest],
        known: Mapping[str, bytes | None] = NOTHING,
    ) -> int:
        """Read answers that are there and hand them out; ask again for those that are gone.

        Those that are `known`, by key, were read already. Returns how many bytes were read.
        """
        read = 0
        start = f"{shard.prefix}:result:"
        if known:
            there = {d: known[k] for d in digests if known.get(k := start + d.hex()) is not None}
            if there:
                read += self._take(shard, [*there], [*there.values()])
                digests = [digest for digest in digests if digest not in there]
        for part, sizes in self._parts(digests):
            server = self._servers.for_shard(shard)
            keys = [start + digest.hex() for digest in part]
            values = server.values(keys, sizes) if sizes else server.mget(keys)
            read += self._take(shard, part, values)
        return read

    def _take(self, shard: ShardKeys, digests: Sequence[Digest], values: Values) -> int:
        spoiled = self._hand_out(digests, values)
        if spoiled:
            self._compute_again(shard, spoiled)
        return sum(len(value) for value in values if value is not None)

    def _parts(self, digests: Sequence[Digest]) -> Iterator[tuple[list[Digest], list[int]]]:
        """Those that one command reads, few rows or many small answers; the sizes of large rows."""
        info, flights = self._session.info, self._session.table.flights
        assert info is not None
        rows: list[Digest] = []
        sizes: list[int] = []
        part: list[Digest] = []
        size = 0
        last: Want | None = None
        takes = SMALLEST
        for digest in digests:
            flight = flights.get(digest)
            if flight is not None:
                want = flight.job.want
                if want is not last:  # which many have in common
                    last, takes = want, max(SMALLEST, want.stored_bytes(info))
                if takes >= LARGE and isinstance(want, Row):
                    rows.append(digest)
                    sizes.append(takes + ROW_HEADER_BYTES)
                    if takes * len(rows) >= FETCH_BYTES:
                        yield rows, sizes
                        rows, sizes = [], []
                    continue
            part.append(digest)
            size += takes
            if size >= FETCH_BYTES:
                yield part, []
                part, size = [], 0
        if rows:
            yield rows, sizes
        if part:
            yield part, []

    def _hand_out(
        self, digests: Sequence[Digest], values: Values
    ) -> dict[Digest, AnswerFormatError]:
        """Give answers to whoever waits. Returns what was refused, and why."""
        session = self._session
        info, table = session.info, session.table
        assert info is not None
        ended: list[PendingCall] = []
        spoiled: dict[Digest, AnswerFormatError] = {}
        with session.lock:
            there: dict[int, tuple[Want, list[Digest], list[Any]]] = {}
            """What is stored, bytes or a large row's memory, by the want that it answers."""
            group: tuple[Want, list[Digest], list[Any]] | None = None
            for digest, value in zip(digests, values, strict=True):
                flight = table.flights.get(digest)
                if flight is None:
                    continue
                if value is not None:
                    want = flight.job.want
                    if group is None or group[0] is not want:  # which many have in common
                        group = there.setdefault(id(want), (want, [], []))
                    group[1].append(digest)
                    group[2].append(value)
                    continue
                flight.tries += 1
                if flight.tries <= MAX_TRIES:
                    table.resend(flight)
                else:
                    ended += session.fail(flight, _vanished(flight))
            for want, some, stored in there.values():
                cached = want.cached and session.cache.max_bytes
                for digest, answer in zip(some, decode_all(want, stored, info), strict=True):
                    if isinstance(answer, AnswerFormatError):
                        spoiled[digest] = answer
                        continue
                    if cached:
                        session.cache.put(digest, answer)
                    ended += table.land(digest, answer)
            if table.has_unsent():
                session.work.notify()
        wake(ended)
        return spoiled

    def _compute_again(self, shard: ShardKeys, spoiled: dict[Digest, AnswerFormatError]) -> None:
        """Delete values that are no answers, and ask for them anew; not without end."""
        session = self._session
        reason = next(iter(spoiled.values()))
        logger.warning("refused %d values that are no answers: %s", len(spoiled), reason)
        try:
            self._servers.for_shard(shard).delete(*map(shard.result, spoiled))
            deleted = True
        except redis.exceptions.NoPermissionError:
            deleted = False
        ended: list[PendingCall] = []
        with session.lock:
            for digest, error in spoiled.items():
                flight = session.table.flights.get(digest)
                if flight is None:
                    continue
                flight.tries += 1
                if deleted and flight.tries <= MAX_TRIES:
                    session.table.resend(flight)
                else:
                    ended += session.fail(flight, error)
            session.work.notify()
        wake(ended)


def _vanished(flight: Flight) -> LmpoolError:
    return PromptFailed(
        f"the result was gone {flight.tries - 1} times before it could be read: the server's "
        "memory is too small for the rows in use, or result_ttl too short"
    )
