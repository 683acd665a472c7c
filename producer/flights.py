"""What a client waits for: one flight for each digest, however many callers want it.

Pure bookkeeping, guarded by the client's lock; it sends nothing and wakes nobody.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from lmpool.affinity import Placement
from lmpool.errors import LmpoolError
from lmpool.keys import PRIORITIES, Priority
from lmpool.producer.pending import PendingCall
from lmpool.producer.pieces import Pieces, StreamCall
from lmpool.producer.stacking import STACKED, Stack
from lmpool.rows import EncodedRow
from lmpool.wants import Answer, Digest, Stream
from lmpool.wire import Job

PASSED_OVER: Final = 1024
"""Flights of a queue that nobody waits for any more, and as many as there are others: with more
they are taken out."""


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

    __slots__ = (
        "call", "counted", "deadline", "doubts", "job", "lane", "others", "pieces", "place",
        "priority", "queued", "sent", "shard", "since", "takes", "trace", "tries",
    )  # fmt: skip

    def __init__(
        self,
        job: Job,
        call: PendingCall,
        place: int,
        now: float,
        shard: int,
        lane: int,
    ) -> None:
        self.job = job
        self.call: PendingCall | None = call
        """Who asked first, unless they wait no longer."""
        self.place = place
        """Which of that call's jobs it is."""
        self.others: list[tuple[PendingCall, int]] | None = None
        """Who joined, with places: mostly nobody."""
        self.shard = shard
        self.lane = lane
        self.priority: Priority = call.priority  # "batch" only while all who wait agree
        self.deadline = call.deadline  # monotonic; None waits without end
        self.queued = True  # whether it is to be sent, by the queue of its priority
        self.sent = False  # whether the server may know of it
        self.takes = 0  # bytes of the job, once that was sent
        self.counted = False
        self.tries = 0
        self.doubts = 0  # notices that said what others may have made a worker say
        self.since = now
        self.trace = call.trace  # of the call that asked first
        self.pieces = Pieces(job.want) if type(job.want) is Stream else None

    @property
    def waiters(self) -> list[tuple[PendingCall, int]]:
        """The calls that wait for it, each with its place."""
        first = [] if self.call is None else [(self.call, self.place)]
        return first + self.others if self.others else first

    def join(self, call: PendingCall, place: int) -> None:
        """Let one more call wait for it."""
        if self.others is None:
            self.others = []
        self.others.append((call, place))

    def leave(self, call: PendingCall) -> bool:
        """`call` waits no longer; whether nobody does."""
        if self.call is call:
            self.call = None
        if self.others:
            self.others = [waiter for waiter in self.others if waiter[0] is not call]
        return self.call is None and not self.others

    def extend(self, deadline: float | None) -> bool:
        """Wait at least until `deadline`; True when that is longer than before."""
        if self.deadline is None or (deadline is not None and deadline <= self.deadline):
            return False
        self.deadline = deadline
        return True


class FlightTable:
    """Flights by digest, and those that have yet to be sent."""

    def __init__(self, statistics: Statistics | None = None) -> None:
        self.flights: dict[Digest, Flight] = {}
        self.streamed: dict[Digest, Flight] = {}
        """Those of `flights` whose pieces are read as they come."""
        self.unsent: dict[Priority, deque[Flight]] = {priority: deque() for priority in PRIORITIES}
        """Those to be sent, in order, among others that are passed over as they are not `queued` by
        this priority."""
        self._counts: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)
        self._queued: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)
        self.bytes_sent: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)
        """Of the jobs of flights that are under way, about."""
        self.withdrawn: list[tuple[int, Digest]] = []
        """What the server is to forget, by shard."""
        self.uncounted: dict[Flight, float] = {}
        """Those that were answered before the server's word on their claims was read, and when."""
        self.placement = Placement()
        self.statistics = Statistics() if statistics is None else statistics

    def add(self, call: PendingCall, now: float) -> None:
        """Let `call` wait for each of its jobs that has no answer yet."""
        deadline, priority = call.deadline, call.priority
        flights, placement = self.flights, self.placement
        place_of, append = placement.of, self.unsent[priority].append
        shard = lane = 0
        jobs = call.jobs
        answers = call.answers if call.left < len(jobs) else ()
        before = len(flights)
        for place, job in enumerate(jobs):
            if answers and answers[place] is not None:
                continue
            digest = job.digest
            flight = flights.get(digest)
            if flight is None:
                if not placement.is_one:
                    shard, lane = place_of(job.tokens, job.adapter)
                flight = flights[digest] = Flight(job, call, place, now, shard, lane)
                self._counts[priority] += 1
                self._queued[priority] += 1
                append(flight)
                if flight.pieces is not None:
                    self.streamed[digest] = flight
            else:
                self.statistics.joined += 1
                flight.join(call, place)
                # The server's deadline must follow the longest wait.
                resend = flight.extend(deadline) and flight.sent
                if flight.priority != priority == "interactive":
                    self._unqueue(flight)
                    self.give_back(flight)
                    flight.priority, resend = "interactive", True
                    self._counts["batch"] -= 1
                    self._counts["interactive"] += 1
                if resend:
                    self._queue(flight)
            if flight.pieces is not None and isinstance(call, StreamCall):
                call.pieces = flight.pieces
        if call.stack is not None:
            call.placed = len(flights) - before

    def take_unsent(
        self, most: int, most_bytes: int, priority: Priority = "interactive"
    ) -> list[Flight]:
        """Flights to be sent now, oldest first, as one request's worth."""
        taken: list[Flight] = []
        size = 0
        unsent = self.unsent[priority]
        while unsent and len(taken) < most and size < most_bytes:
            flight = unsent[0]  # until it is among those taken: Ctrl-C may come between
            if flight.queued and flight.priority == priority and self.is_waiting(flight):
                flight.sent = True
                taken.append(flight)
                flight.queued = False
                self._queued[priority] -= 1
                job = flight.job
                flight.takes = len(job.tokens) + job.want.travelling_bytes()
                self.bytes_sent[priority] += flight.takes
                size += flight.takes
            unsent.popleft()
        return taken

    def give_back(self, flight: Flight) -> None:
        """The server does not have the job, or not for certain: it takes no bytes there."""
        self.bytes_sent[flight.priority] -= flight.takes
        flight.takes = 0

    def take_withdrawn(self) -> list[tuple[int, Digest]]:
        """What the server is to forget now, without what somebody here waits for again."""
        withdrawn, self.withdrawn = self.withdrawn, []
        left = []
        for shard, digest in withdrawn:
            flight = self.flights.get(digest)
            if flight is None:
                left.append((shard, digest))
            else:
                flight.sent = True  # under its predecessor's name
        return left

    def under_way(self, priority: Priority) -> int:
        """How many flights the server may know of and has not answered."""
        return max(0, self._counts[priority] - self._queued[priority])

    def to_be_sent(self, priority: Priority) -> int:
        """How many flights are to be sent."""
        return max(0, self._queued[priority])

    def has_unsent(self) -> bool:
        """Whether anything is to be sent."""
        return any(self._queued.values())

    def put_back(self, flights: Iterable[Flight]) -> None:
        """Flights whose sending failed: they go first again."""
        for flight in reversed(list(flights)):
            if self.is_waiting(flight):
                self._queue(flight, first=True)

    def ask_again(self) -> None:
        """All is to be sent, where it belongs now: the shards are others."""
        for flight in self.flights.values():
            flight.shard, flight.lane = self.placement.of(flight.job.tokens, flight.job.adapter)
            self.statistics.resubmitted += flight.sent
            self._queue(flight)

    def resend(self, flight: Flight) -> None:
        """The server lost this one: send it again."""
        if self.is_waiting(flight):
            self.statistics.resubmitted += 1
            self._queue(flight)

    def reinstate(self, flight: Flight) -> None:
        """Wait for this one again, which Ctrl-C came to as its answer was handed out."""
        self.flights[flight.job.digest] = flight
        self._counts[flight.priority] += 1
        self._queue(flight)

    def _queue(self, flight: Flight, *, first: bool = False) -> None:
        if not flight.queued:
            self.give_back(flight)
            flight.queued = True
            self._queued[flight.priority] += 1
            unsent = self.unsent[flight.priority]
            (unsent.appendleft if first else unsent.append)(flight)

    def _unqueue(self, flight: Flight) -> None:
        """It is not to be sent, by its priority: where it stands in the queue it is passed over."""
        if flight.queued:
            flight.queued = False
            priority = flight.priority
            left = self._queued[priority] = self._queued[priority] - 1
            unsent = self.unsent[priority]
            if len(unsent) > PASSED_OVER + 2 * left:
                kept = [f for f in unsent if f.queued and f.priority == priority]
                unsent.clear()
                unsent.extend(kept)

    def is_waiting(self, flight: Flight) -> bool:
        """Whether anybody still waits for it."""
        return self.flights.get(flight.job.digest) is flight

    def land(
        self, digest: Digest, answer: Answer, room: tuple[Stack[Any], int, object] | None = None
    ) -> list[PendingCall]:
        """An answer is there, a row maybe in the `room` of somebody's stack: the calls to be woken
        for it."""
        there = self.flights.get(digest)
        is_claimed = there is not None and there.sent and not there.queued
        flight = self._pop(digest)
        woken: list[PendingCall] = []
        if flight is None:
            return woken
        if not is_claimed:  # of one who asked before, and was told of it again
            self._count_found(flight)
        elif not flight.counted:
            self.uncounted[flight] = time.monotonic()
        call, is_there = flight.call, False
        if room is not None:
            is_there = call is not None and (call.stack, flight.place) == room[:2]
            if flight.others or not is_there:  # the block is another's
                answer = cast(EncodedRow, answer).copy()
        if call is not None and call.take(flight.place, STACKED if is_there else answer):
            woken.append(call)
        for call, place in flight.others or ():
            if call.take(place, answer):
                woken.append(call)
        return woken

    def count(self, flight: Flight, claim: str) -> None:
        """Count what the server has said of this one, a letter, unless it is counted."""
        if claim and claim in "hjq" and not flight.counted:
            flight.counted = True
            if claim == "h":
                self.statistics.cache_hits += 1
            elif claim == "j":
                self.statistics.joined += 1
            else:
                self.statistics.queued += 1

    def will_not_be_counted(self, flight: Flight) -> None:
        """The server says nothing of its claim. If it was answered before, that was found."""
        if self.uncounted.pop(flight, None) is not None:
            self._count_found(flight)

    def _count_found(self, flight: Flight) -> None:
        if not flight.counted:
            flight.counted = True
            self.statistics.cache_hits += 1

    def fail(self, digest: Digest, error: LmpoolError) -> list[PendingCall]:
        """A prompt failed: the calls that this ends. Their other prompts are withdrawn."""
        flight = self._pop(digest)
        ended: dict[int, PendingCall] = {}
        if flight is not None:
            for call, place in flight.waiters:
                if call.fail(place, error):
                    ended[id(call)] = call
        for call in ended.values():
            self.forget(call)
        return list(ended.values())

    def forget(self, call: PendingCall) -> int:
        """`call` waits no longer: the number of its prompts withdrawn as nobody else wants them."""
        withdrawn = 0
        if call.left == 0:
            return 0
        for digest in self._digests_of(call):
            flight = self.flights[digest]
            if flight.leave(call):
                self._pop(digest)
                withdrawn += 1
                if flight.sent:
                    self.withdrawn.append((flight.shard, digest))
        self.statistics.withdrawn += withdrawn
        return withdrawn

    def _pop(self, digest: Digest) -> Flight | None:
        flight = self.flights.pop(digest, None)
        if flight is not None:
            self._counts[flight.priority] -= 1
            self.give_back(flight)
            if flight.queued:
                self._unqueue(flight)
            if flight.pieces is not None:
                self.streamed.pop(digest, None)
            if not self.flights:
                self._begin_anew()
        return flight

    def _begin_anew(self) -> None:
        """Nobody waits: what Ctrl-C kept from being counted is right again."""
        self.streamed.clear()
        for priority in PRIORITIES:
            self._counts[priority] = self._queued[priority] = self.bytes_sent[priority] = 0
            self.unsent[priority].clear()

    def _digests_of(self, call: PendingCall) -> list[Digest]:
        # A call that was left in the turn in which it was made has no job yet.
        pairs = zip(call.jobs, call.answers, strict=False)
        wanted = {job.digest for job, found in pairs if found is None}
        return [digest for digest in wanted if digest in self.flights]

    def overdue(self, now: float, age: float, most: int) -> list[Flight]:
        """Sent flights nobody has looked after for `age` seconds, as of `now`: longest first."""
        found = [f for f in self.flights.values() if f.sent and now - f.since >= age]
        if len(found) > most:
            found = heapq.nsmallest(most, found, key=lambda flight: flight.since)
        for flight in found:
            flight.since = now
        return found
