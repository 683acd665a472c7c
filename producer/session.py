"""What a client's threads share: the pool's shards, the flight table, the tasks. No I/O."""

from __future__ import annotations

import math
import re
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

from lmpool.address import Address, username
from lmpool.clock import ServerClock
from lmpool.errors import ClientClosed, LmpoolError, ServerUnreachable
from lmpool.interrupts import frees
from lmpool.keys import PoolKeys, Priority, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.producer.cache import AnswerCache
from lmpool.producer.flights import Flight, FlightTable, Statistics
from lmpool.producer.line import Line
from lmpool.producer.near_rows import NearRows
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.waits import Event, Future
from lmpool.servers import Servers
from lmpool.settings import ClientOptions

REPLY_TTL: Final = 30.0
FLIGHT_TTL: Final = 600.0
CHECK_EVERY: Final = 2.0
CONFIRMED_FOR: Final = 5.0
"""Seconds for which the pool is taken to serve what it did when that was last looked at: answers of
a model that it no longer serves, from the client's cache or the server's, are no older."""
COUNTED_WITHIN: Final = 1.0
"""Seconds from an answer until the server's word on its claim is given up, for the counters."""
CLAIM_BYTES: Final = 1 << 20
"""Of the jobs in one claim, about: their tokens, and what is wanted of them."""
UNDER_WAY_BYTES: Final = 64 << 20
"""Of the jobs of a client and priority that are under way, about: more wait at the client."""
CLAIM_MOST: Final = 512
"""Jobs in one claim: about 3 ms of the server's time, which is everybody's."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.]{1,64}")


class GivenUp(NamedTuple):
    """A client's name that is used no more, and what it may have claimed."""

    line: Line
    flight: Flight | None
    is_read: bool = False
    """Whether somebody may be reading there."""


Trouble = Literal["server", "workers"] | int
"""What something is wrong with; a shard by its number."""
Task = tuple[Callable[[Servers], Any], "Future[Any]"]


class Session:
    """One client of one pool, in one process. `lock` guards `table`, `tasks` and `closed`."""

    def __init__(self, options: ClientOptions, cache: AnswerCache, statistics: Statistics) -> None:
        self.options = options
        self.keys = PoolKeys(options.pool)
        self.clock = ServerClock()
        self.cache = cache
        self.id = client_id(options.url)
        self.info: ModelInfo | None = None
        self.shards: tuple[ShardKeys, ...] = ()
        self.table = FlightTable(statistics)
        self.lock: Any = threading.RLock()
        self.work = threading.Condition(self.lock)
        """Notified when the sender has something to do; nobody else waits on it. All are: where
        Ctrl-C came as it was, one may be among them that has gone on, and the next would be for it.
        """
        self.counted = Event()
        """Set when no answered flight has yet to be counted."""
        self.tasks: list[Task] = []
        self.given_up: list[GivenUp] = []
        """What names that are used no more have left on the server."""
        self.abandoned: deque[PendingCall] = deque()
        """Calls that the garbage collector ended: it may do so in a thread that holds `lock`."""
        self.closed = False
        self.closing = Event()
        self.joined = Event()
        """The pool's shards are known, or the client is closing."""
        self.on_forget: Callable[[PendingCall], object] = lambda call: None
        """Told of each call that waits no longer, under the lock."""
        self.made: Counter[str] = Counter()
        """How often each reply stream was made: again once it expired, or the server forgot it."""
        self.confirmed = -math.inf
        """When the pool was last known to serve what `info` says, on the monotonic clock."""
        self.troubles: dict[Trouble, tuple[float, str]] = {}
        """What the sender finds to be wrong until it finds that mended: when it last saw it, and
        what it is, in words behind the pool's name."""
        self.near = NearRows(self.id)
        self.last_ids: dict[str, str] = {}
        """The last notice read, by reply stream."""
        self._connections: list[Servers] = []

    def owned(self, servers: Servers) -> Servers:
        """Take connections of one thread for this client's: all go to another primary together.

        Or else one would tell a primary what another waits for at its predecessor.
        """
        servers.on_move(self._go_to)
        self._connections.append(servers)
        return servers

    def _go_to(self, primary: Address) -> None:
        for servers in self._connections:
            servers.go_to(primary)

    @property
    def is_interrupted(self) -> bool:
        """Whether this very thread holds the lock: what runs now is a signal's handler, or what the
        garbage collector found, in the middle of another call."""
        found: bool = self.lock._is_owned()
        return found

    def for_caller(self) -> Any:
        """The lock, for a thread that asks something. Raises `LmpoolError` in a signal's handler
        that came in the middle of another call of its thread's, which would wait for itself."""
        if self.is_interrupted:
            raise LmpoolError(
                "asked by a signal's handler that interrupted another call of the same client: set "
                "a flag there and ask afterwards, or ask in a thread of its own"
            )
        return self.lock

    @frees("lock")
    def read_statistics(self) -> dict[str, int]:
        """The counters, with all that was answered: a notice may be quicker than the server's word
        on the claim, which is waited for, though not for long."""
        interrupted = self.is_interrupted  # its thread has to go on before anything is counted
        until: float | None = None
        while True:
            with self.lock:
                uncounted = self.table.uncounted
                if until is None and uncounted:
                    until = max(uncounted.values()) + COUNTED_WITHIN
                left = 0.0 if until is None else until - time.monotonic()
                if left <= 0:
                    for flight in [*uncounted]:
                        self.table.will_not_be_counted(flight)
                if not uncounted or interrupted or self.closed:
                    return self.table.statistics.as_dict()
                self.counted.clear()
            self.counted.wait(left)

    def put_back(self, flights: Sequence[Flight]) -> None:
        """Flights whose sending failed: they go first again. Under the lock."""
        self.table.put_back(flights)
        self.will_not_be_counted(flights)

    def will_not_be_counted(self, flights: Iterable[Flight]) -> None:
        """The server says nothing of these claims, answered or not. Under the lock."""
        for flight in flights:
            self.table.will_not_be_counted(flight)
        self.note_counted()

    def note_counted(self) -> None:
        """Let `read_statistics` go on, if nothing is left for it to wait for. Under the lock."""
        if not self.table.uncounted:
            self.counted.set()

    def join(self, info: ModelInfo) -> None:
        """Take over what the pool serves."""
        with self.lock:
            self._take_over(info)
        self.joined.set()

    def move(self, info: ModelInfo, error: LmpoolError) -> list[PendingCall]:
        """Take over what the pool serves instead of what it did: the calls that this ends."""
        with self.lock:
            ended = self.end_all(error)
            self.table.withdrawn.clear()  # the new pool knows nothing of it
            if self.info is None or info.fingerprint != self.info.fingerprint:
                self.cache.clear()
            self._take_over(info)
        return ended

    def spread(self, info: ModelInfo) -> None:
        """Take over other shards or lanes of the same model: what is waited for is asked there."""
        with self.lock:
            self.table.withdrawn.clear()  # nobody reads there any more
            self._take_over(info)
            self.table.ask_again()

    def _take_over(self, info: ModelInfo) -> None:
        self.info = info
        self.shards = info.shard_keys(self.keys)
        self.table.placement = info.placement()

    @property
    def check_every(self) -> float:
        """Seconds after which what is waited for is looked after."""
        return min(CHECK_EVERY, max(0.1, self.options.workers_timeout / 4))

    def is_confirmed(self, now: float) -> bool:
        """Whether answers of the model `info` may be given out without looking at the pool."""
        return now - self.confirmed < CONFIRMED_FOR

    def land_cached(self) -> list[PendingCall]:
        """Answer what is unsent and in the cache: the calls that this ends. Under the lock."""
        ended = []
        for unsent in self.table.unsent.values():
            for flight in list(unsent):
                answer = None if flight.sent else self.cache.get(flight.job.digest)
                if answer is not None and self.table.is_waiting(flight):
                    if not flight.counted:
                        flight.counted = True
                        self.table.statistics.local_hits += 1
                    ended += self.table.land(flight.job.digest, answer)
        return ended

    def forget(self, call: PendingCall) -> bool:
        """`call` waits no longer: what nobody else wants is withdrawn. Under the lock.

        Returns whether it did wait.
        """
        self.on_forget(call)
        if call.done:
            return False
        call.error = LmpoolError("withdrawn")
        self.table.forget(call)
        return True

    def fail_all(self, error: LmpoolError) -> list[PendingCall]:
        """Nothing that is waited for will come: the calls that this ends. Under the lock."""
        return self.end_all(error, count_failed=True)

    def end_all(self, error: LmpoolError, *, count_failed: bool = False) -> list[PendingCall]:
        """Withdraw all that is waited for: the calls that this ends. Under the lock."""
        ended = []
        for digest in list(self.table.flights):
            flight = self.table.flights.get(digest)
            if flight is not None:
                self.table.statistics.withdrawn += 1
                self.table.statistics.failed += count_failed
                if flight.sent:
                    self.table.withdrawn.append((flight.shard, digest))
                ended += self.table.fail(digest, error)
        return ended

    def fail_everything(self, error: LmpoolError, *, hears: bool = False) -> None:
        """Tell every caller that nothing will come. A server that is not ready may still hear."""
        with self.lock:
            ended = self.fail_all(error)
            if isinstance(error, ServerUnreachable) and not hears:
                self.table.withdrawn.clear()  # nobody is there to be told
                for given in self.given_up:
                    given.line.close()
                self.given_up.clear()
        wake(ended)

    def fail(self, flight: Flight, error: LmpoolError) -> list[PendingCall]:
        """One prompt failed: the calls that this ends. Under the lock."""
        if not self.table.is_waiting(flight):
            return []  # its calls have ended with another prompt of theirs
        self.table.statistics.failed += 1
        return self.table.fail(flight.job.digest, error)

    def may_send(self, priority: Priority) -> int:
        """How many flights may be sent now: the client's jobs on the server have a bound.

        It is 0 until there is room for a good part of a request, and while they are too large
        together. Under the lock.
        """
        unsent = self.table.to_be_sent(priority)
        if self.info is None or not unsent:
            return unsent
        if self.table.bytes_sent[priority] >= UNDER_WAY_BYTES:
            return 0
        bound = self.info.client_backlog * len(self.shards)
        room = bound - self.table.under_way(priority)
        return room if room >= min(unsent, max(1, bound // 4)) else 0


def closed() -> ClientClosed:
    """The error of who asks a client that was closed, or waits for it."""
    return ClientClosed("this PooledLM was closed")


def client_id(url: str) -> str:
    """A name no other client has. It begins with the server's user, so that users can be kept from
    each other's notices."""
    user = username(url)
    return f"{user}-{uuid.uuid4().hex[:16]}" if _NAME.fullmatch(user) else uuid.uuid4().hex[:16]
