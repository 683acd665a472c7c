"""Handing out rows that lie in the memory of a worker of this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from lmpool.keys import ShardKeys
from lmpool.near_notices import NearNotice
from lmpool.producer.answers import Landing, bytes_of
from lmpool.producer.session import Session
from lmpool.producer.stacking import GoesOn, Taking
from lmpool.producer.waits import Future
from lmpool.row_ring import RowRingReader
from lmpool.rows import LARGE
from lmpool.servers import Servers
from lmpool.wants import Digest

ASK_EVERY: Final = 5.0
"""Seconds after which it is asked again whether a worker is this pool's that was not."""
ASKED_MOST: Final = 256


class NearAnswers(Landing):
    """Those of one client. Owned by the thread that is told of them."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._ours: set[str] = set()
        """Workers of the pool on this client's server: others of its name and model may be in the
        same neighbourhood."""
        self._asked: dict[str, float] = {}
        """When it was last asked of others."""
        self._taking: WeakValueDictionary[int, Taking] = WeakValueDictionary()
        """What takes the rows that were handed out last, by number, as long as its call does."""

    def hear(self, notice: NearNotice) -> None:
        """A worker has laid rows, and says that some of them are waited for here."""
        near, flights = self._session.near, self._session.table.flights
        waited_for = [digest for digest in notice.digests if digest in flights]
        ring = near.ring(notice.ring) if waited_for else None
        if ring is None or not self._is_ours(ring.owner):
            return
        with near.reading:
            near.read_bytes += self.take(ring, waited_for)

    def knows(self, worker: str) -> bool:
        """Whether it is known to be a worker of this pool. For any thread."""
        return worker in self._ours

    def help(self, goes_on: GoesOn) -> None:
        """Put the rows that were handed out where their callers have them, as long as this
        `goes_on`: it is the nearest to them."""
        while goes_on():
            try:
                _, taking = self._taking.popitem()
            except KeyError:  # there is none, or no more
                return
            taking.help(goes_on)

    def take(self, ring: RowRingReader, digests: Sequence[Digest]) -> int:
        """Hand out the large rows among these answers that lie in a worker's memory; all else is to
        be fetched once it is stored. Returns how many bytes were read."""
        read = 0
        for part, sizes in self._parts(digests, LARGE):
            rooms = self._lend(part, sizes) if sizes else []
            try:
                rows = [
                    (digest, row, room)
                    for digest, size, room in zip(part, sizes, rooms, strict=False)
                    if (row := ring.copy(digest, size, None if room is None else room[2]))
                    is not None
                ]
                if rows:
                    # What is no row here is judged where it is stored.
                    there, values, places = map(list, zip(*rows, strict=True))
                    self._note_taking([digest for digest, _, room in rows if room is None])
                    self.hand_out(there, values, places, are_near=True)
                    read += bytes_of([row for _, row, _ in rows])
            finally:
                self._give_back(rooms)
        return read

    def _note_taking(self, digests: Sequence[Digest]) -> None:
        """These were not copied to their places."""
        flights = self._session.table.flights
        for digest in digests:
            flight = flights.get(digest)
            call = None if flight is None else flight.call
            if call is not None and call.stack is not None:
                self._taking[id(call.stack)] = call.stack

    def _is_ours(self, worker: str) -> bool:
        """Whether it is known to be a worker of this pool; if not, that is asked."""
        if self.knows(worker):
            return True
        session, now = self._session, time.monotonic()
        if now - self._asked.get(worker, -ASK_EVERY) < ASK_EVERY:
            return False
        if len(self._asked) >= ASKED_MOST:
            self._asked.clear()
        self._asked[worker] = now
        future: Future[bool] = Future()
        future.add_done_callback(partial(self._learn, worker))
        with session.lock:
            if not session.closed and session.shards:
                session.tasks.append((partial(_is_alive, session.shards[0], worker), future))
                session.work.notify_all()
        return False

    def _learn(self, worker: str, asked: Future[bool]) -> None:
        if not asked.cancelled() and asked.exception() is None and asked.result():
            if len(self._ours) >= ASKED_MOST:
                self._ours.clear()  # some may be gone: those that are there are asked for again
            self._ours.add(worker)


def _is_alive(shard: ShardKeys, worker: str, servers: Servers) -> bool:
    return bool(servers.for_shard(shard).exists(shard.alive(worker)))
