"""What a client waits for: one flight for each digest, however many callers want it.

Pure bookkeeping, guarded by the client's lock; it sends nothing and wakes nobody.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lmpool.errors import LmpoolError
from lmpool.producer.calls import Ask, Call
from lmpool.wire import Row


@dataclass
class Statistics:
    """What one client has asked and how it was answered, since it was made.

    Each of `requests` prompts is answered by the local cache (`local_hits`), by the result cache
    (`cache_hits`), with another caller's computation (`joined`) or by one of its own (`queued`).
    """

    requests: int = 0
    local_hits: int = 0
    cache_hits: int = 0
    joined: int = 0
    queued: int = 0
    failed: int = 0
    expired: int = 0
    withdrawn: int = 0
    resubmitted: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)


class Flight:
    """A digest that somebody here waits for."""

    __slots__ = ("ask", "counted", "deadline", "later", "sent", "since", "tries", "waiters")

    def __init__(self, ask: Ask, now: float, later: bool = False) -> None:
        self.ask = ask
        self.later = later  # whether interactive jobs go first: all who wait must agree
        self.waiters: list[tuple[Call, int]] = []
        self.deadline: float | None = 0.0  # monotonic; None waits without end
        self.sent = False  # whether the server may know of it
        self.counted = False
        self.tries = 0
        self.since = now

    def extend(self, deadline: float | None) -> bool:
        """Wait at least until `deadline`; True when that is longer than before."""
        if self.deadline is None or (deadline is not None and deadline <= self.deadline):
            return False
        self.deadline = deadline
        return True


class FlightTable:
    """Flights by digest, and those that have yet to be sent."""

    def __init__(self, statistics: Statistics | None = None) -> None:
        self.flights: dict[bytes, Flight] = {}
        self.unsent: tuple[deque[Flight], deque[Flight]] = (deque(), deque())
        """What goes first, and what goes later."""
        self._counts = [0, 0]
        self.withdrawn: list[bytes] = []
        self.statistics = Statistics() if statistics is None else statistics

    def add(self, call: Call, now: float) -> None:
        """Let `call` wait for each of its prompts that has no row yet."""
        deadline = call.deadline
        flights, unsent = self.flights, self.unsent
        for place, ask in enumerate(call.asks):
            if call.rows[place] is not None:
                continue
            flight = flights.get(ask.digest)
            if flight is None:
                flight = flights[ask.digest] = Flight(ask, now, call.later)
                flight.deadline = deadline
                self._counts[call.later] += 1
                unsent[call.later].append(flight)
            else:
                self.statistics.joined += 1
                # The server's deadline must follow the longest wait.
                resend = flight.extend(deadline) and flight.sent
                if flight.later and not call.later:
                    # Where it was among those that go later, it is passed over.
                    flight.later, resend = False, True
                    self._counts[True] -= 1
                    self._counts[False] += 1
                if resend:
                    unsent[flight.later].append(flight)
            flight.waiters.append((call, place))

    def take_unsent(self, most: int, most_bytes: int, later: bool = False) -> list[Flight]:
        """Flights to be sent now, oldest first, as one request's worth."""
        taken: list[Flight] = []
        size = 0
        unsent = self.unsent[later]
        while unsent and len(taken) < most and size < most_bytes:
            flight = unsent.popleft()
            if flight.later == later and self.is_waiting(flight):
                flight.sent = True
                taken.append(flight)
                size += len(flight.ask.tokens)
        return taken

    def take_withdrawn(self) -> list[bytes]:
        """What the server is to forget now, without what somebody here waits for again."""
        withdrawn, self.withdrawn = self.withdrawn, []
        left = []
        for digest in withdrawn:
            flight = self.flights.get(digest)
            if flight is None:
                left.append(digest)
            else:
                flight.sent = True  # under its predecessor's name
        return left

    def under_way(self, later: bool) -> int:
        """How many flights the server may know of and has not answered, about."""
        return max(0, self._counts[later] - len(self.unsent[later]))

    def put_back(self, flights: Iterable[Flight]) -> None:
        """Flights whose sending failed: they go first again."""
        for flight in reversed(list(flights)):
            if self.is_waiting(flight):
                self.unsent[flight.later].appendleft(flight)

    def resend(self, flight: Flight) -> None:
        """The server lost this one: send it again."""
        if self.is_waiting(flight):
            flight.tries += 1
            self.statistics.resubmitted += 1
            self.unsent[flight.later].append(flight)

    def is_waiting(self, flight: Flight) -> bool:
        """Whether anybody still waits for it."""
        return self.flights.get(flight.ask.digest) is flight

    def land(self, digest: bytes, row: Row) -> list[Call]:
        """A row is there: the calls that this completes."""
        flight = self._pop(digest)
        complete = []
        if flight is not None:
            for call, place in flight.waiters:
                if call.rows[place] is None:
                    call.rows[place] = row
                    call.left -= 1
                    if call.left == 0:
                        complete.append(call)
        return complete

    def fail(self, digest: bytes, error: LmpoolError) -> list[Call]:
        """A prompt failed: the calls that this ends. Their other prompts are withdrawn."""
        flight = self._pop(digest)
        ended: dict[int, Call] = {}
        if flight is not None:
            for call, _ in flight.waiters:
                if not call.done:
                    call.error = error
                    ended[id(call)] = call
        for call in ended.values():
            self.forget(call)
        return list(ended.values())

    def forget(self, call: Call) -> int:
        """`call` waits no longer: the number of its prompts withdrawn as nobody else wants them."""
        withdrawn = 0
        if call.left == 0:
            return 0
        for digest in self._digests_of(call):
            flight = self.flights[digest]
            flight.waiters = [waiter for waiter in flight.waiters if waiter[0] is not call]
            if not flight.waiters:
                self._pop(digest)
                withdrawn += 1
                if flight.sent:
                    self.withdrawn.append(digest)
        self.statistics.withdrawn += withdrawn
        return withdrawn

    def _pop(self, digest: bytes) -> Flight | None:
        flight = self.flights.pop(digest, None)
        if flight is not None:
            self._counts[flight.later] -= 1
        return flight

    def _digests_of(self, call: Call) -> list[bytes]:
        wanted = {call.asks[i].digest for i, row in enumerate(call.rows) if row is None}
        return [digest for digest in wanted if digest in self.flights]

    def overdue(self, now: float, age: float, most: int) -> list[Flight]:
        """Sent flights nobody has looked after for `age` seconds, as of `now`: longest first."""
        found = [f for f in self.flights.values() if f.sent and now - f.since >= age]
        if len(found) > most:
            found = heapq.nsmallest(most, found, key=lambda flight: flight.since)
        for flight in found:
            flight.since = now
        return found
