"""Rows received where they stay: nobody writes to what another has, whoever leaves or fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import redis.exceptions
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from lmpool.errors import LmpoolError
from lmpool.producer import caller as caller_module
from lmpool.producer import stacking as stacking_module
from lmpool.producer.answers import AnswerReader, Room
from lmpool.producer.cache import AnswerCache
from lmpool.producer.client import Client
from lmpool.producer.frameworks import framework
from lmpool.producer.pending import PendingCall, wake
from lmpool.producer.session import Session
from lmpool.producer.stacking import STACKED, Stack, Stacks, are_stacked
from lmpool.result_memory import CACHED_BYTES
from lmpool.rows import EncodedRow, PackedRow, f32_header, pack_values, unpack_row
from lmpool.servers import Servers
from lmpool.wants import Digest, Row, Top
from tests.support.parts import VOCAB, info_of, jobs_of, new_session, row_of

NOWHERE = "redis://127.0.0.1:1/0"
JOBS = jobs_of([[n, 1] for n in range(8)])
RIGHT = {job.digest: unpack_row(row_of(job)).logprobs() for job in JOBS}
DIGESTS = [job.digest for job in JOBS]


class Owned:
    """As torch's rows: they are the caller's to write."""

    name = "torch"
    is_shared = False

    def empty(self, rows: int, vocab_size: int) -> Any:
        return np.full((rows, vocab_size), 5, np.float32)

    def whole(self, block: Any) -> Any:
        return block


def decoded(digest: Digest) -> EncodedRow:
    return Row("f32").decode(row_of(next(j for j in JOBS if j.digest == digest)), info_of())


class Reading:
    """A reader that has asked for rows, and may be in the middle of one."""

    def __init__(self, reader: AnswerReader, digests: Sequence[Digest]) -> None:
        self.reader, self.digests = reader, digests
        self.rooms: list[Room | None] = reader._lend(digests, [len(row_of(JOBS[0]))] * len(digests))

    def receive(self, entries: int) -> None:
        for digest, room in zip(self.digests, self.rooms, strict=True):
            if room is not None:
                numbers = RIGHT[digest].tobytes()
                room[2].numbers[: 4 * entries] = numbers[: 4 * entries]

    def end(self, *, lost: bool, plain: bool) -> None:
        """All is there, maybe as another reply than the expected one; or the connection ends."""
        if not lost:
            self.receive(1 if plain else VOCAB)
            values: list[Any] = []
            for digest, room in zip(self.digests, self.rooms, strict=True):
                if room is None or plain:
                    values.append(row_of(next(j for j in JOBS if j.digest == digest)))
                else:
                    values.append(PackedRow(room[2].header, room[2].numbers.toreadonly()))
            assert not self.reader.hand_out(self.digests, values, self.rooms)
        self.reader._give_back(self.rooms)


class Stacking(RuleBasedStateMachine):
    """Two threads read for callers that join each other, leave, and write to what is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.session = new_session(NOWHERE, "pool")
        self.readers = [AnswerReader(self.session, Servers(lambda: None)) for _ in range(2)]  # type: ignore[arg-type,return-value]
        self.reading: dict[int, Reading] = {}
        self.waiting: list[tuple[PendingCall, list[int]]] = []
        self.had: list[tuple[Any, list[int]]] = []
        """Blocks that nobody may write to, and what they are of."""

    @initialize(room=st.sampled_from([0, 0, 400, 4_000, 1 << 20]))
    def begin_with_a_cache_of(self, room: int) -> None:
        self.session.cache = AnswerCache(room)

    @rule(places=st.lists(st.integers(0, 7), min_size=2, max_size=5), owned=st.booleans())
    def ask(self, places: list[int], owned: bool) -> None:
        made: Any = Owned() if owned else framework("numpy")
        call = PendingCall([JOBS[n] for n in places], None, info=self.session.info).for_thread()
        call.stack = Stack(made, len(places), VOCAB)
        with self.session.lock:
            for place, job in enumerate(call.jobs):
                answer = self.session.cache.get(job.digest)
                if answer is not None:
                    call.take(place, answer)
            if call.left:
                self.session.table.add(call, 0.0)
        self.waiting.append((call, places))

    @rule(reader=st.integers(0, 1), places=st.sets(st.integers(0, 7), min_size=1))
    def begin_to_read(self, reader: int, places: set[int]) -> None:
        if reader not in self.reading:
            digests = [DIGESTS[n] for n in sorted(places)]
            self.reading[reader] = Reading(self.readers[reader], digests)

    @precondition(lambda self: self.reading)
    @rule(pick=st.integers(0, 1), entries=st.integers(1, VOCAB))
    def receive_a_part(self, pick: int, entries: int) -> None:
        if pick in self.reading:
            self.reading[pick].receive(entries)

    @precondition(lambda self: self.reading)
    @rule(pick=st.integers(0, 1), lost=st.booleans(), plain=st.booleans())
    def end_reading(self, pick: int, lost: bool, plain: bool) -> None:
        if pick in self.reading:
            self.reading.pop(pick).end(lost=lost, plain=plain)

    @rule()
    def take_in(self) -> None:
        for call, _ in self.waiting:
            assert call.stack is not None
            call.stack.take_in()

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 100), rows=st.integers(0, 5))
    def help(self, pick: int, rows: int) -> None:
        call, _ = self.waiting[pick % len(self.waiting)]
        assert call.stack is not None
        left = len(call.stack._landed)
        call.stack.help(iter([True] * rows + [False]).__next__)
        assert len(call.stack._landed) == max(0, left - rows)

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 100))
    def leave(self, pick: int) -> None:
        call, _ = self.waiting.pop(pick % len(self.waiting))
        call.error = call.error or LmpoolError("left")
        self.session.forget(call)

    @rule()
    def collect(self) -> None:
        """Every call that is done has its rows; who owns them writes to them at once."""
        for call, places in [one for one in self.waiting if one[0].done]:
            self.waiting.remove((call, places))
            stack = call.stack
            assert stack is not None
            block = stack.whole(call.answers)  # type: ignore[arg-type]
            check(block, places)
            if stack.is_shared:
                self.had.append((block, places))
                with pytest.raises(ValueError, match="WRITEABLE"):
                    block.flags.writeable = True
            else:
                block[:] = 7

    @rule(digest=st.sampled_from(DIGESTS))
    def look_into_the_cache(self, digest: Digest) -> None:
        found = self.session.cache.get(digest)
        if found is not None:
            assert isinstance(found, EncodedRow)
            assert np.array_equal(found.logprobs(), RIGHT[digest])

    @invariant()
    def what_was_given_stays(self) -> None:
        for block, places in self.had:
            check(block, places)
        for digest in DIGESTS:
            kept = self.session.cache.peek(digest)
            if isinstance(kept, EncodedRow):
                assert np.array_equal(kept.logprobs(), RIGHT[digest])

    @invariant()
    def the_cache_is_bounded(self) -> None:
        cache = self.session.cache
        blocks = {id(t): t.nbytes for t in cache._together.values()}
        alone = [a for d, a in cache._answers.items() if d not in cache._together]
        held = sum(blocks.values()) + sum(a.nbytes for a in alone)
        assert cache.size == held + CACHED_BYTES * len(cache) <= cache.max_bytes
        assert cache.rows == len(cache)

    def teardown(self) -> None:
        for reading in self.reading.values():
            reading.end(lost=False, plain=False)
        Reading(self.readers[0], DIGESTS).end(lost=False, plain=False)
        self.collect()
        assert not self.waiting
        self.what_was_given_stays()


def check(block: Any, places: list[int]) -> None:
    assert block.shape == (len(places), VOCAB)
    for row, place in zip(block, places, strict=True):
        assert np.array_equal(row, RIGHT[DIGESTS[place]])


TestStacking = Stacking.TestCase
TestStacking.settings = settings(stateful_step_count=40, max_examples=150)


def call_of(session: Session, made: Any, places: Sequence[int]) -> PendingCall:
    call = PendingCall([JOBS[n] for n in places], None, info=session.info).for_thread()
    call.stack = Stack(made, len(places), VOCAB)
    with session.lock:
        session.table.add(call, 0.0)
    return call


@pytest.fixture
def session() -> Session:
    return new_session(NOWHERE, "pool")


def reader_of(session: Session) -> AnswerReader:
    return AnswerReader(session, Servers(lambda: None))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("cached", "owned", "in_place"),
    [(False, True, True), (True, True, False), (False, False, True), (True, False, True)],
)
def test_rows_are_received_in_place_where_nobody_else_needs_them(
    session: Session, cached: bool, owned: bool, in_place: bool
) -> None:
    session.cache = AnswerCache(1 << 20 if cached else 0)
    call = call_of(session, Owned() if owned else framework("numpy"), [0, 1, 2])
    reading = Reading(reader_of(session), DIGESTS[:3])
    assert [room is not None for room in reading.rooms] == [in_place] * 3
    memory = [room[2].numbers for room in reading.rooms if room is not None]
    reading.end(lost=False, plain=False)
    assert call.answers == [STACKED] * 3
    assert call.stack is not None
    assert len(call.stack._landed) == (0 if in_place else 3)
    block = call.stack.whole(call.answers)  # type: ignore[arg-type]
    check(block, [0, 1, 2])
    for row, received in zip(block, memory, strict=False):
        assert np.shares_memory(row, np.frombuffer(received, np.uint8))
    assert len(session.cache) == (3 if cached else 0)


def test_a_row_of_a_block_that_is_asked_for_again_holds_on_to_itself_alone(
    session: Session,
) -> None:
    call_of(session, framework("numpy"), [0, 1, 2])
    Reading(reader_of(session), DIGESTS[:3]).end(lost=False, plain=False)
    of_the_block, other = (session.cache.peek(digest) for digest in DIGESTS[:2])
    counted = session.cache.size
    found = session.cache.get(DIGESTS[0])
    assert session.cache.size == counted  # that is for who puts: Ctrl-C may come in between
    assert isinstance(found, EncodedRow)
    assert isinstance(of_the_block, EncodedRow)
    assert not np.shares_memory(found.data, of_the_block.data)
    assert np.array_equal(found.data, of_the_block.data)
    assert session.cache.peek(DIGESTS[1]) is other
    session.cache.put(DIGESTS[5], decoded(DIGESTS[5]))
    own = session.cache.get(DIGESTS[0])
    assert session.cache.get(DIGESTS[0]) is own
    assert session.cache.size == counted + 2 * 4 * VOCAB + CACHED_BYTES


def test_a_row_that_was_used_stays_when_its_block_goes(session: Session) -> None:
    session.cache = cache = AnswerCache(4 * 3 * 4 * VOCAB + 6 * CACHED_BYTES)
    call_of(session, framework("numpy"), [0, 1, 2])
    Reading(reader_of(session), DIGESTS[:3]).end(lost=False, plain=False)
    assert cache.get(DIGESTS[1]) is not None
    for number in range(200):
        cache.put(Digest(b"%016d" % number), decoded(DIGESTS[4]))
        assert cache.get(DIGESTS[1]) is not None
        assert cache.size <= cache.max_bytes
    assert cache.peek(DIGESTS[0]) is None


def test_a_few_rows_of_a_block_are_kept_without_it(session: Session) -> None:
    for digest in DIGESTS[:3]:
        session.cache.put(digest, decoded(digest))
    call = PendingCall([JOBS[n] for n in range(4)], None, info=session.info).for_thread()
    call.stack = Stack(framework("numpy"), 4, VOCAB)
    with session.lock:
        for place in range(3):
            call.take(place, decoded(DIGESTS[place]))
        session.table.add(call, 0.0)
    assert call.placed == 1
    assert Reading(reader_of(session), DIGESTS[3:4]).rooms == [None]


def test_another_reply_takes_no_second_block(session: Session) -> None:
    call = call_of(session, framework("numpy"), [0, 1])

    class Plain:
        def values(self, keys: Any, sizes: Any, rooms: Any) -> list[bytes]:
            assert None not in rooms
            return [row_of(job) for job in JOBS[:2]]

    reader = AnswerReader(session, Servers(lambda: Plain()))  # type: ignore[arg-type,return-value]
    reader._parts = lambda digests, large: iter([(DIGESTS[:2], [len(row_of(JOBS[0]))] * 2)])  # type: ignore[method-assign]
    reader.fetch(session.shards[0], DIGESTS[:2])
    assert call.done
    assert call.stack is not None
    assert not call.stack._crossed
    check(call.stack.whole(call.answers), [0, 1])  # type: ignore[arg-type]


def test_a_large_block_is_not_for_the_cache(session: Session) -> None:
    session.cache = AnswerCache(4 * (3 * 4 * VOCAB) - 1)
    call_of(session, framework("numpy"), [0, 1, 2])
    reading = Reading(reader_of(session), DIGESTS[:3])
    assert reading.rooms == [None] * 3


@pytest.mark.parametrize("encoding", ["bf16", "f16"])
def test_what_is_to_be_converted_is_received_elsewhere(session: Session, encoding: Any) -> None:
    jobs = jobs_of([[1], [2]], Row(encoding))
    call = PendingCall(jobs, None, info=session.info).for_thread()
    call.stack = Stack(framework("numpy"), 2, VOCAB)
    with session.lock:
        session.table.add(call, 0.0)
    size = 24 + 2 * VOCAB
    assert reader_of(session)._lend([job.digest for job in jobs], [size] * 2) == [None, None]


def test_a_place_is_free_again_after_a_connection_was_lost(session: Session) -> None:
    session.cache = AnswerCache(0)
    call = call_of(session, Owned(), [0, 1])
    given: list[Sequence[PackedRow | None]] = []

    class Failing:
        def values(self, keys: Any, sizes: Any, rooms: Any) -> list[PackedRow]:
            given.append(rooms)
            for room, digest in zip(rooms, DIGESTS, strict=False):
                room.numbers[:] = RIGHT[digest].tobytes()
            if len(given) == 1:
                raise redis.exceptions.ConnectionError("cut off")
            return [*rooms]

    servers = Servers(lambda: Failing())  # type: ignore[arg-type,return-value]
    reader = AnswerReader(session, servers)
    reader._parts = lambda digests, large: iter([(DIGESTS[:2], [len(row_of(JOBS[0]))] * 2)])  # type: ignore[method-assign]
    with pytest.raises(redis.exceptions.ConnectionError):
        reader.fetch(session.shards[0], DIGESTS[:2])
    assert not call.done
    reader.fetch(session.shards[0], DIGESTS[:2])
    assert call.done
    assert None not in given[1]
    assert call.stack is not None
    assert not call.stack._lent
    check(call.stack.whole(call.answers), [0, 1])  # type: ignore[arg-type]


def test_a_row_of_another_size_has_no_place() -> None:
    stack = Stack[Any](framework("numpy"), 2, VOCAB)
    assert stack.lend(0, 4 * VOCAB + 4) is None
    room = stack.lend(0, 4 * VOCAB)
    assert room is not None
    assert stack.lend(0, 4 * VOCAB) is None  # somebody has it
    stack.give_back(0)
    assert stack.lend(0, 4 * VOCAB) is not None


def test_a_row_that_came_by_another_way_is_not_written_over() -> None:
    """Whoever has the place may write to it when the call is long done."""
    stack = Stack[Any](Owned(), 2, VOCAB)  # type: ignore[arg-type]
    room = stack.lend(0, 4 * VOCAB)
    assert room is not None
    assert not stack.land(0, decoded(DIGESTS[0]))
    assert stack.land(1, decoded(DIGESTS[1]))
    block = stack.whole([STACKED, STACKED])
    room[:] = bytes(4 * VOCAB)
    check(block, [0, 1])


def test_only_large_rows_of_several_prompts_are_stacked_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = info_of()
    assert not are_stacked(JOBS, info)
    assert Stacks(framework("numpy")).begin(JOBS, info) is None
    monkeypatch.setattr(stacking_module, "LARGE", 4 * VOCAB)
    assert are_stacked(JOBS, info)
    assert Stacks(framework("numpy")).begin(JOBS, info) is not None
    assert not are_stacked(JOBS[:1], info)
    assert not are_stacked(jobs_of([[1], [2]], Top(2)), info)


def test_who_waits_takes_rows_in_before_all_are_there(session: Session) -> None:
    session.cache = AnswerCache(1 << 20)
    call = call_of(session, Owned(), [0, 1, 2])
    stack = call.stack
    assert stack is not None
    waiting = threading.Thread(
        target=lambda: asyncio.run(_wait(caller_module._wait_in_steps, call)), daemon=True
    )
    call.for_thread()
    waiting.start()
    reader = reader_of(session)
    for digest in DIGESTS[:2]:
        woken = session.table.land(digest, decoded(digest))
        assert woken == [call]
        wake(woken)
        while stack._landed:
            assert waiting.is_alive()
    assert not call.done
    check(stack._block[:2], [0, 1])
    Reading(reader, DIGESTS[2:3]).end(lost=False, plain=True)
    waiting.join(60)
    assert not waiting.is_alive()
    check(stack.whole(call.answers), [0, 1, 2])  # type: ignore[arg-type]


async def _wait(wait: Any, call: PendingCall) -> None:
    await wait(call, 60.0)


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_an_event_loop_is_not_held_up_while_rows_come(
    session: Session, timeout: float | None
) -> None:
    async def main() -> None:
        call = call_of(session, Owned(), [0, 1, 2])
        call._asleep = None
        call.for_loop(asyncio.get_running_loop())
        waiting = asyncio.create_task(caller_module._wait_in_steps(call, timeout))
        for number, digest in enumerate(DIGESTS[:3], 1):
            await asyncio.sleep(0.01)
            assert not waiting.done()
            wake(session.table.land(digest, decoded(digest)))
            assert call.left == 3 - number
        await asyncio.wait_for(waiting, 60)
        assert call.stack is not None
        assert not call.stack._landed
        check(call.stack.whole(call.answers), [0, 1, 2])  # type: ignore[arg-type]

    asyncio.run(main())


def test_a_wait_in_steps_ends_in_time(session: Session) -> None:
    call = call_of(session, Owned(), [0, 1])
    session.table.land(DIGESTS[0], decoded(DIGESTS[0]))
    asyncio.run(_wait_briefly(call))
    assert not call.done
    assert call.left == 1


async def _wait_briefly(call: PendingCall) -> None:
    await caller_module._wait_in_steps(call, 0.05)


def test_a_header_is_that_of_a_row_as_it_is_written() -> None:
    assert row_of(JOBS[0]).startswith(f32_header(VOCAB))


@pytest.mark.parametrize("owned", [True, False])
def test_who_joined_has_rows_of_their_own(session: Session, owned: bool) -> None:
    """The first may write to theirs before the other has taken its own in."""
    session.cache = AnswerCache(0)
    first, second = (
        call_of(session, Owned() if owned else framework("numpy"), places)
        for places in ([0, 1], [1, 0])
    )
    reading = Reading(reader_of(session), DIGESTS[:2])
    assert None not in reading.rooms
    reading.end(lost=False, plain=False)
    assert first.done
    assert second.done
    assert first.stack is not None
    assert second.stack is not None
    block = first.stack.whole(first.answers)  # type: ignore[arg-type]
    for _, row in second.stack._landed:
        assert not np.shares_memory(row.data, block)
    if owned:
        block[:] = 7
    check(second.stack.whole(second.answers), [1, 0])  # type: ignore[arg-type]


def test_rows_that_came_as_another_reply_are_put_in_their_places(session: Session) -> None:
    call = call_of(session, framework("numpy"), [0, 1])
    reading = Reading(reader_of(session), DIGESTS[:2])
    assert None not in reading.rooms
    reading.end(lost=False, plain=True)
    assert call.done
    assert call.stack is not None
    check(call.stack.whole(call.answers), [0, 1])  # type: ignore[arg-type]


def test_a_block_is_there_before_anybody_can_put_a_row_in_it() -> None:
    """Two threads that made it when they came with the first rows would make two."""
    made = []

    class Counted(Owned):
        def empty(self, rows: int, vocab_size: int) -> Any:
            made.append((rows, vocab_size))
            return super().empty(rows, vocab_size)

    stack = Stack(Counted(), 3, VOCAB)
    assert made == [(3, VOCAB)]
    assert stack.lend(0, 4 * VOCAB) is not None
    stack.give_back(0)
    stack.land(1, decoded(DIGESTS[1]))
    stack.take_in()
    stack.whole([STACKED, STACKED, decoded(DIGESTS[2])])
    assert made == [(3, VOCAB)]


def test_rows_that_the_cache_had_keep_nobody_from_hearing_of_others(session: Session) -> None:
    """In an event loop a call waits before it is sent, and looked up."""
    client = Client(session.options)
    session.confirmed = float("inf")
    session.cache = client.cache
    client._session = session
    client._threads = [threading.current_thread()]  # none are to be started
    session.cache.put(DIGESTS[0], decoded(DIGESTS[0]))

    async def main() -> None:
        call = PendingCall(JOBS[:3], None, info=session.info)
        call.stack = Stack(Owned(), 3, VOCAB)
        call.for_loop(asyncio.get_running_loop())
        waiting = asyncio.create_task(caller_module._wait_in_steps(call, 60.0))
        await asyncio.sleep(0)
        client.submit([call])
        assert call.left == 2
        await asyncio.sleep(0.01)
        assert not call.stack._landed
        assert session.table.land(DIGESTS[1], decoded(DIGESTS[1])) == [call]
        waiting.cancel()

    asyncio.run(main())


def narrow(encoding: Any, number: int) -> EncodedRow:
    """A row of its own in two bytes a number, of which one is impossible."""
    values = np.arange(number, number + VOCAB, dtype=np.float32)
    values[number % VOCAB] = -np.inf
    numbers = (values.view(np.uint32) >> 16).astype("<u2")
    return unpack_row(
        pack_values("bf16", numbers, number + 0.25).joined()
        if encoding == "bf16"
        else pack_values("f16", values.astype("<f2"), number + 0.25).joined()
    )


@pytest.mark.parametrize("encoding", ["bf16", "f16"])
@pytest.mark.parametrize("made", [framework("numpy"), framework("auto"), Owned()])
def test_rows_are_decoded_where_they_stay(made: Any, encoding: Any) -> None:
    rows = [narrow(encoding, n) for n in range(3)]
    stack = Stack[Any](made, 3, VOCAB)
    stack.land(1, rows[1])
    stack.take_in()
    stack.land(2, rows[2])
    block = np.asarray(stack.whole([rows[0], STACKED, STACKED]))
    assert block.dtype == np.float32
    for found, row in zip(block, rows, strict=True):
        assert found.tobytes() == row.logprobs().tobytes()


# --- who brings rows puts them in their place, too ----------------------------------------------


class Slow(Stack[Any]):
    """Two rows, whose putting in place is held up, or fails, by number."""

    def __init__(self) -> None:
        super().__init__(framework("numpy"), 2, VOCAB)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.by: list[threading.Thread] = []
        self.held: int | None = None
        self.fails = 0
        """How often the first one does."""

    def _put(self, place: int, row: EncodedRow) -> None:
        self.by.append(threading.current_thread())
        if place == self.held:
            self.begun.set()
            assert self.go_on.wait(60)
        if place == 0 and self.fails:
            self.fails -= 1
            raise MemoryError("no room for it")
        super()._put(place, row)


def landed() -> Slow:
    stack = Slow()
    for place in range(2):
        stack.land(place, decoded(DIGESTS[place]))
    return stack


def in_thread(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def test_a_block_is_given_out_once_nobody_writes_to_it() -> None:
    stack, blocks = landed(), list[Any]()
    stack.held = 1
    helping = in_thread(stack.help, stacking_module.always)
    assert stack.begun.wait(60)
    waiting = in_thread(lambda: blocks.append(stack.whole([STACKED, STACKED])))
    waiting.join(0.05)
    assert not blocks
    assert stack.by == [helping, helping]
    stack.go_on.set()
    waiting.join(60)
    check(blocks[0], [0, 1])


def test_two_put_rows_in_their_places_at_once() -> None:
    stack = landed()
    stack.held = 0
    helping = in_thread(stack.help, stacking_module.always)
    assert stack.begun.wait(60)
    stack.take_in()
    assert stack.by == [helping, threading.current_thread()]
    stack.go_on.set()
    check(stack.whole([STACKED, STACKED]), [0, 1])


def test_one_helps_at_a_time_and_waits_for_nobody() -> None:
    stack = landed()
    with stack._helping:
        stack.help(stacking_module.always)
    assert len(stack._landed) == 2


def test_a_row_that_who_brought_it_cannot_place_is_left_to_who_waits() -> None:
    stack = landed()
    stack.fails = 1
    with pytest.raises(MemoryError):
        stack.help(stacking_module.always)
    check(stack.whole([STACKED, STACKED]), [0, 1])
    stack = landed()
    stack.fails = 2
    with pytest.raises(MemoryError):
        stack.help(stacking_module.always)
    with pytest.raises(MemoryError, match="no room"):
        stack.whole([STACKED, STACKED])


def test_a_row_that_another_took_is_no_error() -> None:
    stack = landed()

    def goes_on() -> bool:
        stack.take_in()
        return True

    stack.help(goes_on)
    assert len(stack.by) == 2
    check(stack.whole([STACKED, STACKED]), [0, 1])
