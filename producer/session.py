"""What a client's threads share: lanes, flight table, and how rows are handed out."""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import redis

from lmpool.address import username
from lmpool.clock import ServerClock
from lmpool.commands import Server
from lmpool.errors import LmpoolError, PromptFailed, RowFormatError, ServerUnreachable
from lmpool.keys import LaneKeys, PoolKeys, lane_of
from lmpool.model_info import ModelInfo
from lmpool.producer.cache import RowCache
from lmpool.producer.calls import Call, wake
from lmpool.producer.flights import Flight, FlightTable, Statistics
from lmpool.scripts import script
from lmpool.server import is_lost
from lmpool.settings import ClientOptions
from lmpool.wire import unpack_row

logger = logging.getLogger(__name__)

REPLY_TTL: Final = 30.0
FLIGHT_TTL: Final = 600.0
CLAIM_MOST: Final = 512
"""Jobs in one claim: about 3 ms of the server's time, which is everybody's."""
FETCH_BYTES: Final = 8 << 20
"""Rows read by one command."""
MAX_TRIES: Final = 5

_NAME: Final = re.compile(r"[A-Za-z0-9_.]{1,64}")

Task = tuple[Callable[[Server], Any], "Future[Any]"]


class Session:
    """One client of one pool, in one process. `lock` guards `table`, `tasks` and `closed`."""

    def __init__(self, options: ClientOptions, cache: RowCache, statistics: Statistics) -> None:
        self.options = options
        self.keys = PoolKeys(options.pool)
        self.clock = ServerClock()
        self.cache = cache
        self.id = client_id(options.url)
        self.info: ModelInfo | None = None
        self.lanes: tuple[LaneKeys, ...] = ()
        self.table = FlightTable(statistics)
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        """Notified when the sender has something to do; nobody else waits on it."""
        self.tasks: list[Task] = []
        self.abandoned: deque[Call] = deque()
        """Calls that the garbage collector ended: it may do so in a thread that holds `lock`."""
        self.closed = False
        self.closing = threading.Event()
        self.joined = threading.Event()
        """The pool's lanes are known, or the client is closing."""
        self.made: Counter[str] = Counter()
        """How often each reply stream was made: again once it expired, or the server forgot it."""
        self.last_ids: dict[str, str] = {}
        """The last notice read, by reply stream."""

    def join(self, info: ModelInfo) -> None:
        """Take over what the pool serves."""
        with self.lock:
            self.info = info
            self.lanes = self.keys.lanes(info.fingerprint8, info.lanes)
        self.joined.set()

    def move(self, info: ModelInfo, error: LmpoolError) -> list[Call]:
        """Take over what the pool serves instead of what it did: the calls that this ends."""
        with self.lock:
            ended = self.end_all(error)
            self.table.withdrawn.clear()  # the new pool knows nothing of it
            if self.info is None or info.fingerprint != self.info.fingerprint:
                self.cache.clear()
            self.info = info
            self.lanes = self.keys.lanes(info.fingerprint8, info.lanes)
        return ended

    def forget(self, call: Call) -> None:
        """`call` waits no longer: what nobody else wants is withdrawn. Under the lock."""
        if not call.done:
            call.error = LmpoolError("withdrawn")
            self.table.forget(call)

    def fail_all(self, error: LmpoolError) -> list[Call]:
        """Nothing that is waited for will come: the calls that this ends. Under the lock."""
        ended = self.end_all(error)
        self.table.statistics.failed += len(ended)
        return ended

    def end_all(self, error: LmpoolError) -> list[Call]:
        """Withdraw all that is waited for: the calls that this ends. Under the lock."""
        ended = []
        for digest in list(self.table.flights):
            flight = self.table.flights.get(digest)
            if flight is not None:
                self.table.statistics.withdrawn += 1
                if flight.sent:
                    self.table.withdrawn.append(digest)
                ended += self.table.fail(digest, error)
        return ended

    def fail_everything(self, error: LmpoolError) -> None:
        """Tell every caller that nothing will come."""
        with self.lock:
            ended = self.fail_all(error)
            if isinstance(error, ServerUnreachable):
                self.table.withdrawn.clear()  # nobody is there to be told
        wake(ended)

    def fail(self, flight: Flight, error: LmpoolError) -> list[Call]:
        """One prompt failed: the calls that this ends. Under the lock."""
        self.table.statistics.failed += 1
        return self.table.fail(flight.ask.digest, error)

    def may_send(self, later: bool) -> int:
        """How many flights may be sent now: the client's jobs on the server have a bound.

        It is 0 until there is room for a good part of a request. Under the lock.
        """
        unsent = len(self.table.unsent[later])
        if self.info is None or not unsent:
            return unsent
        bound = self.info.client_backlog * len(self.lanes)
        room = bound - self.table.under_way(later)
        return room if room >= min(unsent, max(1, bound // 4)) else 0

    def lane(self, digest: bytes) -> LaneKeys:
        """The lane of a digest."""
        if len(self.lanes) == 1:
            return self.lanes[0]
        return self.lanes[lane_of(bytes.fromhex(digest.decode()), len(self.lanes))]

    def by_lane(self, digests: Sequence[bytes]) -> dict[LaneKeys, list[bytes]]:
        """Digests by their lane."""
        if len(self.lanes) == 1:
            return {self.lanes[0]: list(digests)} if digests else {}
        lanes: dict[LaneKeys, list[bytes]] = {}
        for digest in digests:
            lanes.setdefault(self.lane(digest), []).append(digest)
        return lanes

    def withdraw(self, server: Server) -> None:
        """Tell the server what nobody here waits for any longer."""
        with self.lock:
            digests = self.table.take_withdrawn()
        try:
            for lane, chosen in self.by_lane(digests).items():
                for i in range(0, len(chosen), CLAIM_MOST):
                    part = chosen[i : i + CLAIM_MOST]
                    script("withdraw")(server, [lane.jobs], [lane.prefix, self.id, *part])
        except Exception as error:
            if is_lost(error):  # what is refused now would be refused again, at once
                with self.lock:
                    self.table.withdrawn = digests + self.table.withdrawn
            raise

    def fetch(self, server: Server, digests: Sequence[bytes]) -> None:
        """Read rows that are there and hand them out; ask again for those that are gone."""
        assert self.info is not None
        width = self.info.vocab_size * (2 if self.info.encoding == "bf16" else 4)
        step = max(1, FETCH_BYTES // width)
        for lane, chosen in self.by_lane(digests).items():
            for i in range(0, len(chosen), step):
                part = chosen[i : i + step]
                keys = [f"{lane.prefix}:result:{digest.decode()}" for digest in part]
                spoiled = self._hand_out(part, server.mget(keys))
                if spoiled:
                    self._compute_again(server, lane, spoiled)

    def _compute_again(
        self, server: Server, lane: LaneKeys, spoiled: dict[bytes, RowFormatError]
    ) -> None:
        """Delete values that are no rows, and ask for the rows anew; not without end."""
        reason = next(iter(spoiled.values()))
        logger.warning("refused %d values that are no rows: %s", len(spoiled), reason)
        try:
            server.delete(*(lane.result(digest.decode()) for digest in spoiled))
            deleted = True
        except redis.exceptions.NoPermissionError:
            deleted = False
        ended: list[Call] = []
        with self.lock:
            for digest, error in spoiled.items():
                flight = self.table.flights.get(digest)
                if flight is None:
                    continue
                if deleted and flight.tries < MAX_TRIES:
                    self.table.resend(flight)
                else:
                    ended += self.fail(flight, error)
            self.work.notify()
        wake(ended)

    def _hand_out(
        self, digests: Sequence[bytes], values: Sequence[bytes | None]
    ) -> dict[bytes, RowFormatError]:
        """Give rows to whoever waits. Answers what was refused, and why."""
        assert self.info is not None
        complete: list[Call] = []
        spoiled: dict[bytes, RowFormatError] = {}
        size = self.info.vocab_size
        with self.lock:
            table = self.table
            for digest, value in zip(digests, values, strict=True):
                flight = table.flights.get(digest)
                if flight is None:
                    continue
                if value is None:
                    if flight.tries < MAX_TRIES:
                        table.resend(flight)
                    else:
                        complete += self.fail(flight, _vanished(flight))
                    continue
                try:
                    row = unpack_row(value, size)
                    if (row.encoding == "u32") != (flight.ask.op == "sample"):
                        raise RowFormatError(f"{row.encoding} numbers for {flight.ask.op}")
                except RowFormatError as error:
                    spoiled[digest] = error
                    continue
                if flight.ask.op == "logprobs":
                    self.cache.put(digest, row)
                complete += table.land(digest, row)
            if any(table.unsent):
                self.work.notify()
        wake(complete)
        return spoiled


def client_id(url: str) -> str:
    """A name no other client has. It begins with the server's user, so that users can be kept from
    each other's notices."""
    user = username(url)
    return f"{user}-{uuid.uuid4().hex[:16]}" if _NAME.fullmatch(user) else uuid.uuid4().hex[:16]


def _vanished(flight: Flight) -> LmpoolError:
    return PromptFailed(
        f"the result was gone {flight.tries} times before it could be read: the server's memory "
        "is too small for the rows in use, or result_ttl too short"
    )
