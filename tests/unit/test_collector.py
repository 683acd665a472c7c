"""The client's collector: notices of all shards, each once, and nothing that they cannot prove."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from lmpool.errors import (
    JobExpired,
    JobFormatError,
    LmpoolError,
    PromptFailed,
    ServerError,
    UnknownAdapter,
)
from lmpool.producer import collector as collector_module
from lmpool.producer.collector import DOUBTFUL, Collector
from lmpool.producer.pending import PendingCall
from lmpool.producer.session import Session
from lmpool.wire import Job
from tests.support import logged
from tests.support.fake import FakeServer
from tests.support.parts import (
    Flag,
    Guarded,
    SplitServers,
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
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "BLOCK", 0.02)


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def session(fake_url: str, pool_name: str) -> Session:
    return new_session(fake_url, pool_name)


@pytest.fixture
def collector(session: Session) -> Iterator[Collector]:
    collector = Collector(session)
    yield collector
    collector._servers.close()


def waiting(session: Session, jobs: list[Job], **options: Any) -> PendingCall:
    """A call whose jobs the server knows."""
    call = ask(session, jobs, **options)
    session.table.take_unsent(1000, 1 << 20)
    return call


def answer(server: Any, session: Session, jobs: list[Job]) -> None:
    """Results, and a notice a shard, as a worker writes them."""
    for shard in session.shards:
        mine = [job for job in jobs if shard_of_job(session, job) is shard]
        for job in mine:
            server.set(shard.result(job.digest), row_of(job))
        if mine:
            server.xadd(shard.reply(session.id), {"ok": "".join(j.digest.hex() for j in mine)})


def tell(
    server: Any, session: Session, job: Job, status: str, error: str = "", **options: Any
) -> None:
    """An error's notice."""
    fields = {"digest": job.digest.hex(), "status": status, "error": error}
    server.xadd(shard_of_job(session, job).reply(session.id), fields, **options)


def are_rows(call: PendingCall) -> bool:
    return all(is_row_of(job, found) for job, found in zip(call.jobs, call.answers, strict=True))


def test_notices_of_all_shards_are_read_at_once(
    session: Session, collector: Collector, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(some_prompts(9))
    call = waiting(session, jobs)
    answer(server, session, jobs)
    reads: list[int] = []
    xread = collector._servers.anywhere.xread

    def counted(streams: dict[str, str], **options: Any) -> Any:
        reads.append(len(streams))
        return xread(streams, **options)

    monkeypatch.setattr(collector._servers.anywhere, "xread", counted)
    collector._collect_once()
    assert call.wait(0)
    assert are_rows(call)
    assert reads == [3]


def test_shards_on_several_servers_are_read_where_they_lie(
    session: Session, collector: Collector
) -> None:
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        collector._servers.close()
        collector._servers = collector._answers._servers = SplitServers(clients)
        jobs = jobs_of(some_prompts(9))
        call = waiting(session, jobs)
        for number, client in enumerate(clients):
            answer(
                client, session, [j for j in jobs if shard_of_job(session, j).number % 2 == number]
            )
        collector._collect_once()
        assert call.wait(0)
        assert are_rows(call)


def test_reading_goes_on_where_it_ended_also_after_a_break(
    session: Session, collector: Collector, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (jobs_of(some_prompts(6, start=20 * i)) for i in range(3))
    call = waiting(session, first)
    answer(server, session, first)
    collector._collect_once()
    assert are_rows(call)
    seen: list[Any] = []
    xread = collector._servers.anywhere.xread

    def cut(streams: dict[str, str], **options: Any) -> Any:
        found = xread(streams, **options)
        seen.append([len(entries) for _, entries in found or ()])
        if len(seen) == 1:
            raise redis.exceptions.ConnectionError("the answer was lost")
        return found

    monkeypatch.setattr(collector._servers.anywhere, "xread", cut)
    call = waiting(session, second)
    answer(server, session, second)
    with pytest.raises(redis.exceptions.ConnectionError):
        collector._collect_once()
    assert not call.done
    collector._collect_once()  # the same again
    assert are_rows(call)
    assert seen[0] == seen[1]
    assert sum(seen[0]) == len({shard_of_job(session, job).number for job in second})
    call = waiting(session, third)
    answer(server, session, third)
    collector._collect_once()
    assert are_rows(call)
    assert sum(seen[2]) == len({shard_of_job(session, job).number for job in third})


def test_more_than_one_reads_worth_is_read_in_turn(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    session.join(info_of(1))
    jobs = jobs_of(some_prompts(2))
    call = waiting(session, jobs)
    with server.pipeline() as pipeline:
        for _ in range(600):
            pipeline.xadd(session.shards[0].reply(session.id), {"ok": ""})
        pipeline.execute()
    answer(server, session, jobs)
    collector._collect_once()
    assert not call.done
    collector._collect_once()
    assert are_rows(call)


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "text", "kind", "message"),
    [
        ("failed", "too odd", PromptFailed, "too odd"),
        ("failed", "", PromptFailed, "the worker answered failed"),
        ("unknown_adapter", "adapter 'x' was removed", UnknownAdapter, "adapter 'x' was removed"),
        ("refused", "job version 7", JobFormatError, "job version 7"),
        ("news", "of a later release", PromptFailed, "of a later release"),
        ("news", "", PromptFailed, "the worker answered news"),
    ],
)
def test_an_error_ends_the_calls_that_wait_for_its_prompt(
    status: str,
    text: str,
    kind: type[LmpoolError],
    message: str,
    session: Session,
    collector: Collector,
    server: redis.Redis,
) -> None:
    jobs = jobs_of(some_prompts(6))
    call, other = waiting(session, jobs), waiting(session, jobs[1:])
    for _ in range(3 if status in DOUBTFUL else 1):
        assert not call.done
        tell(server, session, jobs[0], status, text)
        collector._collect_once()
    assert type(call.error) is kind
    assert str(call.error) == message
    assert call.wait(0)
    assert not other.done
    assert session.table.statistics.failed == 1
    assert session.table.statistics.expired == 0


def test_errors_and_answers_of_one_read_are_all_taken(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(9))
    good, bad = waiting(session, jobs[:6]), [waiting(session, [job]) for job in jobs[6:]]
    for job in jobs[6:]:
        tell(server, session, job, "failed", "odd")
    answer(server, session, jobs[:6])
    collector._collect_once()
    assert are_rows(good)
    assert all(isinstance(call.error, PromptFailed) for call in bad)


def test_the_sender_hears_of_what_a_failed_call_leaves(
    session: Session, collector: Collector, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    notified: list[bool] = []
    monkeypatch.setattr(session.work, "notify_all", lambda: notified.append(session.is_interrupted))
    jobs = jobs_of(some_prompts(4))
    waiting(session, jobs)
    tell(server, session, jobs[0], "failed", "odd")
    collector._collect_once()
    assert notified == [True]
    assert len(session.table.withdrawn) == 3


def test_a_prompt_that_expired_is_told_and_counted_as_that(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(2))
    call = waiting(session, jobs, deadline=time.monotonic() - 1)
    tell(server, session, jobs[0], "expired")
    collector._collect_once()
    assert isinstance(call.error, JobExpired)
    assert call.wait(0)
    counted = session.table.statistics
    assert (counted.expired, counted.failed, counted.resubmitted) == (1, 0, 0)


@pytest.mark.parametrize("left", [None, 60.0])
def test_a_prompt_that_somebody_waits_longer_for_is_asked_again(
    left: float | None, session: Session, collector: Collector, server: redis.Redis
) -> None:
    (job,) = jobs_of(some_prompts(1))
    deadline = None if left is None else time.monotonic() + left
    call = waiting(session, [job], deadline=deadline)
    tell(server, session, job, "expired")
    collector._collect_once()
    assert not call.done
    assert session.table.statistics.resubmitted == 1
    (flight,) = session.table.take_unsent(10, 1 << 20)
    assert flight.job is job


def test_a_clock_that_was_wrong_is_set_right_by_what_expired(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(2))
    waiting(session, jobs)
    session.clock._offset -= 3600
    assert session.clock.now_ms() / 1000 < time.time() - 3000
    tell(server, session, jobs[0], "failed", "odd")
    collector._collect_once()
    assert session.clock.now_ms() / 1000 < time.time() - 3000  # not asked for at every error
    tell(server, session, jobs[1], "expired")
    waiting(session, jobs)
    collector._collect_once()
    assert abs(session.clock.now_ms() / 1000 - time.time()) < 60


# --- streams made anew -------------------------------------------------------------------------


def test_an_old_error_is_not_given_to_who_asks_the_same_prompt_now(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    (job,) = jobs_of(some_prompts(1))
    waiting(session, [job])
    tell(server, session, job, "failed", "at that time")
    collector._collect_once()
    call = waiting(session, [job])
    for shard in session.shards:  # another shard's stream was made anew: it alone is read again
        if shard is not shard_of_job(session, job):
            session.made[shard.reply(session.id)] += 1
    collector._collect_once()
    assert not call.done


def test_a_stream_made_anew_is_read_from_its_beginning(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    (job,) = jobs_of(some_prompts(1))
    reply = shard_of_job(session, job).reply(session.id)
    session.made[reply] = 1
    server.xadd(reply, {"hello": "1"})
    collector._collect_once()
    assert session.last_ids[reply] != "0-0"
    # The server forgot it; its clock is behind the one that it was: ids are smaller.
    server.delete(reply)
    call = waiting(session, [job])
    server.xadd(reply, {"hello": "1"}, id="5-1")
    tell(server, session, job, "failed", "odd", id="5-2")
    collector._collect_once()
    assert not call.done  # nobody knows of the new stream yet
    session.made[reply] = 2  # the sender made it
    collector._collect_once()
    assert isinstance(call.error, PromptFailed)
    assert session.last_ids[reply] == "5-2"
    # It is read again once only.
    call = waiting(session, [job])
    collector._collect_once()
    assert not call.done


def test_a_beginning_that_is_read_before_the_sender_knows_counts(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    (job,) = jobs_of(some_prompts(1))
    waiting(session, [job])
    reply = shard_of_job(session, job).reply(session.id)
    server.xadd(reply, {"hello": "1"})
    tell(server, session, job, "failed", "odd")
    collector._collect_once()
    call = waiting(session, [job])
    session.made[reply] = 1  # only now the sender has its answer
    collector._collect_once()
    assert not call.done  # the error was not read a second time


# --- what a notice does not prove ----------------------------------------------------------------


def test_an_answer_that_is_announced_and_not_there_is_asked_for_again(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    (job,) = jobs_of(some_prompts(1))
    call = waiting(session, [job])
    server.xadd(shard_of_job(session, job).reply(session.id), {"ok": job.digest.hex()})
    collector._collect_once()
    assert not call.done
    assert session.table.statistics.resubmitted == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"ok": b"\xff" * 64},
        {"ok": b"zz" * 16},
        {"ok": b"ab"},
        {"ok": b"00" * 16 * 1000},
        {"digest": b"00" * 16, "status": b"failed"},
        {"digest": b"\x00", "status": b"failed", "error": b"x"},
        {"status": b"\xff\xfe"},
        {"value": b"a row"},
        {b"\xff": b"\xff"},
    ],
    ids=range(9),
)
def test_notices_that_are_none_do_no_harm(
    fields: dict[Any, Any], session: Session, collector: Collector, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(6))
    call = waiting(session, jobs)
    for shard in session.shards:
        server.xadd(shard.reply(session.id), fields)
    answer(server, session, jobs)
    collector._collect_once()
    assert are_rows(call)
    assert session.table.statistics.resubmitted == 0


def test_an_error_that_is_no_text_is_shown_as_far_as_it_is_one(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    (job,) = jobs_of(some_prompts(1))
    call = waiting(session, [job])
    tell(server, session, job, "failed", b"b\xffd")  # type: ignore[arg-type]
    collector._collect_once()
    assert str(call.error) == "b\ufffdd"


def test_a_notice_in_another_shards_stream_finds_no_result_there(
    session: Session, collector: Collector, server: redis.Redis
) -> None:
    (job,) = jobs_of(some_prompts(1))
    call = waiting(session, [job])
    right = shard_of_job(session, job)
    server.set(right.result(job.digest), row_of(job))
    other = next(shard for shard in session.shards if shard is not right)
    server.xadd(other.reply(session.id), {"ok": job.digest.hex()})
    collector._collect_once()
    assert not call.done
    assert session.table.statistics.resubmitted == 1


# --- its life ----------------------------------------------------------------------------------


@pytest.fixture
def run(collector: Collector, session: Session) -> Iterator[Callable[[], Guarded]]:
    threads: list[Guarded] = []

    def run() -> Guarded:
        threads.append(Guarded(collector.run))
        return threads[-1]

    yield run
    session.closing.set()
    session.joined.set()
    for thread in threads:
        thread.end()


def test_it_reads_what_comes_once_the_pool_is_known_until_the_client_closes(
    session: Session,
    server: redis.Redis,
    run: Callable[[], Guarded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards, session.shards = session.shards, ()
    session.joined.clear()
    wait, waits = session.joined.wait, threading.Event()

    def note_and_wait() -> bool:
        waits.set()
        return wait()

    monkeypatch.setattr(session.joined, "wait", note_and_wait)
    thread = run()
    assert waits.wait(60)  # it has seen that nothing is known
    session.shards = shards
    jobs = jobs_of(some_prompts(6))
    call = waiting(session, jobs)
    answer(server, session, jobs)
    assert not call.wait(0.05)
    session.joined.set()
    assert call.wait(60)
    assert are_rows(call)
    session.closing.set()
    thread.end()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("a defect"), "RuntimeError: a defect"),
        (MemoryError("2 MiB"), r"this process has no memory.*2 MiB\): ask for fewer"),
    ],
)
def test_a_defect_of_ours_leaves_nobody_waiting_and_the_next_is_served(
    error: Exception,
    told: str,
    session: Session,
    collector: Collector,
    server: redis.Redis,
    run: Callable[[], Guarded],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fetch, failures = collector._answers.fetch, [1]

    def broken(*arguments: Any) -> int:
        if failures:
            failures.pop()
            raise error
        return fetch(*arguments)

    monkeypatch.setattr(collector._answers, "fetch", broken)
    jobs = jobs_of(some_prompts(2))
    call = waiting(session, jobs)
    answer(server, session, jobs)
    run()
    assert call.wait(60)
    assert type(call.error) is ServerError
    assert re.search(told, str(call.error))
    assert "the client's collector failed" in caplog.text
    others = jobs_of(some_prompts(3, start=30))
    call = waiting(session, others)
    answer(server, session, others)
    assert call.wait(60)
    assert are_rows(call)


def test_a_refusal_that_lasts_is_told_once(
    session: Session,
    collector: Collector,
    server: redis.Redis,
    run: Callable[[], Guarded],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    collect, said = collector._collect_once, ["no rights"] * 3 + ["other rights"] * 2

    def refused() -> None:
        if said:
            raise redis.exceptions.NoPermissionError(said.pop(0))
        collect()

    monkeypatch.setattr(collector, "_collect_once", refused)
    monkeypatch.setattr("lmpool.producer.collector.random.uniform", lambda *_: 0.0)
    jobs = jobs_of(some_prompts(2))
    call = waiting(session, jobs)
    answer(server, session, jobs)
    with caplog.at_level("WARNING"):
        run()
        assert call.wait(60)
    told = logged.messages(caplog)
    prefix = "the reply stream could not be read: "
    assert told == [prefix + "no rights", prefix + "other rights"]


def test_after_an_outage_it_reads_on(
    session: Session,
    collector: Collector,
    server: redis.Redis,
    run: Callable[[], Guarded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    xread = collector._servers.anywhere.xread
    failures: list[Exception] = [
        redis.exceptions.ConnectionError("refused"),
        redis.exceptions.NoPermissionError("no xread"),
        OSError("unreachable"),
    ]

    def fail(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return xread(*arguments, **options)

    monkeypatch.setattr(collector._servers.anywhere, "xread", fail)
    flag = Flag()
    real = session.closing
    monkeypatch.setattr(flag, "is_set", real.is_set)
    session.closing = flag  # type: ignore[assignment]
    jobs = jobs_of(some_prompts(4))
    call = waiting(session, jobs)
    answer(server, session, jobs)
    run()
    assert call.wait(60)
    assert are_rows(call)
    assert len(flag.waits) == 3
    assert flag.waits[0] < flag.waits[2] <= 1.0  # longer from time to time
    session.closing = real


def test_a_read_that_is_blocked_can_be_cut_off(
    session: Session, collector: Collector, run: Callable[[], Guarded], monkeypatch: Any
) -> None:
    monkeypatch.setattr(collector_module, "BLOCK", 30.0)
    xread, reading = collector._servers.anywhere.xread, threading.Event()

    def read(*arguments: Any, **options: Any) -> Any:
        reading.set()
        return xread(*arguments, **options)

    monkeypatch.setattr(collector._servers.anywhere, "xread", read)
    thread = run()
    assert reading.wait(60)
    session.closing.set()

    def ended() -> bool:
        collector.cut()  # again where it was only about to read
        return not thread.is_alive()

    until(ended)


def left_on(server: Any, session: Session) -> int:
    """Notices on the reply streams."""
    return sum(server.xlen(shard.reply(session.id)) for shard in session.shards)


def test_notices_are_taken_off_once_their_answers_are_fetched(
    session: Session, collector: Collector, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> int:
        raise redis.exceptions.ConnectionError("cut")

    jobs = jobs_of(some_prompts(9))
    call = waiting(session, jobs)
    answer(server, session, jobs)
    with monkeypatch.context() as cut:
        cut.setattr(collector._answers, "fetch", lost)
        with pytest.raises(redis.exceptions.ConnectionError):
            collector._collect_once()
    assert left_on(server, session) == 3  # read, not fetched
    answer(server, session, jobs)
    collector._collect_once()
    assert are_rows(call)
    assert left_on(server, session) == 0
    # They are the client's sign of life.
    assert server.exists(*(shard.reply(session.id) for shard in session.shards)) == 3


@pytest.mark.parametrize("many", [True, False])
def test_few_notices_are_taken_off_together_and_soon(
    many: bool,
    session: Session,
    collector: Collector,
    server: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Time()
    monkeypatch.setattr(collector_module, "time", clock)
    monkeypatch.setattr(collector_module, "TAKE_OFF_BYTES", 1 if many else 1 << 20)
    collector._took_off = clock.now
    call = waiting(session, jobs := jobs_of(some_prompts(9)))
    answer(server, session, jobs)
    collector._collect_once()
    assert are_rows(call)
    assert left_on(server, session) == (0 if many else 3)
    clock.now += 2 * collector_module.TAKE_OFF_AFTER
    collector._collect_once()  # it finds nothing, and does not block for long
    assert left_on(server, session) == 0
