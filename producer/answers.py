"""Reading answers from the server and handing them to whoever waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import redis.exceptions

from lmpool.commands import Values
from lmpool.errors import AnswerFormatError, LmpoolError, PromptFailed
from lmpool.keys import ShardKeys
from lmpool.producer.flights import Flight
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.session import Session
from lmpool.producer.stacking import LARGE, Stack
from lmpool.rows import LARGE as LAID
from lmpool.rows import ROW_HEADER_BYTES, PackedRow, f32_header
from lmpool.servers import Servers
from lmpool.wants import Digest, Row, Want, decode_all

logger = logging.getLogger(__name__)

FETCH_BYTES: Final = 2 << 20
"""Answers read by one command."""
SMALLEST: Final = 1 << 10
"""Bytes that any answer counts as at least: a command reads some thousands of them."""
MAX_TRIES: Final = 5
NOTHING: Final[Mapping[str, bytes | None]] = {}


Room: TypeAlias = tuple[Stack[Any], int, PackedRow]
"""Where a row is received in place: in whose block, which row of it, and what is to come there."""


class Landing:
    """Hands answers to whoever waits for them, for one thread."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def _lend(self, digests: Sequence[Digest], sizes: Sequence[int]) -> list[Room | None]:
        """Where rows are received at once, as far as whoever waits for them has a place."""
        flights = self._session.table.flights
        with self._session.lock:
            return [
                self._room_of(flights.get(digest), size)
                for digest, size in zip(digests, sizes, strict=True)
            ]

    def _room_of(self, flight: Flight | None, size: int) -> Room | None:
        call = None if flight is None else flight.call
        if flight is None or call is None or not isinstance(call.stack, Stack):
            return None
        stack, want, cache = call.stack, flight.job.want, self._session.cache
        if not isinstance(want, Row) or want.encoding != "f32":
            return None
        # What the caller may write to is not for the cache, nor a block for a few rows of it.
        if cache.max_bytes and not (
            stack.is_shared and cache.may_share(stack.nbytes) and 2 * call.placed >= len(call.jobs)
        ):
            return None
        memory = stack.lend(flight.place, size - ROW_HEADER_BYTES)
        if memory is None:
            return None
        return stack, flight.place, PackedRow(f32_header(memory.nbytes // 4), memory)

    def _give_back(self, rooms: Sequence[Room | None]) -> None:
        with self._session.lock:
            for room in rooms:
                if room is not None:
                    room[0].give_back(room[1])

    def _parts(
        self, digests: Sequence[Digest], large: int
    ) -> Iterator[tuple[list[Digest], list[int]]]:
        """Those that one command reads, few rows or many small answers; the sizes of rows that take
        `large` bytes and more."""
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
                if takes >= large and isinstance(want, Row):
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

    def hand_out(
        self,
        digests: Sequence[Digest],
        values: Values,
        rooms: Sequence[Room | None] = (),
        *,
        are_near: bool | None = False,
    ) -> dict[Digest, AnswerFormatError]:
        """Give answers to whoever waits. Returns what was refused, and why. `are_near` is None
        where that says nothing of others."""
        session = self._session
        info, table = session.info, session.table
        assert info is not None
        ended: list[PendingCall] = []
        spoiled: dict[Digest, AnswerFormatError] = {}
        with session.lock:
            there: dict[int, tuple[Want, list[Digest], list[Any]]] = {}
            """What is stored, bytes or a large row's memory, by the want that it answers."""
            group: tuple[Want, list[Digest], list[Any]] | None = None
            in_place = {
                digest: room
                for digest, value, room in zip(digests, values, rooms, strict=False)
                if room is not None and isinstance(value, PackedRow)
            }
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
                is_laid = isinstance(want, Row) and want.stored_bytes(info) >= LAID
                if is_laid and are_near is not None:
                    session.near.are_usual = are_near
                for digest, answer in zip(some, decode_all(want, stored, info), strict=True):
                    if isinstance(answer, AnswerFormatError):
                        spoiled[digest] = answer
                        continue
                    room = in_place.get(digest) if in_place else None
                    if cached:
                        session.cache.put(digest, answer, None if room is None else room[0].kept)
                    ended += table.land(digest, answer, room)
            if table.has_unsent():
                session.work.notify_all()
        wake(ended)
        return spoiled


class AnswerReader(Landing):
    """Reads answers with the connections of the thread that owns it."""

    def __init__(self, session: Session, servers: Servers) -> None:
        super().__init__(session)
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
        for part, sizes in self._parts(digests, LARGE):
            server = self._servers.for_shard(shard)
            keys = [start + digest.hex() for digest in part]
            if not sizes:
                read += self._take(shard, part, server.mget(keys))
                continue
            rooms = self._lend(part, sizes)
            try:
                memory = [None if room is None else room[2] for room in rooms]
                values = server.values(keys, sizes, memory)
                if not any(isinstance(value, PackedRow) for value in values):
                    self._give_back(rooms)  # another reply came
                    rooms = []
                read += self._take(shard, part, values, rooms)
            finally:
                self._give_back(rooms)
        return read

    def _take(
        self,
        shard: ShardKeys,
        digests: Sequence[Digest],
        values: Values,
        rooms: Sequence[Room | None] = (),
    ) -> int:
        spoiled = self.hand_out(digests, values, rooms)
        if spoiled:
            self._compute_again(shard, spoiled)
        return bytes_of(values)

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
            session.work.notify_all()
        wake(ended)


def bytes_of(values: Values) -> int:
    """How many bytes of answers were read."""
    return sum(
        value.nbytes if isinstance(value, PackedRow) else len(value)
        for value in values
        if value is not None
    )


def _vanished(flight: Flight) -> LmpoolError:
    return PromptFailed(
        f"the result was gone {flight.tries - 1} times before it could be read: the server's "
        "memory is too small for the rows in use, or result_ttl too short"
    )
