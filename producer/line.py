"""The name under which callers ask alone, with all that they read by: its connection, its reply
stream, and its place among the processes of its machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from lmpool.commands import fields_of
from lmpool.exchange import BESIDE, NOTHING, Ear, Exchange, pack, waited_for
from lmpool.keys import ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.producer.near_place import NearPlace
from lmpool.rows import ROW_HEADER_BYTES, PackedRow
from lmpool.wants import Digest
from lmpool.wire import Job, Notice, read_notices

BLOCK_MS: Final = "5000"
"""Of one read of notices: longer than anybody waits for it."""
PATIENCE: Final = 0.001
"""Seconds for which a large row is waited for near, beyond twice what the last one took, before the
server is asked for the notice, too: of a prompt that failed it alone tells."""
PATIENCE_MOST: Final = 0.02
"""The same in all: beside a step that takes longer it is little to ask."""
CLEARS_WITHIN: Final = 0.001
"""Seconds in which that has come when the next answer is asked for: locks are held meanwhile."""
LEFT_MOST: Final = 32
"""Notices that nobody has read in a stream, before it is emptied."""

FIRST: Final = b"0-0"
"""Before all ids of a stream."""

_BYTES: Final = frozenset((bytes,))

Found: TypeAlias = bytes | memoryview | PackedRow | Notice
"""An answer as it is stored, or a row as it lies near; or why there is none."""
OTHERS: Final[Found] = b""
"""In place of a row: others were told of."""


class Line:
    """One such name. Used by one thread at a time; what goes otherwise than it mostly does spoils
    all of it, which is given up then."""

    def __init__(
        self,
        name: str,
        shard: ShardKeys,
        exchange: Exchange,
        info: ModelInfo,
        place: NearPlace | None,
        knows: Callable[[str], bool],
    ) -> None:
        """Large rows of the model `info` come to the `place`, from workers that `knows` says yes
        to."""
        self.name = name
        self.shard = shard
        self.place = place
        self.claim = b""
        """What the server has said of the last claim, a letter, until that is taken."""
        self.has_claimed = False
        self.is_hit = False
        """Whether the last answer was there before it was asked for."""
        self.is_found = True
        """Whether workers lay where the place is what was waited for there."""
        reply = shard.reply(name)
        self._take_off = pack(("XTRIM", reply, "MAXLEN", "0"))
        """Empties the stream."""
        self._read = "XREAD", "BLOCK", BLOCK_MS, "STREAMS", reply
        """Reads it, behind an id."""
        self._read_all = pack((*self._read, FIRST))
        self._exchange = exchange
        self._info = info
        self._knows = knows
        self._is_heard = True
        """Whether the server has said what becomes of the last claim."""
        self._passed_over = 0
        """Replies that nobody waits for, which come before that."""
        self._is_near = False
        """Whether the last claim was of a row that is waited for at the place."""
        self._is_queued = False
        """Whether that made a job of it: what another has asked for may have been laid before."""
        self._patience = 0.0
        self._left = 0
        """How many notices may be in the stream."""

    def is_clear(self) -> bool:
        """Whether nothing is to be read before a claim can be sent: what the server was asked in
        vain is mostly answered by now."""
        until = time.monotonic() + CLEARS_WITHIN
        replies = self._exchange.replies
        while self._passed_over and waited_for(replies(1, until)) != [NOTHING]:
            self._passed_over -= 1
        return not self._passed_over

    def begin(self, job: Job, is_near: bool) -> bool:
        """Say what comes before a claim; one of a row that comes near has a place. Whether all of
        it left."""
        self.claim, self.has_claimed, self._is_near = b"", True, is_near
        if is_near and self.place is not None:
            self.place.waits.add([job.digest])
        if self._left >= (LEFT_MOST if is_near else 1):
            self._left = 0
            self._passed_over += 1
            if not self._exchange.send(self._take_off):
                return False
        self._is_heard = False
        return True

    async def answer(self, job: Job, until: float, ear: Ear | None = None) -> Found | None:
        """What there is for a job once the server has said what becomes of its claim. None where it
        goes any other way, or the bell rang. Without an `ear` the thread waits."""
        began, exchange = time.monotonic(), self._exchange
        while self._passed_over:
            if await exchange.replies(1, until, ear) == [NOTHING]:
                return None
            self._passed_over -= 1
        (claimed,) = await exchange.replies(1, until, ear)
        if not self._has_heard(claimed):
            return None
        self.is_hit, self._is_queued = claimed[0] == b"h", claimed[0] == b"q"
        if self.is_hit:
            if not exchange.send(self._get(job) + self._take_off):
                return None
            value, taken_off = await exchange.replies(2, until, ear)
            return value if type(value) is bytes and type(taken_off) is int else None
        if self._is_near:
            return await self._near(job, began, until, ear)
        return await self._stored(job, claimed[1] != 0, until, ear)

    def hear(self, until: float) -> None:
        """Wait until the server has heard the last claim: or else that might come behind what
        withdraws it."""
        if not self._is_heard:
            self._has_heard(waited_for(self._exchange.replies(self._passed_over + 1, until))[-1])

    def take_claim(self) -> str:
        """What the server has said of the last claim, a letter; none where it was taken before."""
        claim, self.claim = self.claim, b""
        return claim.decode()

    def _has_heard(self, claimed: Any) -> bool:
        """Whether the server has said what becomes of the claim."""
        if not _is_list(claimed, 2) or claimed[0] not in (b"h", b"j", b"q"):
            return False
        self.claim, self._is_heard = claimed[0], True
        return True

    def leave(self) -> None:
        """Leave the place. Who reads there comes back, and is to `close` it."""
        if self.place is not None:
            self.place.leave()

    def close(self) -> None:
        """Leave the place, which nobody reads at any more."""
        self.leave()
        if self.place is not None:
            self.place.pipe.read()

    async def _stored(
        self, job: Job, is_fresh: bool, until: float, ear: Ear | None
    ) -> Found | None:
        """An answer that is fetched once it is told of, in a stream which `is_fresh` or empty."""
        exchange, read, get = self._exchange, self._read_all, self._get(job)
        while True:
            # A stream that is taken off to its end leaves nothing to be remembered. One that was
            # just made begins with a greeting, behind which the notice may come at any time.
            if not exchange.send(read + get if is_fresh else read + get + self._take_off):
                return None
            replies = await exchange.replies(2 if is_fresh else 3, until, ear)
            told, value = _told(replies[0]), replies[1]
            if told is None or not (is_fresh or type(replies[2]) is int):
                return None
            last, notices = told
            mine = notices.get(job.digest)
            if mine is not None:
                break
            read = pack((*self._read, last))
            is_fresh = True  # what was there was another's: it came late
        if is_fresh:
            if not exchange.send(self._take_off):
                return None
            (taken_off,) = await exchange.replies(1, until, ear)
            if type(taken_off) is not int:
                return None
        if mine.status != "ok":
            return mine
        return value if type(value) is bytes else None

    async def _near(self, job: Job, began: float, until: float, ear: Ear | None) -> Found | None:
        """A row that a worker of this machine lays, most likely: it is there before the server has
        it, which is asked only where that takes long."""
        exchange, place, read = self._exchange, self.place, self._read_all
        if place is None:
            return None
        patient_until, asks = min(until, began + self._patience), False
        while True:
            (told,) = await exchange.replies(
                1, until if asks else patient_until, ear, place.pipe.fileno
            )
            if told is BESIDE:
                row = self._laid(place, job)
                if row is OTHERS:
                    continue
                if row is not None:
                    took = time.monotonic() - began
                    self._patience = min(2 * took + PATIENCE, PATIENCE_MOST)
                    self._passed_over += asks
                    self._left += 1
                return row
            if asks:
                found = _told(told)
                if found is None:
                    return None
                last, notices = found
                read = pack((*self._read, last))
                mine = notices.get(job.digest)
                self._left = LEFT_MOST  # or else it would be told again, of the same prompt
                if mine is not None:
                    return await self._told_of(mine, place, job, until, ear)
            elif told is not NOTHING or time.monotonic() < patient_until:
                return None
            asks = exchange.send(read)
            if not asks:
                return None

    async def _told_of(
        self, notice: Notice, place: NearPlace, job: Job, until: float, ear: Ear | None
    ) -> Found | None:
        """What the server told of before anybody near did."""
        if notice.status != "ok":
            return notice
        row = OTHERS if place.pipe.is_empty() else self._laid(place, job)
        if row is not OTHERS:
            return row
        self.is_found = not self._is_queued
        is_sent = self._exchange.send(self._get(job))
        (value,) = await self._exchange.replies(1, until, ear) if is_sent else (NOTHING,)
        return value if type(value) is bytes else None

    def _laid(self, place: NearPlace, job: Job) -> Found | None:
        """The row that was told of at the place, `OTHERS` where that was of none but others; None
        where it is not to be had. Opens nothing: what a handler raises is not to be taken for what
        the system says."""
        notices = place.pipe.read()
        if notices is None:
            return None
        for notice in notices:
            if job.digest in notice.digests:
                ring = place.known(notice.ring)
                if ring is None or not self._knows(ring.owner):
                    return None
                size = job.want.stored_bytes(self._info) + ROW_HEADER_BYTES
                return ring.copy(job.digest, size)
        return OTHERS

    def _get(self, job: Job) -> bytes:
        return pack(("GET", self.shard.result(job.digest)))


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
        if len(values) % 2 or set(map(type, values)) - _BYTES:
            return None
        for notice in read_notices(fields_of(values)):
            notices[notice.digest] = notice
    return (last, notices) if last else None


def _is_list(found: Any, length: int) -> bool:
    return type(found) is list and len(found) == length
