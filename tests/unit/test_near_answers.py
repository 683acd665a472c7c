"""Handing out rows that lie in a worker's memory: which are read, of whom, and each once."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
import pytest
import redis
import redis.exceptions

from lmpool.near_notices import NearNotice
from lmpool.producer import answers as answers_module
from lmpool.producer import collector as collector_module
from lmpool.producer import near_answers as near_answers_module
from lmpool.producer.answers import MAX_TRIES, AnswerReader
from lmpool.producer.cache import AnswerCache
from lmpool.producer.collector import Collector
from lmpool.producer.frameworks import framework
from lmpool.producer.near_answers import ASK_EVERY, NearAnswers
from lmpool.producer.pending import PendingCall
from lmpool.producer.session import Session
from lmpool.producer.stacking import Stack, always
from lmpool.producer.waits import Future
from lmpool.row_ring import RowRing, RowRingReader
from lmpool.rows import ROW_HEADER_BYTES, PackedRow, pack_logprobs
from lmpool.servers import Servers
from lmpool.wants import Generate
from lmpool.wire import Job
from tests.support import logged
from tests.support.parts import (
    VOCAB,
    Guarded,
    Time,
    ask,
    info_of,
    is_row_of,
    jobs_of,
    new_session,
    row_of,
    shard_of_job,
    some_prompts,
)

ROW = ROW_HEADER_BYTES + 4 * VOCAB
"""Bytes of a row, which these tests take for a large one."""


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def session(fake_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(answers_module, "SMALLEST", 1)
    monkeypatch.setattr(answers_module, "LAID", 4 * VOCAB)
    monkeypatch.setattr(near_answers_module, "LARGE", 4 * VOCAB)
    return new_session(fake_url, pool_name)


@pytest.fixture
def answers(session: Session) -> NearAnswers:
    return NearAnswers(session)


class Memory:
    """The ring of a worker, to itself and to a client."""

    def __init__(self, folder: Path, owner: str) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            self.ring = RowRing(file.fileno(), 1 << 16, owner)
            self.there = RowRingReader(file.fileno())

    def lay(self, jobs: list[Job]) -> None:
        for job in jobs:
            assert self.ring.lay(job.digest, packed(row_of(job)))


@pytest.fixture
def memory(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """What is found as "near", of the worker "w"."""
    memory = Memory(tmp_path, "w")
    monkeypatch.setattr(session.near, "ring", {"near": memory.there}.get)
    return memory


def packed(row: bytes) -> PackedRow:
    return PackedRow(row[:ROW_HEADER_BYTES], memoryview(row)[ROW_HEADER_BYTES:])


def put(server: redis.Redis, session: Session, jobs: list[Job]) -> None:
    for job in jobs:
        server.set(shard_of_job(session, job).result(job.digest), row_of(job))


def send(session: Session) -> None:
    session.table.take_unsent(1000, 1 << 20)


def take(answers: NearAnswers, memory: Memory, jobs: list[Job]) -> int:
    return answers.take(memory.there, [job.digest for job in jobs])


def hear(answers: NearAnswers, jobs: list[Job], ring: str = "near") -> None:
    answers.hear(NearNotice(ring, [job.digest for job in jobs]))


def ask_stacked(session: Session, jobs: list[Job]) -> tuple[PendingCall, Stack[Any]]:
    """A call for rows that come to one block."""
    call = PendingCall(jobs, None, info=session.info).for_thread()
    stack: Stack[Any] = Stack(framework("numpy"), len(jobs), VOCAB)
    call.stack = stack
    with session.lock:
        session.table.add(call, 0.0)
    return call, stack


def are_rows(call: PendingCall) -> bool:
    return all(is_row_of(job, found) for job, found in zip(call.jobs, call.answers, strict=True))


def block_of(call: PendingCall) -> bytes:
    assert isinstance(call.stack, Stack)
    block: bytes = call.stack.whole(call.answers).tobytes()  # type: ignore[arg-type]
    return block


def numbers_of(jobs: list[Job]) -> bytes:
    return b"".join(row_of(job)[ROW_HEADER_BYTES:] for job in jobs)


# --- what is handed out ------------------------------------------------------------------------


def test_rows_that_lie_near_are_handed_out(
    session: Session, answers: NearAnswers, memory: Memory
) -> None:
    jobs = jobs_of(some_prompts(5))
    call, other = ask(session, jobs), ask(session, jobs[:2])
    send(session)
    memory.lay(jobs)
    assert take(answers, memory, jobs) == 5 * ROW
    for waiting in (call, other):
        assert waiting.wait(0)
        assert are_rows(waiting)
    assert not session.table.flights
    assert session.near.are_usual
    for job in jobs:
        assert is_row_of(job, session.cache.get(job.digest))
    for _ in range(20):  # over what was there
        memory.lay(jobs_of(some_prompts(100, start=100)))
    assert not any(memory.there.copy(job.digest, ROW) for job in jobs)
    assert are_rows(call)


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_rows_that_lie_near_are_copied_to_their_place(
    session: Session, answers: NearAnswers, memory: Memory, cache: int
) -> None:
    session.cache = AnswerCache(cache)
    jobs = jobs_of(some_prompts(4))
    call, stack = ask_stacked(session, jobs)
    send(session)
    memory.lay(jobs[:3])
    assert take(answers, memory, jobs) == 3 * ROW
    assert not stack._lent
    assert not stack._landed
    assert not stack._crossed  # each is in its place
    assert call.left == 1
    assert [*session.table.flights] == [jobs[3].digest]
    memory.lay(jobs[3:])
    assert take(answers, memory, jobs) == ROW
    assert call.wait(0)
    assert block_of(call) == numbers_of(jobs)


def test_rows_are_put_in_their_place_by_the_thread_that_brought_them(
    session: Session, answers: NearAnswers, memory: Memory
) -> None:
    session.cache = AnswerCache(4 * (3 * 4 * VOCAB) - 1)  # too small for a block
    calls = [ask_stacked(session, jobs_of(some_prompts(3, start))) for start in (0, 8)]
    jobs = [job for call, _ in calls for job in call.jobs]
    memory.lay(jobs)
    take(answers, memory, jobs)
    answers.help(lambda: False)  # something else has come
    assert [len(stack._landed) for _, stack in calls] == [3, 3]
    answers.help(always)
    assert [len(stack._landed) for _, stack in calls] == [0, 0]
    for call, _ in calls:
        assert block_of(call) == numbers_of([*call.jobs])
    assert not answers._taking


def test_a_call_that_ended_is_not_held_by_who_would_help_it(
    session: Session, answers: NearAnswers, memory: Memory
) -> None:
    session.cache = AnswerCache(4 * (3 * 4 * VOCAB) - 1)
    call, stack = ask_stacked(session, jobs_of(some_prompts(3)))
    memory.lay([*call.jobs])
    take(answers, memory, [*call.jobs])
    block_of(call)
    dropped = weakref.ref(stack)
    del call, stack
    assert dropped() is None
    answers.help(always)
    assert not answers._taking


def test_what_does_not_lie_near_is_waited_for(
    session: Session, answers: NearAnswers, memory: Memory
) -> None:
    jobs = jobs_of(some_prompts(5))
    call = ask(session, jobs)
    send(session)
    assert (take(answers, memory, jobs), session.near.are_usual) == (0, False)
    memory.lay(jobs[1:3])
    assert (take(answers, memory, jobs), session.near.are_usual) == (2 * ROW, True)
    assert not call.done
    assert {*session.table.flights} == {job.digest for job in (jobs[0], *jobs[3:])}
    assert all(not flight.tries for flight in session.table.flights.values())
    assert not session.table.has_unsent()
    assert session.table.statistics.resubmitted == 0


NAN = pack_logprobs(np.full(VOCAB, np.nan, np.float32))
GARBAGE = PackedRow(b"x" * ROW_HEADER_BYTES, memoryview(bytes(4 * VOCAB)))


@pytest.mark.parametrize("in_place", [False, True], ids=["alone", "in its place"])
@pytest.mark.parametrize("row", [NAN, GARBAGE], ids=["of NaN", "of another header"])
def test_what_lies_near_and_is_no_row_is_passed_over(
    session: Session,
    server: redis.Redis,
    answers: NearAnswers,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    row: PackedRow,
    in_place: bool,
) -> None:
    """It is judged where it is stored, if it is: nothing is deleted or asked anew."""
    session.join(info_of(1))
    jobs = jobs_of(some_prompts(3))
    call = ask_stacked(session, jobs)[0] if in_place else ask(session, jobs)
    send(session)
    memory.lay(jobs[1:])
    assert memory.ring.lay(jobs[0].digest, row)
    for _ in range(MAX_TRIES + 1):
        take(answers, memory, jobs)
    if isinstance(call.stack, Stack):
        assert not call.stack._lent
        assert not call.stack._landed
        assert not call.stack._crossed  # the others are in their place
    assert call.left == 1
    assert call.error is None
    (flight,) = session.table.flights.values()
    assert flight.job is jobs[0]
    assert flight.tries == 0
    assert not session.table.has_unsent()
    assert session.table.statistics.resubmitted == 0
    assert session.cache.get(jobs[0].digest) is None
    assert logged.messages(caplog) == []
    put(server, session, jobs[:1])
    monkeypatch.setattr(answers_module, "SMALLEST", 1 << 10)
    reader = AnswerReader(session, Servers(lambda: server))  # type: ignore[arg-type,return-value]
    reader.fetch(session.shards[0], [jobs[0].digest])
    assert call.wait(0)
    if isinstance(call.stack, Stack):
        assert not call.stack._lent
        assert block_of(call) == numbers_of(jobs)
    else:
        assert are_rows(call)


def test_small_answers_and_what_nobody_waits_for_are_not_looked_for_near(
    session: Session, answers: NearAnswers, memory: Memory
) -> None:
    rows, small = jobs_of(some_prompts(3)), jobs_of([[1, 2]], Generate(3, (), 1.0, 7))
    call, written = ask(session, rows[:2]), ask(session, small)
    withdrawn = ask(session, rows[2:])
    send(session)
    session.forget(withdrawn)
    memory.lay(rows)
    assert memory.ring.lay(small[0].digest, packed(row_of(small[0])))
    assert take(answers, memory, [*small, *rows, *small]) == 2 * ROW
    assert call.wait(0)
    assert not written.done
    assert [*session.table.flights] == [small[0].digest]
    assert session.cache.get(rows[2].digest) is None
    session.near.are_usual = False
    assert take(answers, memory, [*rows, *small]) == 0
    assert not session.near.are_usual
    assert len(session.cache) == 2


@pytest.mark.parametrize("in_place", [False, True], ids=["alone", "in its place"])
def test_a_row_that_is_named_again_and_again_is_given_once(
    session: Session, answers: NearAnswers, memory: Memory, in_place: bool
) -> None:
    jobs = jobs_of(some_prompts(3))
    call = ask_stacked(session, jobs)[0] if in_place else ask(session, jobs)
    send(session)
    memory.lay(jobs)
    take(answers, memory, [jobs[0], jobs[0], jobs[1], jobs[0]])
    assert call.left == 1
    take(answers, memory, [*jobs, *jobs])
    assert call.left == 0
    assert call.wait(0)
    if in_place:
        assert block_of(call) == numbers_of(jobs)
    else:
        assert are_rows(call)


def test_a_few_rows_that_lie_near_are_copied_at_a_time(
    session: Session, answers: NearAnswers, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "FETCH_BYTES", 3 * 4 * VOCAB)
    handed, usual = list[int](), answers.hand_out

    def counted(digests: Any, values: Any, rooms: Any, **options: Any) -> Any:
        handed.append(len(digests))
        return usual(digests, values, rooms, **options)

    monkeypatch.setattr(answers, "hand_out", counted)
    jobs = jobs_of(some_prompts(8))
    call = ask(session, jobs)
    memory.lay(jobs)
    assert take(answers, memory, jobs) == 8 * ROW
    assert handed == [3, 3, 2]
    assert call.wait(0)


def test_rows_of_the_server_are_usual_again_once_one_has_come_from_there(
    session: Session, server: redis.Redis, answers: NearAnswers, memory: Memory
) -> None:
    session.join(info_of(1))
    jobs = jobs_of(some_prompts(3))
    small = jobs_of([[1, 2]], Generate(3, (), 1.0, 7))
    ask(session, [*jobs, *small])
    send(session)
    memory.lay(jobs[:1])
    take(answers, memory, jobs)
    assert session.near.are_usual
    reader = AnswerReader(session, Servers(lambda: server))  # type: ignore[arg-type,return-value]
    known = {session.shards[0].result(job.digest): row_of(job) for job in jobs}
    are_usual: list[bool] = []
    for digest in (jobs[0].digest, small[0].digest, jobs[1].digest):
        reader.fetch(session.shards[0], [digest], known)
        are_usual.append(session.near.are_usual)
    memory.lay(jobs[2:])
    take(answers, memory, jobs)
    # The first was there already, the second is no row.
    assert [*are_usual, session.near.are_usual] == [True, True, False, True]


# --- whose rows are read -----------------------------------------------------------------------


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(near_answers_module, "time", time)
    return time


def run_tasks(session: Session, server: redis.Redis) -> int:
    """As the sender does. How many there were."""
    tasks, session.tasks = session.tasks, []
    servers: Any = Servers(lambda: server)  # type: ignore[arg-type,return-value]
    for function, future in tasks:
        assert future.set_running_or_notify_cancel()
        try:
            future.set_result(function(servers))
        except Exception as error:
            future.set_exception(error)
    return len(tasks)


def is_read(session: Session, answers: NearAnswers, memory: Memory, number: int) -> bool:
    """Whether the client is given a row that is laid now."""
    jobs = jobs_of([[number // VOCAB, number % VOCAB]])
    call = ask(session, jobs)
    send(session)
    memory.lay(jobs)
    hear(answers, jobs)
    if not call.done:
        session.forget(call)
        return False
    assert are_rows(call)
    return True


def live(server: redis.Redis, session: Session, worker: str = "w") -> None:
    server.set(session.shards[0].alive(worker), b"now", px=60_000)


def test_a_worker_is_trusted_once_the_server_has_said_that_it_lives(
    session: Session, server: redis.Redis, answers: NearAnswers, memory: Memory
) -> None:
    live(server, session)
    assert not is_read(session, answers, memory, 1)
    assert run_tasks(session, server) == 1
    assert is_read(session, answers, memory, 2)
    server.delete(session.shards[0].alive("w"))  # what it laid last may be told yet
    assert is_read(session, answers, memory, 3)
    assert run_tasks(session, server) == 0


def test_the_sender_hears_that_there_is_something_to_ask(
    session: Session, answers: NearAnswers, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    notified: list[bool] = []
    monkeypatch.setattr(session.work, "notify_all", lambda: notified.append(session.is_interrupted))
    assert not is_read(session, answers, memory, 1)
    assert notified == [True]


def test_a_worker_that_the_server_does_not_know_is_asked_for_now_and_then(
    session: Session, server: redis.Redis, answers: NearAnswers, memory: Memory, time: Time
) -> None:
    """It may be another server's, or has not said yet that it lives."""
    for number in range(5):
        assert not is_read(session, answers, memory, number)
    assert run_tasks(session, server) == 1
    for number in range(5):
        assert not is_read(session, answers, memory, number)
    live(server, session)
    time.now += ASK_EVERY - 0.1
    assert not is_read(session, answers, memory, 6)
    assert run_tasks(session, server) == 0
    time.now += 0.2
    assert not is_read(session, answers, memory, 7)
    assert run_tasks(session, server) == 1
    assert is_read(session, answers, memory, 8)


def test_a_worker_is_not_trusted_as_long_as_the_server_does_not_say_anything(
    session: Session, server: redis.Redis, answers: NearAnswers, memory: Memory, time: Time
) -> None:
    def ends(end: Callable[[Future[bool]], object]) -> None:
        time.now += 2 * ASK_EVERY
        assert not is_read(session, answers, memory, 1)
        ((_, future),) = session.tasks
        session.tasks = []
        end(future)
        assert not is_read(session, answers, memory, 2)

    live(server, session)
    ends(lambda future: future.set_exception(redis.exceptions.ConnectionError("gone")))
    ends(lambda future: future.cancel())
    ends(lambda future: None)
    assert not session.tasks
    time.now += 2 * ASK_EVERY
    assert not is_read(session, answers, memory, 3)
    assert run_tasks(session, server) == 1
    assert is_read(session, answers, memory, 4)


def test_of_two_workers_the_one_that_lives_is_read(
    session: Session,
    server: redis.Redis,
    answers: NearAnswers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both lay the same answer: the other one is of a pool of that name on another server."""
    ours, theirs = Memory(tmp_path, "ours"), Memory(tmp_path, "theirs")
    rings = {"1" * 16: ours.there, "2" * 16: theirs.there}
    monkeypatch.setattr(session.near, "ring", rings.get)
    live(server, session, "ours")
    jobs = jobs_of(some_prompts(2))
    call = ask(session, jobs)
    send(session)
    for each in (ours, theirs):
        each.lay(jobs[:1])
    for ring in rings:
        hear(answers, jobs, ring)
    assert run_tasks(session, server) == 2
    hear(answers, jobs, "2" * 16)
    assert call.left == 2
    hear(answers, jobs, "1" * 16)
    assert call.left == 1


@pytest.mark.parametrize(
    "owner",
    ["", "a b\n", "{x}", "*", "\udcff\udcfe", "\x01", "w" * 5000],
    ids=["none", "space", "slot", "star", "no text", "control", "long"],
)
def test_a_ring_may_say_that_it_is_anybodys(
    session: Session,
    server: redis.Redis,
    answers: NearAnswers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
) -> None:
    memory = Memory(tmp_path, owner[:40])
    if len(owner) > 40:
        monkeypatch.setattr(memory.there, "owner", owner)
    monkeypatch.setattr(session.near, "ring", {"near": memory.there}.get)
    live(server, session)
    for number in range(3):
        assert not is_read(session, answers, memory, number)
        run_tasks(session, server)


def test_so_many_names_are_kept_of_those_that_were_asked_for(
    session: Session,
    server: redis.Redis,
    answers: NearAnswers,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(near_answers_module, "ASKED_MOST", 3)
    for number in range(20):
        monkeypatch.setattr(memory.there, "owner", str(number))
        assert not is_read(session, answers, memory, number)
        assert len(answers._asked) <= 3
    assert run_tasks(session, server) == 20


def test_so_many_names_are_kept_of_workers_that_live(
    session: Session,
    server: redis.Redis,
    answers: NearAnswers,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(near_answers_module, "ASKED_MOST", 3)
    for number in range(20):
        monkeypatch.setattr(memory.there, "owner", str(number))
        live(server, session, str(number))
        assert not is_read(session, answers, memory, 2 * number)
        assert run_tasks(session, server) == 1
        assert is_read(session, answers, memory, 2 * number + 1)
        assert len(answers._ours) <= 3


def test_a_client_that_was_closed_asks_nothing(
    session: Session, answers: NearAnswers, memory: Memory
) -> None:
    session.closed = True
    assert not is_read(session, answers, memory, 1)
    assert not session.tasks


def test_memory_is_not_looked_for_where_nobody_waits_for_what_is_told(
    session: Session, answers: NearAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[str]()
    monkeypatch.setattr(session.near, "ring", looked.append)
    jobs = jobs_of(some_prompts(2))
    hear(answers, jobs)
    hear(answers, [])
    assert looked == []
    ask(session, jobs[1:])
    hear(answers, jobs, "elsewhere")
    assert looked == ["elsewhere"]
    assert len(session.table.flights) == 1
    assert not session.tasks


# --- together with the collector ---------------------------------------------------------------


@pytest.fixture
def trusted(session: Session, server: redis.Redis, answers: NearAnswers, memory: Memory) -> Memory:
    """Of a worker that is known to live."""
    live(server, session)
    assert not is_read(session, answers, memory, 99)
    run_tasks(session, server)
    session.table.withdrawn.clear()
    return memory


def test_what_was_copied_is_settled_once(
    session: Session, answers: NearAnswers, trusted: Memory
) -> None:
    jobs = jobs_of(some_prompts(5))
    ask(session, jobs)
    trusted.lay(jobs)
    hear(answers, jobs[:2])
    hear(answers, jobs[1:4])
    with session.near.reading:
        assert session.near.settle() == 4 * ROW
        assert session.near.settle() == 0
    hear(answers, jobs)
    with session.near.reading:
        assert session.near.settle() == ROW


def test_notices_of_what_was_read_near_are_taken_off_by_its_size(
    session: Session,
    server: redis.Redis,
    answers: NearAnswers,
    trusted: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only once the server has said of any that it is stored: before there is nothing to take."""
    monkeypatch.setattr(collector_module, "BLOCK", 0.02)
    monkeypatch.setattr(collector_module, "TAKE_OFF_AFTER", 1e9)
    monkeypatch.setattr(collector_module, "TAKE_OFF_BYTES", 3 * ROW)
    session.join(info_of(1))
    (shard,) = session.shards
    jobs, reply = jobs_of(some_prompts(4)), shard.reply(session.id)
    collector = Collector(session)
    ask(session, jobs)
    send(session)
    trusted.lay(jobs)
    hear(answers, jobs[:3])
    try:
        server.xadd(reply, {"bye": "1"})
        collector._collect_once()
        assert server.xlen(reply) == 1  # these bytes are no notice's yet
        server.xadd(reply, {"ok": jobs[0].digest.hex()})
        collector._collect_once()
        assert server.xlen(reply) == 0
        hear(answers, jobs[3:])
        server.xadd(reply, {"ok": jobs[3].digest.hex()})
        collector._collect_once()
        assert server.xlen(reply) == 1
    finally:
        collector._servers.close()


class NotedLock:
    """A lock, and whether anybody has come to it while another had it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.is_waited_for = Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_what_is_being_copied_is_not_fetched(
    session: Session,
    server: redis.Redis,
    answers: NearAnswers,
    trusted: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector, who is told meanwhile that it is stored, waits, and finds that it has come."""
    monkeypatch.setattr(collector_module, "BLOCK", 0.02)
    session.join(info_of(1))
    (shard,) = session.shards
    reading: Any = NotedLock()
    monkeypatch.setattr(session.near, "reading", reading)
    begun, goes_on, copy = Event(), Event(), RowRingReader.copy

    def slowly(ring: RowRingReader, *given: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return copy(ring, *given)

    monkeypatch.setattr(RowRingReader, "copy", slowly)
    jobs = jobs_of(some_prompts(3))
    call = ask(session, jobs)
    send(session)
    put(server, session, jobs)
    trusted.lay(jobs)
    collector, fetched = Collector(session), list[Any]()
    fetch = collector._answers.fetch

    def noted(shard: Any, digests: Any, *given: Any) -> int:
        fetched.extend(digests)
        return fetch(shard, digests, *given)

    monkeypatch.setattr(collector._answers, "fetch", noted)
    server.xadd(shard.reply(session.id), {"ok": "".join(job.digest.hex() for job in jobs[:2])})
    copying = Guarded(lambda: hear(answers, jobs[:2]))
    assert begun.wait(60)
    collecting = Guarded(collector._collect_once)
    try:
        assert reading.is_waited_for.wait(30)
        assert not call.answers[0]
    finally:
        goes_on.set()
        copying.end()
        collecting.end()
        collector._servers.close()
    assert fetched == []
    assert call.left == 1
    assert all(is_row_of(job, answer) for job, answer in zip(jobs, call.answers[:2], strict=False))
    assert session.near.read_bytes == 0
    assert session.table.statistics.resubmitted == 0


@pytest.mark.parametrize("in_place", [False, True], ids=["alone", "in its place"])
def test_what_came_before_it_could_be_copied_is_given_once(
    session: Session,
    server: redis.Redis,
    answers: NearAnswers,
    trusted: Memory,
    monkeypatch: pytest.MonkeyPatch,
    in_place: bool,
) -> None:
    """Of the server, or of another's: it was waited for as this was told."""
    session.join(info_of(1))
    jobs = jobs_of(some_prompts(3))
    call = ask_stacked(session, jobs)[0] if in_place else ask(session, jobs)
    send(session)
    put(server, session, jobs)
    trusted.lay(jobs)
    reader = AnswerReader(session, Servers(lambda: server))  # type: ignore[arg-type,return-value]

    def found_late(name: str) -> RowRingReader:
        monkeypatch.setattr(answers_module, "SMALLEST", 1 << 10)
        known = {session.shards[0].result(job.digest): row_of(job) for job in jobs[:2]}
        reader.fetch(session.shards[0], [job.digest for job in jobs[:2]], known)
        monkeypatch.setattr(answers_module, "SMALLEST", 1)
        return trusted.there

    monkeypatch.setattr(session.near, "ring", found_late)
    hear(answers, jobs)
    assert session.near.read_bytes == ROW
    assert call.left == 0
    if in_place:
        assert block_of(call) == numbers_of(jobs)
    else:
        assert are_rows(call)


def test_rows_are_copied_while_others_know_of_it(
    session: Session, answers: NearAnswers, trusted: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held, copy = list[bool](), RowRingReader.copy

    def noted(ring: RowRingReader, *given: Any) -> Any:
        is_held.append(session.near.reading.locked())
        return copy(ring, *given)

    monkeypatch.setattr(RowRingReader, "copy", noted)
    jobs = jobs_of(some_prompts(2))
    ask(session, jobs)
    trusted.lay(jobs)
    hear(answers, jobs)
    assert is_held == [True, True]
    assert not session.near.reading.locked()


def test_who_fails_to_copy_keeps_nobody_back(
    session: Session, answers: NearAnswers, trusted: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise MemoryError

    jobs = jobs_of(some_prompts(2))
    _, stack = ask_stacked(session, jobs)
    trusted.lay(jobs)
    with monkeypatch.context() as patch:
        patch.setattr(RowRingReader, "copy", broken)
        with pytest.raises(MemoryError):
            hear(answers, jobs)
    assert not stack._lent
    assert not session.near.reading.locked()
    hear(answers, jobs)
    assert not session.table.flights
