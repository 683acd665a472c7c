from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmpool.affinity import Placement
from lmpool.errors import LmpoolError
from lmpool.keys import PRIORITIES, Priority
from lmpool.producer.flights import PASSED_OVER, Flight, FlightTable
from lmpool.producer.pending import LoneCall, PendingCall
from lmpool.rows import EncodedRow, pack_logprobs, unpack_row
from lmpool.wants import Digest, Row
from lmpool.wire import Job


def row(value: float = 0.0) -> EncodedRow:
    return unpack_row(pack_logprobs(np.full(2, value, np.float32)).joined())


def job(name: str) -> Job:
    return Job(Row("f32"), digest(name), name.encode() * 4, None)


def call(
    names: str, deadline: float | None = None, priority: Priority = "interactive"
) -> PendingCall:
    """A call for the prompts of those one-letter names."""
    return PendingCall([job(name) for name in names], deadline, priority=priority)


def digest(name: str) -> Digest:
    return Digest(name.encode().rjust(16, b"0"))


@pytest.fixture
def table() -> FlightTable:
    return FlightTable()


def sent(table: FlightTable, priority: Priority = "interactive") -> str:
    """The names of what is sent now."""
    taken = table.take_unsent(1000, 1 << 20, priority)
    return "".join(flight.job.digest[-1:].decode() for flight in taken)


def under_way(table: FlightTable) -> tuple[int, int]:
    return table.under_way("interactive"), table.under_way("batch")


def test_equal_prompts_share_a_flight(table: FlightTable) -> None:
    first, second = call("aba"), call("b")
    table.add(first, 0.0)
    table.add(second, 0.0)
    assert sent(table) == "ab"
    assert table.statistics.joined == 2
    a, b = row(1), row(2)
    assert table.land(digest("a"), a) == []
    assert set(table.land(digest("b"), b)) == {first, second}
    assert first.answers == [a, b, a]
    assert second.answers == [b]
    assert not table.flights
    assert table.land(digest("a"), a) == []  # a late notice


def test_what_comes_before_it_is_sent_was_there(table: FlightTable) -> None:
    """Of what has left the server says which it was."""
    for count in (1, 2):
        table.add(call("a"), 0.0)
        table.land(digest("a"), row())
        assert (table.statistics.cache_hits, len(table.uncounted)) == (count, 0)
    table.add(call("a"), 0.0)
    assert sent(table) == "a"
    table.land(digest("a"), row())
    assert (table.statistics.cache_hits, len(table.uncounted)) == (2, 1)


def counted(table: FlightTable) -> int:
    statistics = table.statistics
    return statistics.cache_hits + statistics.joined + statistics.queued + len(table.uncounted)


def test_an_answer_that_no_claim_is_told_of_is_counted_once(table: FlightTable) -> None:
    """As the claim was lost, another took its place, or the server did nothing about it."""
    table.add(call("a"), 0.0)
    table.put_back(table.take_unsent(1, 100))
    table.land(digest("a"), row())
    assert (counted(table), len(table.uncounted)) == (1, 0)

    first = call("a")
    table.add(first, 0.0)
    assert sent(table) == "a"
    table.flights[digest("a")].counted = True
    table.statistics.queued += 1
    table.forget(first)
    table.add(call("a"), 0.0)
    assert table.take_withdrawn() == []
    table.land(digest("a"), row())
    assert (counted(table), len(table.uncounted)) == (3, 0)

    table.add(call("a"), 0.0)
    (flight,) = table.take_unsent(1, 100)
    table.land(digest("a"), row())
    assert (counted(table), len(table.uncounted)) == (4, 1)
    for _ in range(2):
        table.will_not_be_counted(flight)
        assert (counted(table), len(table.uncounted)) == (4, 0)


def test_what_is_sent_is_sent_once_and_in_order(table: FlightTable) -> None:
    table.add(call("abc"), 0.0)
    assert [f.job.digest for f in table.take_unsent(2, 1 << 20)] == [digest("a"), digest("b")]
    table.add(call("ad"), 0.0)
    assert sent(table) == "cd"
    assert sent(table) == ""


def test_a_request_holds_no_more_bytes_than_its_bound_and_one_prompt(table: FlightTable) -> None:
    table.add(call("abcd"), 0.0)  # four bytes each
    assert len(table.take_unsent(1000, 8)) == 2
    assert len(table.take_unsent(1000, 1)) == 1
    assert len(table.take_unsent(0, 100)) == 0
    assert len(table.take_unsent(1000, 100)) == 1


def test_rows_from_the_cache_need_no_flight(table: FlightTable) -> None:
    waiting = call("ab")
    waiting.answers[0] = row()
    waiting.left = 1
    table.add(waiting, 0.0)
    assert sent(table) == "b"


def test_what_is_of_priority_batch_is_interactive_once_somebody_asks_so(table: FlightTable) -> None:
    table.add(call("abcd", priority="batch"), 0.0)
    assert sent(table) == ""
    table.add(call("be"), 0.0)
    assert sent(table) == "be"
    assert sent(table, "batch") == "acd"
    assert under_way(table) == (2, 3)
    table.add(call("a", priority="batch"), 0.0)  # as it was
    table.add(call("b", priority="batch"), 0.0)  # once interactive, it stays so
    table.add(call("c"), 0.0)  # the server must hear of it
    assert (sent(table), sent(table, "batch")) == ("c", "")
    assert under_way(table) == (3, 2)
    for name in "abcde":
        table.land(digest(name), row())
    assert under_way(table) == (0, 0)


def test_a_flight_waits_as_long_as_its_longest_waiter(table: FlightTable) -> None:
    table.add(call("a", deadline=10.0), 0.0)
    assert table.flights[digest("a")].deadline == 10.0
    assert sent(table) == "a"
    table.add(call("a", deadline=5.0), 0.0)
    assert sent(table) == ""  # no longer than the server knows
    table.add(call("a", deadline=20.0), 0.0)
    assert sent(table) == "a"  # the server must hear of it
    table.add(call("a", deadline=None), 0.0)
    assert table.flights[digest("a")].deadline is None
    assert sent(table) == "a"
    table.add(call("a", deadline=99.0), 0.0)
    assert table.flights[digest("a")].deadline is None
    assert sent(table) == ""


def test_a_failed_prompt_ends_its_calls_and_withdraws_their_others(table: FlightTable) -> None:
    first, second, third = call("ab"), call("bc"), call("c")
    for waiting in (first, second, third):
        table.add(waiting, 0.0)
    sent(table)
    error = LmpoolError("why")
    assert set(table.fail(digest("b"), error)) == {first, second}
    assert first.error is second.error is error
    assert not third.done
    assert table.withdrawn == [(0, digest("a"))]  # nobody else wants it
    assert table.flights.keys() == {digest("c")}
    assert table.land(digest("c"), row()) == [third]
    assert table.fail(digest("b"), error) == []


def test_only_what_was_sent_and_nobody_wants_is_withdrawn(table: FlightTable) -> None:
    first, second = call("ab"), call("b")
    table.add(first, 0.0)
    sent(table)
    table.add(second, 0.0)
    unsent = call("c")
    table.add(unsent, 0.0)
    assert table.forget(first) == 1
    assert table.forget(unsent) == 1
    assert table.withdrawn == [(0, digest("a"))]
    assert table.statistics.withdrawn == 2
    assert sent(table) == ""  # c is not sent any more
    assert table.land(digest("b"), row()) == [second]


def test_a_call_with_a_prompt_twice_is_forgotten_whole(table: FlightTable) -> None:
    waiting = call("aa")
    table.add(waiting, 0.0)
    sent(table)
    assert table.forget(waiting) == 1
    assert table.withdrawn == [(0, digest("a"))]
    assert not table.flights


def test_a_flight_has_the_shard_of_its_prompt_whatever_is_wanted(table: FlightTable) -> None:
    table.placement = Placement(3)
    names = "abcdefgh"
    waiting = call(names)
    other = [Job(Row("f16"), Digest(f.digest[::-1]), f.tokens, "x@1") for f in waiting.jobs]
    table.add(waiting, 0.0)
    table.add(PendingCall(other, None), 0.0)
    taken = table.take_unsent(1000, 1 << 20)
    assert {flight.shard for flight in taken} == {0, 1, 2}
    for flight in taken:
        assert flight.shard == Placement(3).of(flight.job.tokens, flight.job.adapter)[0]
    table.forget(waiting)
    told = {digest: shard for shard, digest in table.take_withdrawn()}
    assert told == {digest(name): Placement(3).of(name.encode() * 4, None)[0] for name in names}


def test_what_is_to_be_withdrawn_and_is_asked_again_is_not_withdrawn(table: FlightTable) -> None:
    first, second = call("ab"), call("a")
    table.add(first, 0.0)
    sent(table)
    table.forget(first)
    table.add(second, 0.0)
    assert table.take_withdrawn() == [(0, digest("b"))]
    assert table.take_withdrawn() == []
    # The server knows the new flight under its predecessor's name: it is withdrawn in its turn.
    table.forget(second)
    assert table.take_withdrawn() == [(0, digest("a"))]


def test_what_was_withdrawn_and_asked_again_is_a_new_flight(table: FlightTable) -> None:
    first = call("a")
    table.add(first, 0.0)
    (old,) = table.take_unsent(10, 100)
    table.forget(first)
    table.add(call("a"), 0.0)
    assert not table.is_waiting(old)
    table.put_back([old])
    table.resend(old)
    assert sent(table) == "a"
    assert table.statistics.resubmitted == 0


def test_what_could_not_be_sent_goes_first_again(table: FlightTable) -> None:
    table.add(call("ab"), 0.0)
    taken = table.take_unsent(10, 100)
    table.add(call("c"), 0.0)
    table.put_back(taken)
    assert sent(table) == "abc"


def test_what_the_server_lost_is_sent_again_and_counted(table: FlightTable) -> None:
    table.add(call("a"), 0.0)
    (flight,) = table.take_unsent(10, 100)
    table.resend(flight)
    assert sent(table) == "a"
    assert table.statistics.resubmitted == 1


def test_flights_that_nobody_looked_after_are_overdue_once(table: FlightTable) -> None:
    table.add(call("ab"), 100.0)
    assert table.overdue(200.0, 2.0, 10) == []  # not sent yet
    sent(table)
    assert table.overdue(101.0, 2.0, 10) == []
    assert len(table.overdue(102.0, 2.0, 1)) == 1
    assert len(table.overdue(102.0, 2.0, 10)) == 1
    assert table.overdue(103.0, 2.0, 10) == []
    assert len(table.overdue(104.0, 2.0, 10)) == 2


def test_statistics_are_plain_numbers(table: FlightTable) -> None:
    assert table.statistics.as_dict() == asdict(table.statistics)
    assert table.statistics.as_dict().keys() == {
        "requests",
        "local_hits",
        "cache_hits",
        "joined",
        "queued",
        "failed",
        "expired",
        "withdrawn",
        "resubmitted",
    }


NAMES = st.text("abcdef", min_size=1, max_size=4)
DEADLINES = st.none() | st.floats(0, 100)


class FlightsAgainstCallers(RuleBasedStateMachine):
    """Whatever happens in whatever order, every call ends once, with its own prompts' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FlightTable()
        self.waiting: list[PendingCall] = []
        self.ended: list[PendingCall] = []
        self.taken: list[Flight] = []
        self.known: set[bytes] = set()  # what the server was told of
        self.now = 0.0

    def end(self, calls: list[PendingCall]) -> None:
        for ended in calls:
            assert ended in self.waiting, "a call ended twice, or was never made"
            assert ended.done
            self.waiting.remove(ended)
            self.ended.append(ended)

    @rule(names=NAMES, deadline=DEADLINES, priority=st.sampled_from(PRIORITIES))
    def ask(self, names: str, deadline: float | None, priority: Priority) -> None:
        new = call(names, deadline, priority)
        self.waiting.append(new)
        self.table.add(new, self.now)

    @rule(most=st.integers(1, 4), priority=st.sampled_from(PRIORITIES))
    def send(self, most: int, priority: Priority) -> None:
        self.taken = self.table.take_unsent(most, 1 << 20, priority)
        for flight in self.taken:
            assert flight.sent
            self.known.add(flight.job.digest)

    @rule()
    def lose_the_connection(self) -> None:
        self.table.put_back(self.taken)
        self.taken = []

    @rule(name=st.sampled_from("abcdef"))
    def forget_a_job(self, name: str) -> None:
        flight = self.table.flights.get(digest(name))
        if flight is not None and flight.sent:
            self.table.resend(flight)

    @rule(name=st.sampled_from("abcdef"))
    def land(self, name: str) -> None:
        flight = self.table.flights.get(digest(name))
        waiters = [] if flight is None else list(flight.waiters)
        found = row(float("abcdef".index(name)))
        self.end(self.table.land(digest(name), found))
        for waiter, place in waiters:
            assert waiter.answers[place] is found
            assert waiter.jobs[place].digest == digest(name)

    @rule(name=st.sampled_from("abcdef"))
    def fail(self, name: str) -> None:
        error = LmpoolError(name)
        ended = self.table.fail(digest(name), error)
        assert all(failed.error is error for failed in ended)
        self.end(ended)

    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        if self.waiting:
            chosen = self.waiting.pop(pick % len(self.waiting))
            chosen.error = LmpoolError("withdrawn")
            self.table.forget(chosen)
            self.ended.append(chosen)

    @rule()
    def tell_of_withdrawals(self) -> None:
        for shard, withdrawn in self.table.take_withdrawn():
            assert withdrawn in self.known, "withdrawn, but never sent"
            assert withdrawn not in self.table.flights, "withdrawn, and waited for"
            assert shard == 0

    @rule(step=st.floats(0, 5))
    def look_after(self, step: float) -> None:
        self.now += step
        for flight in self.table.overdue(self.now, 2.0, 3):
            assert flight.sent

    @invariant()
    def every_prompt_has_one_flight_and_no_flight_is_without_waiters(self) -> None:
        wanted: dict[bytes, set[int]] = {}
        for waiting in self.waiting:
            assert not waiting.done
            assert waiting.left == waiting.answers.count(None) > 0
            for place, asked in enumerate(waiting.jobs):
                if waiting.answers[place] is None:
                    wanted.setdefault(asked.digest, set()).add(id(waiting))
        found = {d: {id(w) for w, _ in f.waiters} for d, f in self.table.flights.items()}
        assert found == wanted

    @invariant()
    def whatever_was_not_sent_will_be(self) -> None:
        unsent = {p: {id(flight) for flight in queue} for p, queue in self.table.unsent.items()}
        for flight in self.table.flights.values():
            assert flight.sent or id(flight) in unsent[flight.priority]

    @invariant()
    def a_flight_is_of_priority_batch_only_if_all_of_its_waiters_are(self) -> None:
        flights = self.table.flights.values()
        for flight in flights:
            waiters = [waiter.priority for waiter, _ in flight.waiters]
            assert flight.priority == "interactive" or set(waiters) == {"batch"}
        counts = {p: sum(flight.priority == p for flight in flights) for p in PRIORITIES}
        assert counts == self.table._counts

    @invariant()
    def what_is_under_way_was_sent_and_has_not_to_be_sent_again(self) -> None:
        flights = list(self.table.flights.values())
        for priority in PRIORITIES:
            queued = [f for f in flights if f.priority == priority and f.queued]
            others = [f for f in flights if f.priority == priority and not f.queued]
            assert all(flight.sent for flight in others)
            assert self.table.under_way(priority) == len(others)
            assert self.table.to_be_sent(priority) == len(queued)
            found = [f for f in self.table.unsent[priority] if f.queued and f.priority == priority]
            assert sorted(map(id, found)) == sorted(map(id, queued))
            assert all(flight.takes == 0 for flight in queued)
            taken = sum(flight.takes for flight in others)
            assert self.table.bytes_sent[priority] == taken == 4 * len(others)

    @invariant()
    def a_flight_waits_for_all_of_its_waiters(self) -> None:
        for flight in self.table.flights.values():
            for waiter, _ in flight.waiters:
                longest = flight.deadline
                assert longest is None or (
                    waiter.deadline is not None and waiter.deadline <= longest
                )

    @invariant()
    def rows_are_the_prompts_own(self) -> None:
        for some in (*self.waiting, *self.ended):
            for place, found in enumerate(some.answers):
                if found is not None:
                    name = some.jobs[place].digest[-1:].decode()
                    assert found.logprobs()[0] == "abcdef".index(name)

    def teardown(self) -> None:
        for name in "abcdef":
            self.end(self.table.land(digest(name), row(float("abcdef".index(name)))))
        assert not self.waiting
        assert not self.table.flights


TestFlightsAgainstCallers = FlightsAgainstCallers.TestCase
TestFlightsAgainstCallers.settings = settings(stateful_step_count=30, max_examples=60)


def test_those_that_gave_up_before_they_were_sent_do_not_stay(table: FlightTable) -> None:
    stays = call("a")
    table.add(stays, 0.0)
    for number in range(3 * PASSED_OVER):
        name = Digest(number.to_bytes(16, "big"))
        left = PendingCall([Job(Row("f32"), name, b"0000", None)], None)
        table.add(left, 0.0)
        table.forget(left)
    assert len(table.unsent["interactive"]) <= PASSED_OVER + 2
    assert (table.to_be_sent("interactive"), table.under_way("interactive")) == (1, 0)
    assert sent(table) == "a"
    assert (table.to_be_sent("interactive"), table.under_way("interactive")) == (0, 1)


def test_what_was_not_counted_to_its_end_is_right_once_nobody_waits(table: FlightTable) -> None:
    """Ctrl-C may come between any two steps of a thread that asks."""
    table.add(call("ab"), 0.0)
    table._counts["interactive"] += 3
    table._queued["batch"] += 2
    table.bytes_sent["batch"] += 7
    for name in "ab":
        table.land(digest(name), row())
    assert under_way(table) == (0, 0)
    assert not table.has_unsent()
    assert table.bytes_sent == {"interactive": 0, "batch": 0}


def test_a_call_that_is_left_before_its_job_is_made_leaves_nothing() -> None:
    table = FlightTable()
    assert table.forget(LoneCall(None, None, "interactive", None)) == 0
    assert (table.withdrawn, table.flights) == ([], {})
