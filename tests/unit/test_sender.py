"""The client's sender: claims by shard and priority, bounds, losses, looking after, leaving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis

from lmpool.errors import (
    NoWorkers,
    PoolBusy,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    UnknownAdapter,
)
from lmpool.keys import PRIORITIES, Priority
from lmpool.producer import sender as sender_module
from lmpool.producer.alone import Alone
from lmpool.producer.flights import Flight
from lmpool.producer.notices import bring_forward
from lmpool.producer.sender import Sender
from lmpool.producer.session import (
    CHECK_EVERY,
    CLAIM_BYTES,
    CLAIM_MOST,
    FLIGHT_TTL,
    REPLY_TTL,
    Session,
)
from lmpool.producer.waits import Future
from lmpool.scripts import ScriptsMissing
from lmpool.servers import Servers
from lmpool.wants import Digest, Draw, Generate, Row, Score, Tokens, Want
from lmpool.wire import Job, JobPacker, unpack_job
from tests.support import logged
from tests.support.fake import FakeServer
from tests.support.heartbeats import beating
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
from tests.support.protocol import Consumer, queued, read_flight
from tests.support.waiting import until


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def session(fake_url: str, pool_name: str) -> Session:
    return new_session(fake_url, pool_name)


@pytest.fixture
def new_sender() -> Iterator[Callable[..., Sender]]:
    made: list[Sender] = []

    def new(session: Session, farewell: Callable[[], None] = lambda: None) -> Sender:
        made.append(Sender(session, Alone(session, lambda worker: False), farewell))
        # Nothing is looked after unless a test says so.
        made[-1]._next_check = time.monotonic() + 3600
        return made[-1]

    yield new
    for sender in made:
        sender._servers.close()


@pytest.fixture
def sender(session: Session, new_sender: Callable[..., Sender]) -> Sender:
    return new_sender(session)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The sender's time."""
    clock = Time(time.monotonic())
    monkeypatch.setattr(sender_module, "time", clock)
    return clock


def statistics(session: Session) -> dict[str, int]:
    """The counters that are not 0."""
    return {name: count for name, count in session.table.statistics.as_dict().items() if count}


def waiting(server: redis.Redis, session: Session, priority: Priority) -> list[list[Job]]:
    """The jobs in the streams of that priority, by shard."""
    found = []
    for shard in session.shards:
        entries: Any = server.xrange(shard.stream(priority).key)
        found.append([unpack_job(fields[b"job"]) for _, fields in entries])
    return found


def by_shard(session: Session, jobs: list[Job]) -> list[list[Digest]]:
    """The digests of jobs, by the shard that they belong to."""
    found: list[list[Digest]] = [[] for _ in session.shards]
    for job in jobs:
        found[shard_of_job(session, job).number].append(job.digest)
    return found


# --- claims ------------------------------------------------------------------------------------


def test_each_job_goes_to_its_shard_once(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(9))
    ask(session, jobs)
    sender._serve()
    sender._serve()
    found = waiting(server, session, "interactive")
    assert [[job.digest for job in mine] for mine in found] == by_shard(session, jobs)
    assert all(mine for mine in found)
    for job in jobs:
        shard = shard_of_job(session, job)
        flight = read_flight(server, shard, job)
        assert flight[b"stream"] == shard.stream().key.encode()
        assert flight[f"c:{session.id}".encode()] == b""
        assert flight[b"deadline"] == b""
        assert 0 < server.pttl(shard.flight(job.digest)) <= FLIGHT_TTL * 1000  # type: ignore[operator]
    assert statistics(session) == {"requests": 9, "queued": 9}
    for shard in session.shards:
        reply = shard.reply(session.id)
        assert 0 < server.pttl(reply) <= REPLY_TTL * 1000  # type: ignore[operator]
        assert session.made[reply] == 1


def test_a_job_travels_with_its_want_adapter_and_time(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    for shard in session.shards:
        server.hset(shard.adapters, "x", "77\n/folder")
    (job,) = jobs_of([[5, 6]], Generate(3, (1,), 0.5, 9), "x@77")
    before = session.clock.now_ms()
    ask(session, [job], deadline=time.monotonic() + 60)
    sender._serve()
    took = session.clock.now_ms() - before
    ((found,),) = filter(None, waiting(server, session, "interactive"))
    assert replace(found, deadline=None, sent=0) == job
    assert before <= found.sent <= session.clock.now_ms()
    assert found.deadline is not None
    assert 60_000 - took - 2 <= found.deadline - found.sent <= 60_000
    flight = read_flight(server, shard_of_job(session, job), job)
    assert flight[b"deadline"] == str(found.deadline).encode()


def test_interactive_jobs_are_claimed_before_the_others_and_apart_from_them(
    session: Session, sender: Sender, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[str] = []
    claim = sender._claim_in

    def recorded(shard: Any, flights: Any, priority: Priority) -> None:
        claimed.append(priority)
        claim(shard, flights, priority)

    monkeypatch.setattr(sender, "_claim_in", recorded)
    batch, interactive = jobs_of(some_prompts(5)), jobs_of(some_prompts(5, start=20))
    ask(session, batch, priority="batch")
    ask(session, interactive)
    sender._serve()
    assert claimed == sorted(claimed, key=PRIORITIES.index)
    for priority, jobs in (("batch", batch), ("interactive", interactive)):
        found = waiting(server, session, priority)  # type: ignore[arg-type]
        assert [[job.digest for job in mine] for mine in found] == by_shard(session, jobs)


def test_whoever_asks_interactively_for_what_waits_as_batch_brings_it_forward(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(6))
    ask(session, jobs, priority="batch")
    sender._serve()
    ask(session, jobs[:4])
    sender._serve()
    assert sum(len(mine) for mine in waiting(server, session, "batch")) == 2
    found = waiting(server, session, "interactive")
    assert [[job.digest for job in mine] for mine in found] == by_shard(session, jobs[:4])
    # It is one request for each prompt, whatever became of it.
    assert statistics(session) == {"requests": 10, "queued": 6, "joined": 4}


def test_a_claim_is_bounded_in_jobs_and_bytes(
    session: Session, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        sender, "_claim_in", lambda shard, flights, priority: sizes.append(len(flights))
    )
    session.join(info_of(1, client_backlog=10_000, max_prompt_tokens=10**6))
    long = b"\1\0\0\0" * (CLAIM_BYTES // 8)
    several = [Job(Row("f32"), Digest(i.to_bytes(16, "big")), long, None) for i in range(5)]
    ask(session, several)
    sender._serve()
    assert sizes == [2, 2, 1]
    sizes.clear()
    small = [Job(Row("f32"), Digest(i.to_bytes(16, "big")), b"0000", None) for i in range(9, 1209)]
    ask(session, small)
    sender._serve()
    assert sizes == [CLAIM_MOST, CLAIM_MOST, 1200 - 2 * CLAIM_MOST]


@pytest.mark.parametrize(
    "want",
    [
        Tokens(list(range(100)) * 200),
        Score(token_ids=[list(range(50))] * 1000),
        Score(token_ids=list(range(5000))),
        Draw(seed=1, allowed=list(range(1, 20_000, 2))),
        Generate(seed=1, stop=[[token] * 250 for token in range(60)]),
    ],
    ids=lambda want: want.kind,
)
def test_what_is_wanted_counts_in_the_size_of_a_claim(
    want: Want, session: Session, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = info_of(1, vocab_size=20_000, client_backlog=10_000)
    session.join(info)
    pack, claims = JobPacker(0).pack, []

    def claim(shard: Any, flights: Sequence[Flight], priority: Priority) -> None:
        jobs = [flight.job for flight in flights]
        claims.append([len(pack(j.want, None, j.digest, j.tokens, None, None)) for j in jobs])

    monkeypatch.setattr(sender, "_claim_in", claim)
    want = want.checked(info)
    size = len(pack(want, None, Digest(bytes(16)), b"0000", None, None))
    count = 3 * min(CLAIM_MOST, CLAIM_BYTES // size)
    digests = [Digest(number.to_bytes(16, "big")) for number in range(count)]
    ask(session, [Job(want, digest, b"0000", None) for digest in digests])
    sender._serve()
    session.near.leave()  # as its thread does in the end
    assert sum(map(len, claims)) == count
    assert max(map(sum, claims)) <= 2 * CLAIM_BYTES


def test_results_that_are_there_are_fetched_at_once_from_each_shard(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(9))
    there = jobs[::2]
    for job in there:
        server.set(shard_of_job(session, job).result(job.digest), row_of(job))
    call = ask(session, jobs)
    sender._serve()
    for job, answer in zip(jobs, call.answers, strict=True):
        assert is_row_of(job, answer) if job in there else answer is None
    assert call.left == len(jobs) - len(there)
    counted = statistics(session)
    assert (counted["cache_hits"], counted["queued"]) == (len(there), len(jobs) - len(there))


def test_what_another_client_asked_is_waited_for_with_it(
    session: Session,
    sender: Sender,
    server: redis.Redis,
    fake_url: str,
    pool_name: str,
    new_sender: Callable[..., Sender],
) -> None:
    jobs = jobs_of(some_prompts(6))
    other = new_session(fake_url, pool_name)
    ask(other, jobs[:4])
    new_sender(other)._serve()
    ask(session, jobs)
    sender._serve()
    assert statistics(session) == {"requests": 6, "joined": 4, "queued": 2}
    assert sum(len(mine) for mine in waiting(server, session, "interactive")) == 6
    for job in jobs[:4]:
        fields = read_flight(server, shard_of_job(session, job), job)
        assert {f"c:{session.id}".encode(), f"c:{other.id}".encode()} <= set(fields)


def test_shards_on_several_servers_are_claimed_where_they_lie(
    session: Session, sender: Sender
) -> None:
    with FakeServer() as first, FakeServer() as second:
        sender._servers.close()
        clients = [first.client(), second.client()]
        sender._servers = SplitServers(clients)
        sender._answers._servers = sender._servers
        jobs = jobs_of(some_prompts(9))
        ask(session, jobs)
        sender._serve()
        for shard, mine in zip(session.shards, by_shard(session, jobs), strict=True):
            here, elsewhere = clients[shard.number % 2], clients[1 - shard.number % 2]
            assert len(queued(here, shard)) == len(mine) > 0
            assert not elsewhere.exists(shard.stream().key)


def test_what_was_away_before_a_move_says_nothing_of_shards_of_the_same_numbers(
    session: Session, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.info is not None
    jobs = jobs_of(some_prompts(9))
    call = ask(session, jobs)
    monkeypatch.setattr(sender._servers, "apart", lambda *_: None)  # all of them are away
    sender._serve()
    session.spread(session.info.moved_to(2, 1))
    waited = session.options.reconnect_timeout + 1
    for _, outage in sender._outages.looked():
        outage.since -= waited
    for _ in range(2):
        sender._serve()
        sender._look_after_outages()
    assert call.error is None
    assert {shard for shard, _ in sender._outages.looked()} == set(session.shards)


def test_what_nobody_can_be_told_of_does_not_grow_while_a_shard_stays_away(
    session: Session, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that is told so withdraws its other prompts."""
    monkeypatch.setattr(sender._servers, "apart", lambda *_: None)
    for turn in range(5):
        call = ask(session, jobs_of(some_prompts(9, 9 * turn)))
        sender._serve()
        for _, outage in sender._outages.looked():
            outage.since = -math.inf
        sender._look_after_outages()
        assert isinstance(call.error, ServerUnreachable)
    kept = [outage.withdrawn for _, outage in sender._outages.looked()]
    assert sum(map(len, kept)) + len(session.table.withdrawn) <= 9


def test_a_shard_that_is_away_is_what_keeps_calls_waiting_until_it_is_back(
    session: Session, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ask(session, jobs_of(some_prompts(9)))
    began, apart = time.monotonic(), sender._servers.apart
    monkeypatch.setattr(sender._servers, "apart", lambda *_: None)
    sender._serve()
    sender._look_after_outages()
    assert set(session.troubles) == {shard.number for shard in session.shards}
    for number, (seen, why) in session.troubles.items():
        assert seen >= began
        assert why == f", whose shard {number} was away"
    monkeypatch.setattr(sender._servers, "apart", apart)
    sender._look_after_outages()
    assert not session.troubles
    assert call.error is None


@pytest.mark.parametrize("kind", ["hash", "list", "nothing"])
def test_a_damaged_or_missing_model_info_holds_no_claim_up(
    session: Session, sender: Sender, server: redis.Redis, kind: str
) -> None:
    """Workers publish it again; until then the model is taken to be the one that was known."""
    server.delete(session.keys.info)
    if kind == "hash":
        server.hset(session.keys.info, "a", "b")
    elif kind == "list":
        server.rpush(session.keys.info, "a")
    session.confirmed = -math.inf
    jobs = jobs_of(some_prompts(3))
    call = ask(session, jobs)
    sender._serve()
    assert call.error is None
    assert sum(len(mine) for mine in waiting(server, session, "interactive")) == 3


# --- bounds ------------------------------------------------------------------------------------


def test_at_the_backlogs_bound_the_rest_is_asked_again_in_order_and_not_at_once(
    session: Session,
    sender: Sender,
    server: redis.Redis,
    clock: Time,
) -> None:
    session.join(info_of(1, max_backlog=2))
    jobs = jobs_of(some_prompts(5))
    call = ask(session, jobs)
    sender._serve()
    (found,) = waiting(server, session, "interactive")
    assert [job.digest for job in found] == [job.digest for job in jobs[:2]]
    assert statistics(session) == {"requests": 5, "queued": 2}
    assert not call.done
    # It asks again in a while: until then there is nothing to do.
    assert not sender._has_work()
    pause = sender._until_check()
    assert pause is not None
    assert 0.01 <= pause <= 0.03
    sender._serve()
    assert len(session.table.unsent["interactive"]) == 3
    clock.now += 0.031
    assert sender._has_work()
    server.delete(session.shards[0].stream().key)
    sender._serve()
    (found,) = waiting(server, session, "interactive")
    assert [job.digest for job in found] == [job.digest for job in jobs[2:4]]


def test_who_waits_follows_the_sentinels(
    session: Session, sender: Sender, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while they are away: what is waited for is looked after all the same."""
    looks: list[float] = []

    def follow() -> None:
        looks.append(clock.now)
        raise redis.exceptions.ConnectionError("No master found")

    monkeypatch.setattr(sender._servers, "follow", follow)
    session.join(info_of(1))
    ask(session, jobs_of(some_prompts(1)))
    sender._next_check = clock.now + CHECK_EVERY
    sender._serve()
    assert looks == []  # there is nothing to look after yet
    clock.now += CHECK_EVERY
    sender._serve()
    assert looks == [clock.now]
    (flight,) = session.table.flights.values()
    assert flight.since == clock.now


def test_what_found_no_room_goes_before_what_was_asked_after_it(
    session: Session, sender: Sender, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "CLAIM_MOST", 3)
    session.join(info_of(1, max_backlog=2))
    jobs = jobs_of(some_prompts(7))
    ask(session, jobs)
    sender._serve()
    unsent = [flight.job.digest for flight in session.table.unsent["interactive"]]
    assert unsent == [job.digest for job in jobs[2:]]


def test_one_full_stream_holds_back_neither_other_shards_nor_the_other_priority(
    session: Session, sender: Sender, server: redis.Redis, clock: Time
) -> None:
    session.join(info_of(3, max_backlog=1))
    jobs = jobs_of(some_prompts(9))
    ask(session, jobs)
    sender._serve()
    assert [len(mine) for mine in waiting(server, session, "interactive")] == [1, 1, 1]
    others = jobs_of(some_prompts(3, start=40))
    ask(session, others, priority="batch")
    assert sender._has_work()
    sender._serve()
    found = waiting(server, session, "batch")
    assert [len(mine) for mine in found] == [bool(d) for d in by_shard(session, others)]


def test_a_flight_that_found_no_room_is_not_withdrawn_on_the_server(
    session: Session, sender: Sender, clock: Time
) -> None:
    session.join(info_of(1, max_backlog=1))
    jobs = jobs_of(some_prompts(3))
    call = ask(session, jobs)
    sender._serve()
    with session.lock:
        session.forget(call)
    assert session.table.withdrawn == [(0, jobs[0].digest)]


def test_whoever_does_not_wait_for_room_is_told_and_its_other_jobs_are_withdrawn(
    fake_url: str, pool_name: str, server: redis.Redis, new_sender: Callable[..., Sender]
) -> None:
    session = new_session(fake_url, pool_name, info_of(1, max_backlog=2), when_busy="raise")
    sender = new_sender(session)
    jobs = jobs_of(some_prompts(5))
    call, other = ask(session, jobs), ask(session, jobs[:1])
    sender._serve()
    assert isinstance(call.error, PoolBusy)
    assert "has 2 jobs waiting, its bound" in str(call.error)
    assert repr(pool_name) in str(call.error)
    assert call.wait(0)
    assert not other.done
    sender._serve()
    (found,) = waiting(server, session, "interactive")
    assert [job.digest for job in found] == [jobs[0].digest]
    assert statistics(session)["failed"] == 1


def test_a_client_has_a_bounded_number_of_jobs_on_the_server(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    session.join(info_of(1, client_backlog=4))
    jobs = jobs_of(some_prompts(10))
    ask(session, jobs)
    sender._serve()
    assert [len(mine) for mine in waiting(server, session, "interactive")] == [4]
    assert not sender._has_work()
    with session.lock:
        for job in jobs[:3]:
            session.table.land(job.digest, Row("f32").decode(row_of(job), info_of()))
    assert sender._has_work()
    sender._serve()
    assert [len(mine) for mine in waiting(server, session, "interactive")] == [7]


# --- adapters ----------------------------------------------------------------------------------


def test_an_adapter_that_is_not_registered_any_more_is_named(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    for shard in session.shards:
        server.hset(shard.adapters, "kept", "1\n/folder")
        server.hset(shard.adapters, "new", "2\n/folder")
    prompts = some_prompts(3)
    kept = ask(session, jobs_of(prompts, adapter="kept@1"))
    gone = ask(session, jobs_of(prompts, adapter="gone@3"))
    replaced = ask(session, jobs_of(prompts, adapter="new@4"))
    beginning = ask(session, jobs_of(prompts, adapter="new@"))
    sender._serve()
    for call, name in ((gone, "gone"), (replaced, "new"), (beginning, "new")):
        assert isinstance(call.error, UnknownAdapter)
        assert f"adapter {name!r} was removed or replaced" in str(call.error)
        assert call.wait(0)
    assert not kept.done
    sender._serve()  # withdraws what the failed calls left
    assert sum(len(mine) for mine in waiting(server, session, "interactive")) == 3


# --- losses ------------------------------------------------------------------------------------


def test_a_claim_that_is_cut_in_the_midst_is_made_again_and_counted_once(
    session: Session, sender: Sender, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(some_prompts(9))
    call = ask(session, jobs)
    claim, left = sender._claim_in, [1]

    def cut(shard: Any, *arguments: Any, **options: Any) -> None:
        claim(shard, *arguments, **options)
        if shard.number == 1 and left:
            left.pop()
            raise redis.exceptions.ConnectionError("the answer was lost")

    monkeypatch.setattr(sender, "_claim_in", cut)
    with pytest.raises(redis.exceptions.ConnectionError):
        sender._serve()
    unsent = [flight.job.digest for flight in session.table.unsent["interactive"]]
    assert unsent == [job.digest for job in jobs]  # as they were
    sender._serve()
    assert not call.done
    found = waiting(server, session, "interactive")
    assert [[job.digest for job in mine] for mine in found] == by_shard(session, jobs)
    assert statistics(session) == {"requests": 9, "queued": 9}


def test_a_lost_server_is_waited_for_and_then_given_up(
    fake_url: str, pool_name: str, new_sender: Callable[..., Sender], clock: Time
) -> None:
    session = new_session(fake_url, pool_name, reconnect_timeout=5.0)
    sender = new_sender(session)
    session.closing = Flag(clock)  # type: ignore[assignment]
    call = ask(session, jobs_of(some_prompts(2)))
    session.table.withdrawn.append((0, Digest(b"0" * 16)))
    lost, began = None, clock.now
    while not call.done:
        lost = sender._after_loss(redis.exceptions.ConnectionError("refused"), lost)
        assert lost == began
    assert isinstance(call.error, ServerUnreachable)
    assert "no answer from redis://127.0.0.1" in str(call.error)
    assert 5 <= clock.now - began < 7
    assert max(session.closing.waits) <= 1.0  # type: ignore[attr-defined]
    assert session.table.withdrawn == []  # nobody is there to be told


def test_each_reason_of_an_outage_is_logged_once(
    session: Session, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that ends hides nothing of what the next one meets, as a replica."""
    session.closing = Flag()  # type: ignore[assignment]

    def an_outage() -> list[str]:
        caplog.clear()
        lost: float | None = None
        for port in range(3):
            for error in (
                redis.exceptions.ConnectionError("Connection closed by server."),
                redis.exceptions.ConnectionError(f"Error 111 connecting to 127.0.0.1:{port}"),
                ScriptsMissing(),
            ):
                lost = sender._after_loss(error, lost)
        said = [text.partition("trying again (")[2] for text in logged.messages(caplog)]
        return [text.partition(" ")[0] for text in said]

    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert an_outage() == ["Connection", "Error", "NOSCRIPT"]


def test_a_server_that_refuses_for_long_is_named_with_its_reason(
    session: Session, sender: Sender, clock: Time
) -> None:
    session.closing = Flag(clock)  # type: ignore[assignment]
    call = ask(session, jobs_of(some_prompts(2)))
    session.table.withdrawn.append((0, Digest(b"0" * 16)))
    error = redis.exceptions.OutOfMemoryError("OOM command not allowed")
    lost = sender._after_loss(error, None)
    assert not call.done
    clock.now += session.options.reconnect_timeout
    sender._after_loss(error, lost)
    assert isinstance(call.error, ServerUnreachable)  # for now, as where a client comes
    assert "has refused for 60 s: its memory is full" in str(call.error)
    assert session.table.withdrawn != []  # it is told once it hears


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            redis.exceptions.NoPermissionError("no permission for evalsha"),
            "no permission for evalsha. Use a URL with a user of another role: `lmpool doctor` and",
        ),
        (
            redis.exceptions.AuthenticationError("invalid username-password pair"),
            "refused the user or password: check the URL's user:password@ part",
        ),
        (redis.exceptions.DataError("no string"), ": no string"),
    ],
    ids=["permission", "password", "no server's"],
)
def test_what_the_server_refuses_for_good_is_told_at_once(
    error: Exception,
    said: str,
    session: Session,
    sender: Sender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where it changed under a client, with what helps, and to who reads the log."""
    session.closing = Flag()  # type: ignore[assignment]
    call = ask(session, jobs_of(some_prompts(2)))

    def refuse() -> None:
        raise error

    with caplog.at_level("WARNING"):
        lost = sender._after_loss(ConnectionError("gone"), None)
        session.closing.waits.clear()  # type: ignore[attr-defined]
        assert sender._attempt(refuse, lost) is None  # it answers: what comes next is no part of it
    assert "server" not in session.troubles
    assert isinstance(call.error, ServerRefused)
    assert said in str(call.error)
    (told,) = [text for text in caplog.messages if text.startswith("what is asked is refused: ")]
    assert said in told
    assert session.closing.waits == []  # type: ignore[attr-defined]
    other = ask(session, jobs_of(some_prompts(1, start=50)))
    (flight,) = session.table.take_unsent(1, CLAIM_BYTES, "interactive")
    sender._refuse(flight, error)  # type: ignore[arg-type]
    assert said in str(other.error)


def test_a_refusal_that_lasts_is_logged_once_in_a_while(
    session: Session,
    sender: Sender,
    clock: Time,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many ask meanwhile, and though what they asked may be withdrawn."""
    words = "no set"

    def refuse(*_: object, **__: object) -> None:
        raise redis.exceptions.NoPermissionError(words)

    monkeypatch.setattr(sender, "_claim_in", refuse)
    lost: float | None = None

    def refusals(callers: int) -> int:
        """How many are logged for so many callers."""
        nonlocal lost
        caplog.clear()
        for _ in range(callers):
            call = ask(session, jobs_of(some_prompts(4)))
            lost = sender._attempt(sender._serve, lost)
            assert isinstance(call.error, ServerRefused)
            assert session.table.withdrawn
            lost = sender._attempt(sender._serve, lost)
            assert lost is None
            assert not session.table.withdrawn
        return sum(text.startswith("what is asked is refused: ") for text in caplog.messages)

    with caplog.at_level("WARNING"):
        assert refusals(3) == 1
        clock.now += sender_module.REFUSAL_AGAIN - 1
        assert refusals(3) == 0
        clock.now += 1
        assert refusals(3) == 1
        words = "no xadd"
        assert refusals(3) == 1


# --- tasks -------------------------------------------------------------------------------------


def test_tasks_get_the_connections_and_their_callers_what_became_of_them(
    session: Session, sender: Sender
) -> None:
    def run(function: Any) -> Future[Any]:
        future: Future[Any] = Future()
        sender._run_task((function, future))
        return future

    assert run(lambda servers: servers.anywhere.ping()).result(0) is True
    senseless = run(lambda servers: servers.nothing).exception(0)
    assert isinstance(senseless, ServerError)
    assert "AttributeError" in str(senseless)
    tried: list[int] = []

    def lost_once(servers: Servers) -> int:
        tried.append(1)
        if len(tried) == 1:
            raise redis.exceptions.ConnectionError("an idle connection was dead")
        return len(tried)

    assert run(lost_once).result(0) == 2

    def refuse(servers: Servers) -> None:
        tried.append(1)
        raise redis.exceptions.NoPermissionError("no")

    tried.clear()
    assert isinstance(run(refuse).exception(0), ServerRefused)
    assert len(tried) == 1  # not a second time

    def lost(servers: Servers) -> None:
        raise redis.exceptions.ConnectionError("gone")

    assert isinstance(run(lost).exception(0), ServerUnreachable)
    cancelled: Future[Any] = Future()
    cancelled.cancel()
    sender._run_task((refuse, cancelled))
    assert len(tried) == 1


# --- looking after -----------------------------------------------------------------------------


def let_check(sender: Sender, session: Session) -> None:
    """Let the next look after come now, for every flight."""
    sender._next_check = 0.0
    for flight in session.table.flights.values():
        flight.since = 0.0


def test_what_the_server_lost_is_asked_again_whatever_was_lost(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(9))
    flight_lost, job_lost, there, kept = jobs[:2], jobs[2:4], jobs[4:6], jobs[6:]
    call = ask(session, jobs)
    sender._serve()
    for job in flight_lost:
        server.delete(shard_of_job(session, job).flight(job.digest))
    for job in job_lost:
        shard = shard_of_job(session, job)
        server.xdel(shard.stream().key, read_flight(server, shard, job)[b"job"])
    for job in there:  # and the notice was lost
        server.set(shard_of_job(session, job).result(job.digest), row_of(job))
    soon = int(REPLY_TTL * 500)
    for job in kept:
        server.pexpire(shard_of_job(session, job).flight(job.digest), soon)
    for shard in session.shards:
        server.pexpire(shard.reply(session.id), soon)
    let_check(sender, session)
    sender._serve()
    assert [is_row_of(job, answer) for job, answer in zip(jobs, call.answers, strict=True)] == [
        job in there for job in jobs
    ]
    assert statistics(session)["resubmitted"] == 4
    for job in kept:
        assert server.pttl(shard_of_job(session, job).flight(job.digest)) > soon  # type: ignore[operator]
    for shard in session.shards:
        assert server.pttl(shard.reply(session.id)) > soon  # type: ignore[operator]
    sender._serve()
    digests = {job.digest for mine in waiting(server, session, "interactive") for job in mine}
    assert digests >= {job.digest for job in (*flight_lost, *job_lost, *kept)}
    for job in (*flight_lost, *job_lost):
        fields = read_flight(server, shard_of_job(session, job), job)
        assert f"c:{session.id}".encode() in fields
    assert statistics(session)["queued"] == 9  # each once


def test_a_job_of_priority_batch_that_was_lost_comes_back_as_one(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(6))
    ask(session, jobs, priority="batch")
    sender._serve()
    server.delete(*(stream.key for shard in session.shards for stream in shard.streams))
    let_check(sender, session)
    sender._serve()
    sender._serve()
    assert sum(len(mine) for mine in waiting(server, session, "batch")) == 6
    assert sum(len(mine) for mine in waiting(server, session, "interactive")) == 0


def test_a_reply_stream_that_the_server_forgot_is_made_anew_and_counted(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    ask(session, jobs_of(some_prompts(9)))
    sender._serve()
    first, second, third = (shard.reply(session.id) for shard in session.shards)
    server.delete(first, third)
    let_check(sender, session)
    sender._serve()
    assert [session.made[reply] for reply in (first, second, third)] == [2, 1, 2]
    assert server.exists(first, second, third) == 3


def test_a_reply_stream_that_goes_as_it_is_brought_forward_is_not_made_for_ever(
    session: Session, server: redis.Redis
) -> None:
    reply = session.shards[0].reply(session.id)
    server.xadd(reply, {"hello": "1"}, id="5-5")
    bring_forward(server, reply, "7-3", "5-5")  # type: ignore[arg-type]
    ((entry, _), *_) = server.xrevrange(reply)  # type: ignore[misc]
    assert entry == b"7-4"
    server.delete(reply)
    bring_forward(server, reply, "7-3", "5-5")  # type: ignore[arg-type]
    assert not server.exists(reply)


@contextmanager
def living_in(
    server: redis.Redis, session: Session, numbers: tuple[int, ...] = (0, 1, 2)
) -> Iterator[None]:
    """A worker with a heartbeat in these shards."""
    with ExitStack() as stack:
        for number in numbers:
            Consumer(server, session.shards[number], "w")
            stack.enter_context(beating(server, session.shards[number], "w"))
        yield


@pytest.mark.parametrize("living", [(), (0,), (0, 2), (1, 2)])
def test_without_a_worker_in_every_shard_nobody_waits_for_ever(
    living: tuple[int, ...], session: Session, sender: Sender, server: redis.Redis, clock: Time
) -> None:
    server.set(session.keys.info, info_of().pack())
    call = ask(session, jobs_of(some_prompts(2)))
    sender._serve()
    began = clock.now
    with living_in(server, session, living):
        while not call.done:
            clock.now += 1.0
            let_check(sender, session)
            sender._serve()
            assert clock.now - began < 20
    assert isinstance(call.error, NoWorkers)
    assert "no worker alive for 10 s: start one" in str(call.error)
    assert 7.5 <= clock.now - began <= 10.5


def test_while_workers_live_everybody_waits(
    session: Session, sender: Sender, server: redis.Redis, clock: Time
) -> None:
    call = ask(session, jobs_of(some_prompts(2)))
    sender._serve()

    def look(times: int) -> None:
        for _ in range(times):
            clock.now += 1.0
            let_check(sender, session)
            sender._serve()

    with living_in(server, session, (0, 2)):
        for _ in range(10):
            look(5)  # one is missed for a moment, now and then
            with living_in(server, session, (1,)):
                look(5)
    assert not call.done


def test_who_asks_only_now_does_not_pay_for_a_long_absence(
    session: Session, sender: Sender, clock: Time
) -> None:
    first = ask(session, jobs_of(some_prompts(1)))
    sender._serve()
    let_check(sender, session)
    sender._serve()  # nobody is alive
    with session.lock:
        session.forget(first)
    clock.now += 100.0  # nobody looks meanwhile
    call = ask(session, jobs_of(some_prompts(1, start=50)))
    sender._serve()
    let_check(sender, session)
    sender._serve()
    assert not call.done


# --- its life ----------------------------------------------------------------------------------


def run(sender: Sender) -> Guarded:
    return Guarded(sender.run)


def close(session: Session) -> None:
    with session.work:
        session.closed = True
        session.closing.set()
        session.work.notify_all()


def test_it_serves_what_comes_and_leaves_nothing(
    session: Session, server: redis.Redis, new_sender: Callable[..., Sender]
) -> None:
    farewells: list[int] = []
    sender = new_sender(session, lambda: farewells.append(server.exists(*replies)))  # type: ignore[arg-type]
    replies = [shard.reply(session.id) for shard in session.shards]
    thread = run(sender)
    jobs = jobs_of(some_prompts(6))
    call = ask(session, jobs)
    with session.work:
        session.work.notify_all()
    until(lambda: sum(len(mine) for mine in waiting(server, session, "interactive")) == 6)
    with session.lock:
        session.forget(call)
    close(session)
    thread.end()
    assert farewells == [3]  # the collector ends before its streams go
    prefixes = [shard.prefix for shard in session.shards]
    left = [key for prefix in prefixes for key in server.scan_iter(f"{prefix}:*", count=1000)]
    left = [key for key in left if server.type(key) != b"stream" or server.xlen(key)]
    assert left == []


def test_the_collectors_blocking_read_is_ended_by_a_word_in_its_stream(
    session: Session, server: redis.Redis, new_sender: Callable[..., Sender]
) -> None:
    seen: list[Any] = []
    reply = session.shards[0].reply(session.id)
    sender = new_sender(session, lambda: seen.extend(server.xrange(reply)))  # type: ignore[arg-type]
    thread = run(sender)
    close(session)
    thread.end()
    assert [fields for _, fields in seen] == [{b"bye": b"1"}]


def test_a_defect_of_ours_leaves_nobody_waiting_and_the_next_is_served(
    session: Session,
    sender: Sender,
    server: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    claim = sender._claim_in
    monkeypatch.setattr(sender, "_claim_in", None)
    call = ask(session, jobs_of(some_prompts(2)))
    thread = run(sender)
    assert call.wait(60)
    assert type(call.error) is ServerError
    assert "TypeError" in str(call.error)
    assert "the client's sender failed" in caplog.text
    monkeypatch.setattr(sender, "_claim_in", claim)
    ask(session, jobs_of(some_prompts(3, start=30)))
    with session.work:
        session.work.notify_all()
    until(lambda: sum(len(mine) for mine in waiting(server, session, "interactive")) == 3)
    close(session)
    thread.end()


def test_calls_that_the_garbage_collector_ended_are_forgotten(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    call = ask(session, jobs_of(some_prompts(4)))
    thread = run(sender)
    until(lambda: sum(len(mine) for mine in waiting(server, session, "interactive")) == 4)
    session.abandoned.append(call)
    with session.work:
        session.work.notify_all()
    until(lambda: sum(len(mine) for mine in waiting(server, session, "interactive")) == 0)
    assert not session.table.flights
    close(session)
    thread.end()


def test_a_model_info_that_is_empty_is_there(
    sender: Sender, session: Session, server: redis.Redis
) -> None:
    """It is damage, which a worker mends, and no server that is away."""
    server.set(session.keys.info, b"")
    found = sender._read_info()
    assert found == b""
    assert found is not sender_module._AWAY
