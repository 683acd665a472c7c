"""What a client's threads share: bounds, endings, and the move to another pool."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lmpool.affinity import Placement
from lmpool.errors import LmpoolError, PoolMismatch, ServerUnreachable
from lmpool.keys import Priority
from lmpool.producer.cache import AnswerCache
from lmpool.producer.flights import Statistics
from lmpool.producer.pending import PendingCall
from lmpool.producer.session import UNDER_WAY_BYTES, Session, client_id
from lmpool.settings import ClientOptions
from lmpool.wants import Digest, Row
from lmpool.wire import Job
from tests.support.parts import ask, info_of, jobs_of, new_session, row_of, some_prompts

URL = "redis://nowhere:1/0"


@pytest.fixture
def session() -> Session:
    return new_session(URL, "p")


def send(session: Session, most: int = 1000, priority: Priority = "interactive") -> int:
    return len(session.table.take_unsent(most, 1 << 20, priority))


def test_before_it_has_joined_it_knows_no_shards() -> None:
    session = Session(ClientOptions(url=URL, pool="p"), AnswerCache(0), Statistics())
    assert session.shards == ()
    assert session.info is None
    assert not session.joined.is_set()
    info = info_of(3, lanes=2)
    session.join(info)
    assert session.joined.is_set()
    assert session.info is info
    assert session.shards == info.shard_keys(session.keys)
    ask(session, jobs_of(some_prompts(20)))
    assert {flight.shard for flight in session.table.flights.values()} == {0, 1, 2}


def test_what_may_be_sent_is_what_has_room_on_the_server() -> None:
    session = new_session(URL, "p", info_of(2, client_backlog=8))  # 16 in both shards
    assert session.may_send("interactive") == 0
    ask(session, jobs_of(some_prompts(20)))
    assert session.may_send("interactive") == 16
    send(session, 10)
    assert session.may_send("interactive") == 6
    send(session, 6)
    assert session.may_send("interactive") == 0
    # Not each single place that becomes free is a request of its own: a quarter of the bound is.
    flights = [flight for flight in session.table.flights.values() if flight.sent]
    for flight in flights[:3]:
        session.table.land(flight.job.digest, Row("f32").decode(row_of(flight.job), info_of()))
    assert session.may_send("interactive") == 0
    session.table.land(flights[3].job.digest, Row("f32").decode(row_of(flights[3].job), info_of()))
    assert session.may_send("interactive") == 4
    # Each priority has the bound for itself.
    ask(session, jobs_of(some_prompts(5, start=40)), priority="batch")
    assert session.may_send("batch") == 16


def test_what_the_server_has_of_a_client_is_bounded_in_bytes() -> None:
    session = new_session(URL, "p", info_of(1, max_prompt_tokens=10**9))
    long = bytes(UNDER_WAY_BYTES // 4)
    jobs = [Job(Row("f32"), Digest(bytes([number] * 16)), long, None) for number in range(8)]
    for job in jobs:
        ask(session, [job])
    for _ in range(4):
        assert session.may_send("interactive")
        assert send(session, 1) == 1
    assert session.may_send("interactive") == 0
    session.table.fail(jobs[0].digest, LmpoolError("it failed"))
    assert session.may_send("interactive")
    send(session, 1)
    assert session.may_send("interactive") == 0
    # Each priority has the bound for itself, and what is asked so by somebody is of that.
    ask(session, jobs_of(some_prompts(3)), priority="batch")
    assert session.may_send("batch")
    # The server may lose all of it, and nothing would come that made room.
    for flight in list(session.table.flights.values()):
        if flight.sent:
            session.table.resend(flight)
    for _ in range(3):
        assert session.may_send("interactive")
        assert send(session, 1) == 1
    session.spread(info_of(2))
    assert session.table.bytes_sent == {"interactive": 0, "batch": 0}
    for job in jobs:
        session.table.fail(job.digest, LmpoolError("it failed"))
    assert session.table.bytes_sent == {"interactive": 0, "batch": 0}


def test_the_last_few_are_sent_into_any_room() -> None:
    session = new_session(URL, "p", info_of(1, client_backlog=8))
    ask(session, jobs_of(some_prompts(8)))
    send(session, 7)
    assert session.may_send("interactive") == 1


def test_what_ends_all_ends_every_call_and_tells_the_shards_what_they_know(
    session: Session,
) -> None:
    jobs = jobs_of(some_prompts(9))
    sent, unsent = ask(session, jobs[:6]), ask(session, jobs[5:])
    send(session, 6)
    error = LmpoolError("why")
    assert set(session.end_all(error)) == {sent, unsent}
    assert sent.error is unsent.error is error
    assert not session.table.flights
    expected = [(Placement(3).of(job.tokens, None)[0], job.digest) for job in jobs[:6]]
    assert sorted(session.table.take_withdrawn()) == sorted(expected)
    assert session.end_all(error) == []


def test_everybody_is_told_and_woken(session: Session) -> None:
    calls = [ask(session, jobs_of(some_prompts(3, start=10 * i))) for i in range(3)]
    send(session, 4)
    session.fail_everything(LmpoolError("why"))
    assert all(call.wait(0) and str(call.error) == "why" for call in calls)
    assert session.table.statistics.failed == 3
    assert len(session.table.withdrawn) == 4


def test_a_server_that_is_gone_is_told_nothing(session: Session) -> None:
    call = ask(session, jobs_of(some_prompts(3)))
    send(session)
    session.fail_everything(ServerUnreachable("gone"))
    assert call.wait(0)
    assert session.table.withdrawn == []


def test_of_a_call_that_keeps_errors_each_prompt_fails(session: Session) -> None:
    session.join(info_of(1))
    jobs = jobs_of(some_prompts(5))
    call = PendingCall(jobs, None, info=session.info, keeps_errors=True)
    with session.lock:
        session.table.add(call, 0.0)
        assert session.fail_all(LmpoolError("all")) == [call]
    assert [str(answer) for answer in call.answers] == ["all"] * 5
    assert session.table.statistics.failed == 5


def test_a_prompt_that_failed_is_counted_once(session: Session) -> None:
    jobs = jobs_of(some_prompts(3))
    first, second = ask(session, jobs), ask(session, jobs[:1])
    flights = list(session.table.flights.values())
    error = LmpoolError("why")
    assert session.fail(flights[1], error) == [first]
    assert session.fail(flights[2], error) == []  # nobody waits for it any more
    assert session.table.statistics.failed == 1
    assert not second.done
    assert session.fail(flights[0], error) == [second]
    assert session.table.statistics.failed == 2


def test_a_call_that_waits_no_longer_is_forgotten_once(session: Session) -> None:
    call = ask(session, jobs_of(some_prompts(3)))
    send(session)
    session.forget(call)
    session.forget(call)
    assert str(call.error) == "withdrawn"
    assert session.table.statistics.withdrawn == 3
    done = ask(session, [])
    session.forget(done)
    assert done.error is None


def test_a_move_ends_what_was_asked_and_forgets_the_old_pool(session: Session) -> None:
    jobs = jobs_of(some_prompts(4))
    call = ask(session, jobs)
    send(session)
    session.cache.put(jobs[0].digest, Row("f32").decode(row_of(jobs[0]), info_of()))
    new = info_of(2, fingerprint="f" * 32, model="other")
    error = PoolMismatch("replaced")
    assert session.move(new, error) == [call]
    assert call.error is error
    assert session.info is new
    assert session.shards == new.shard_keys(session.keys)
    assert session.table.withdrawn == []  # the new pool knows nothing of it
    assert session.cache.get(jobs[0].digest) is None
    ask(session, jobs_of(some_prompts(20), info=new))
    assert {flight.shard for flight in session.table.flights.values()} == {0, 1}


def test_answers_of_the_same_model_stay_in_the_cache(session: Session) -> None:
    (job,) = jobs_of(some_prompts(1))
    session.cache.put(job.digest, Row("f32").decode(row_of(job), info_of()))
    session.move(replace(info_of(), shards=1), PoolMismatch("replaced"))
    assert session.cache.get(job.digest) is not None


@pytest.mark.parametrize(
    ("url", "pattern"),
    [
        (URL, r"[0-9a-f]{16}"),
        ("redis://:secret@host:1/0", r"[0-9a-f]{16}"),
        ("redis://alice:secret@host:1/0", r"alice-[0-9a-f]{16}"),
        ("redis://al%3Aice:secret@host:1/0", r"[0-9a-f]{16}"),
        (f"redis://{'a' * 65}:secret@host:1/0", r"[0-9a-f]{16}"),
    ],
)
def test_a_clients_name_is_nobody_elses_and_begins_with_its_user(url: str, pattern: str) -> None:
    names = {client_id(url) for _ in range(10)}
    assert len(names) == 10
    assert all(re.fullmatch(pattern, name) for name in names)
