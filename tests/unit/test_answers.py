"""Reading answers: in portions, from their shard, and what is done about those that are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis
import redis.exceptions

from lmpool.backends.engine import Outcome
from lmpool.errors import AnswerFormatError, PromptFailed
from lmpool.producer import answers as answers_module
from lmpool.producer.answers import MAX_TRIES, AnswerReader
from lmpool.producer.session import Session
from lmpool.rows import pack_logprobs
from lmpool.server import open_server
from lmpool.servers import Servers
from lmpool.wants import Generate, Generation
from lmpool.wire import Job
from tests.support.fake import FakeServer
from tests.support.parts import (
    VOCAB,
    SplitServers,
    ask,
    info_of,
    is_row_of,
    jobs_of,
    new_session,
    row_of,
    shard_of_job,
    some_prompts,
)


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def session(fake_url: str, pool_name: str) -> Session:
    return new_session(fake_url, pool_name)


@pytest.fixture
def reader(session: Session, server: redis.Redis) -> AnswerReader:
    return AnswerReader(session, Servers(lambda: server))  # type: ignore[arg-type,return-value]


def put(server: redis.Redis, session: Session, jobs: list[Job]) -> None:
    for job in jobs:
        server.set(shard_of_job(session, job).result(job.digest), row_of(job))


def send(session: Session) -> None:
    session.table.take_unsent(1000, 1 << 20)


def fetch(reader: AnswerReader, session: Session, jobs: list[Job]) -> None:
    """Fetch these, each from its shard."""
    for shard in session.shards:
        mine = [job.digest for job in jobs if shard_of_job(session, job) is shard]
        reader.fetch(shard, mine)


def test_answers_come_from_their_shards_to_whoever_waits(
    session: Session, server: redis.Redis, reader: AnswerReader
) -> None:
    jobs = jobs_of(some_prompts(9))
    call, other = ask(session, jobs), ask(session, jobs[:2])
    send(session)
    put(server, session, jobs)
    fetch(reader, session, jobs)
    for waiting in (call, other):
        assert waiting.wait(0)
        pairs = zip(waiting.jobs, waiting.answers, strict=True)
        assert all(is_row_of(job, answer) for job, answer in pairs)
    assert all(session.cache.get(job.digest) is not None for job in jobs)
    assert not session.table.flights


def test_shards_on_several_servers_are_read_where_they_lie(session: Session) -> None:
    jobs = jobs_of(some_prompts(9))
    call = ask(session, jobs)
    send(session)
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        for job in jobs:
            shard = shard_of_job(session, job)
            clients[shard.number % 2].set(shard.result(job.digest), row_of(job))
        fetch(AnswerReader(session, SplitServers(clients)), session, jobs)
        assert call.wait(0)
        # What is spoiled is deleted there, too.
        call = ask(session, jobs_of(some_prompts(9, start=30)))
        for job in call.jobs:
            shard = shard_of_job(session, job)
            clients[shard.number % 2].set(shard.result(job.digest), b"spoiled")
        fetch(AnswerReader(session, SplitServers(clients)), session, list(call.jobs))
        for job in call.jobs:
            key = shard_of_job(session, job).result(job.digest)
            assert not any(client.exists(key) for client in clients)


def test_large_answers_are_read_a_few_at_a_time(
    session: Session,
    server: redis.Redis,
    reader: AnswerReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers_module, "SMALLEST", 1)
    monkeypatch.setattr(answers_module, "FETCH_BYTES", 3 * 4 * VOCAB)
    sizes: list[int] = []
    mget = server.mget

    def counted(keys: list[str]) -> object:
        sizes.append(len(keys))
        return mget(keys)

    monkeypatch.setattr(server, "mget", counted)
    session.join(info_of(1))
    jobs = jobs_of(some_prompts(8))
    call = ask(session, jobs)
    put(server, session, jobs)
    fetch(reader, session, jobs)
    assert sizes == [3, 3, 2]
    assert call.wait(0)
    assert all(is_row_of(job, answer) for job, answer in zip(jobs, call.answers, strict=True))


def test_large_rows_are_received_into_memory_of_their_own(
    session: Session, server: redis.Redis, fake_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small answers beside them are not, and one that is gone or spoiled keeps none back."""
    monkeypatch.setattr(answers_module, "SMALLEST", 1)
    monkeypatch.setattr(answers_module, "LARGE", 4 * VOCAB)
    monkeypatch.setattr(answers_module, "FETCH_BYTES", 3 * 4 * VOCAB)
    session.join(info_of(1))
    connection: Any = open_server(fake_url)
    received: list[list[int]] = []
    values = connection.values

    def counted(keys: list[str], sizes: list[int], rooms: list[None]) -> object:
        received.append([*sizes])
        assert rooms == [None] * len(sizes)  # nobody has a place for them
        return values(keys, sizes, rooms)

    monkeypatch.setattr(connection, "values", counted)
    jobs = jobs_of(some_prompts(8))
    want = Generate(3, (), 1.0, 7)
    small = jobs_of([[1, 2]], want)
    rows, gone, spoiled = ask(session, jobs[:6]), ask(session, jobs[6:7]), ask(session, jobs[7:])
    written = ask(session, small)
    put(server, session, jobs[:6])
    shard = session.shards[0]
    server.set(shard.result(jobs[7].digest), b"no row")
    computed = Outcome(b"", answer=Generation(np.array([4, 5], np.int32), 0, "length"))
    server.set(shard.result(small[0].digest), want.encode(computed, VOCAB))
    fetch(AnswerReader(session, Servers(lambda: connection)), session, [*small, *jobs])
    assert received == [[len(row_of(jobs[0]))] * n for n in (3, 3, 2)]
    assert all(is_row_of(job, answer) for job, answer in zip(jobs[:6], rows.answers, strict=True))
    assert isinstance(written.answers[0], Generation)
    assert not gone.done
    assert not spoiled.done
    assert not server.exists(shard.result(jobs[7].digest))
    assert session.table.statistics.resubmitted == 2
    connection.connection_pool.disconnect()


def test_a_row_larger_than_a_portion_is_read_alone(
    session: Session, server: redis.Redis, reader: AnswerReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "FETCH_BYTES", 1)
    jobs = jobs_of(some_prompts(4))
    call = ask(session, jobs)
    put(server, session, jobs)
    fetch(reader, session, jobs)
    assert call.wait(0)


def test_a_result_that_is_gone_is_asked_for_again_but_not_for_ever(
    session: Session, reader: AnswerReader
) -> None:
    (job,) = jobs_of(some_prompts(1))
    call = ask(session, [job])
    for number in range(MAX_TRIES):
        send(session)
        assert not session.table.has_unsent()
        fetch(reader, session, [job])
        assert session.table.has_unsent(), number
        assert session.table.statistics.resubmitted == number + 1
    send(session)
    fetch(reader, session, [job])
    assert isinstance(call.error, PromptFailed)
    assert f"gone {MAX_TRIES} times" in str(call.error)
    assert call.wait(0)
    assert session.table.statistics.failed == 1


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        pack_logprobs(np.zeros(VOCAB - 1, np.float32)).joined(),
        Generate(1, (), 1.0, 1).encode(
            Outcome(b"", answer=Generation(np.zeros(2, np.int32), 0, "length")), VOCAB
        ),
    ],
    ids=["empty", "garbage", "of another size", "of another want"],
)
def test_what_is_no_answer_is_deleted_and_computed_again_but_not_for_ever(
    value: bytes,
    session: Session,
    server: redis.Redis,
    reader: AnswerReader,
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = jobs_of(some_prompts(6))
    call = ask(session, jobs)
    send(session)
    put(server, session, jobs[1:])
    bad = jobs[0]
    key = shard_of_job(session, bad).result(bad.digest)
    for number in range(MAX_TRIES):
        server.set(key, value)
        fetch(reader, session, jobs)
        assert not server.exists(key)
        assert session.table.has_unsent()
        assert session.table.statistics.resubmitted == number + 1
        assert not call.done
        send(session)
    assert call.left == 1  # the others have come
    server.set(key, value)
    fetch(reader, session, [bad])
    assert isinstance(call.error, AnswerFormatError)
    assert "refused 1 values that are no answers" in caplog.text
    assert session.cache.get(bad.digest) is None


def test_who_may_not_delete_what_is_no_answer_is_told_at_once(
    session: Session, server: redis.Redis, reader: AnswerReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(some_prompts(1))
    call = ask(session, [job])
    send(session)
    server.set(shard_of_job(session, job).result(job.digest), b"garbage")

    def refuse(*_: object) -> None:
        raise redis.exceptions.NoPermissionError("no permission")

    monkeypatch.setattr(server, "delete", refuse)
    fetch(reader, session, [job])
    assert isinstance(call.error, AnswerFormatError)
    assert call.wait(0)
    assert not session.table.has_unsent()


def test_answers_that_nobody_waits_for_are_left(
    session: Session, server: redis.Redis, reader: AnswerReader
) -> None:
    jobs = jobs_of(some_prompts(4))
    call = ask(session, jobs)
    put(server, session, jobs[:2])
    session.forget(call)
    for job in jobs[:1]:
        server.set(shard_of_job(session, job).result(job.digest), b"garbage")
    fetch(reader, session, jobs)
    assert len(session.cache) == 0
    assert session.table.statistics.resubmitted == 0
    assert server.exists(shard_of_job(session, jobs[0]).result(jobs[0].digest))


def test_only_what_is_worth_it_is_kept_in_the_cache(
    session: Session, server: redis.Redis, reader: AnswerReader
) -> None:
    want = Generate(3, (), 1.0, 7)
    (job,) = jobs_of([[1, 2]], want)
    call = ask(session, [job])
    computed = Outcome(b"", answer=Generation(np.array([4, 5], np.int32), 0, "length"))
    server.set(shard_of_job(session, job).result(job.digest), want.encode(computed, VOCAB))
    fetch(reader, session, [job])
    (answer,) = call.answers
    assert isinstance(answer, Generation)
    assert answer.token_ids.tolist() == [4, 5]
    assert session.cache.get(job.digest) is None


def test_the_sender_hears_of_what_is_to_be_asked_again(
    session: Session, reader: AnswerReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    notified: list[bool] = []
    monkeypatch.setattr(session.work, "notify_all", lambda: notified.append(session.is_interrupted))
    (job,) = jobs_of(some_prompts(1))
    ask(session, [job])
    send(session)
    fetch(reader, session, [job])
    assert notified == [True]
