"""Claims that are sent by the thread of who asks."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.exceptions

import lmpool
from lmpool.connections import CommandAhead, OneConnectionClient
from lmpool.producer import collector
from lmpool.producer.alone import Alone
from lmpool.producer.claims import AHEAD_BYTES, AHEAD_MOST
from lmpool.producer.collector import BEHIND_BYTES
from lmpool.producer.flights import Flight
from lmpool.producer.sender import Sender
from lmpool.producer.session import Session
from lmpool.scripts import load_client_scripts, script
from lmpool.wants import Digest, Row, Top
from lmpool.wire import Job
from tests.support.parts import ask, info_of, jobs_of, new_session, row_of, some_prompts
from tests.support.protocol import queued
from tests.support.waiting import until
from tests.support.workers import in_process_worker

ONE = info_of(shards=1)
LARGEST = BEHIND_BYTES // 4
"""The vocabulary whose row is asked for before it is there."""
MANY_IDS = [5] * (AHEAD_BYTES // 4 + 1)


@pytest.fixture
def server(any_server: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(any_server, protocol=2) as client:
        yield client


@pytest.fixture
def session(any_server: str, pool_name: str) -> Session:
    session = new_session(any_server, pool_name, info_of(shards=1, max_prompt_tokens=1 << 20))
    session.confirmed = time.monotonic() + 3600  # however long a test takes
    return session


@pytest.fixture
def sender(session: Session, server: redis.Redis) -> Iterator[Sender]:
    """One that rests, with a connection, on a server that knows its scripts."""
    sender = Sender(session, Alone(session, lambda worker: False), lambda: None)
    sender._next_check = time.monotonic() + 3600
    connected: Any = sender._servers.for_shard(session.shards[0])
    load_client_scripts(connected)
    sender._rests = True
    yield sender
    sender._servers.close()
    shard = session.shards[0]
    server.delete(shard.stream().key, shard.reply(session.id))


def claim_ahead(session: Session, sender: Sender) -> bool:
    """As who asks does; whether anything was sent."""
    with session.work:
        sender.claim_ahead()
    return sender._ahead is not None


def test_who_asks_sends_the_claim_while_the_sender_rests(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    """And the sender, whose thread does nothing before, takes the answer."""
    jobs = jobs_of(some_prompts(3), info=ONE)
    ask(session, jobs[:2])
    assert claim_ahead(session, sender)
    until(lambda: len(queued(server, session.shards[0])) == 2)
    assert session.table.statistics.queued == 0
    ask(session, jobs[2:])
    ahead = sender._ahead
    assert claim_ahead(session, sender)
    assert sender._ahead is ahead
    assert sender._has_work()
    sender._end_ahead()
    assert session.table.statistics.queued == 2
    assert claim_ahead(session, sender)
    sender._end_ahead()
    assert session.table.statistics.queued == 3
    assert len(queued(server, session.shards[0])) == 3


def test_what_is_there_is_fetched_by_the_sender(
    session: Session, sender: Sender, server: redis.Redis
) -> None:
    (job,) = jobs_of([[1, 2]], info=ONE)
    server.set(session.shards[0].result(job.digest), row_of(job), px=60_000)
    call = ask(session, [job])
    assert claim_ahead(session, sender)
    sender._end_ahead()
    assert call.done
    assert call.error is None
    assert session.table.statistics.cache_hits == 1


@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "by the sender"])
def test_workers_near_know_what_is_waited_for_before_it_is_claimed(
    session: Session,
    sender: Sender,
    server: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    is_ahead: bool,
) -> None:
    expected: list[tuple[list[Digest], int]] = []

    def note(flights: Sequence[Flight]) -> None:
        digests = [flight.job.digest for flight in flights]
        expected.append((digests, len(queued(server, session.shards[0]))))

    monkeypatch.setattr(session.near, "expect", note)
    jobs = jobs_of(some_prompts(3), info=ONE)
    ask(session, jobs)
    if is_ahead:
        assert claim_ahead(session, sender)
        sender._end_ahead()
    else:
        sender._serve()
    assert len(queued(server, session.shards[0])) == 3
    assert expected == [([job.digest for job in jobs], 0)]


def _is_at_work(session: Session, sender: Sender) -> None:
    sender._rests = False


def _has_to_withdraw(session: Session, sender: Sender) -> None:
    session.table.withdrawn.append((0, jobs_of([[7]], info=ONE)[0].digest))


def _has_to_confirm(session: Session, sender: Sender) -> None:
    session.confirmed = -math.inf


def _waits_for_room(session: Session, sender: Sender) -> None:
    sender._busy_until["interactive"] = time.monotonic() + 3600


def _is_asked_much(session: Session, sender: Sender) -> None:
    ask(session, jobs_of(some_prompts(AHEAD_MOST + 1, start=9), info=ONE))


def _is_asked_something_long(session: Session, sender: Sender) -> None:
    ask(session, jobs_of([MANY_IDS], info=info_of(shards=1, max_prompt_tokens=1 << 20)))


def _has_several_shards(session: Session, sender: Sender) -> None:
    session.join(info_of(shards=2))


def _has_no_connection(session: Session, sender: Sender) -> None:
    sender._servers.renew()


def _is_cut(session: Session, sender: Sender) -> None:
    sender.cut()


def _is_told_something(session: Session, sender: Sender) -> None:
    connection: Any = sender._servers.for_shard(session.shards[0]).connection_pool.get_connection()
    connection.send_command("PING")
    until(lambda: connection.can_read(1))


@pytest.mark.parametrize(
    "state",
    [
        _is_at_work,
        _has_to_withdraw,
        _has_to_confirm,
        _waits_for_room,
        _is_asked_much,
        _is_asked_something_long,
        _has_several_shards,
        _has_no_connection,
        _is_cut,
        _is_told_something,
    ],
)
def test_the_sender_claims_itself(
    state: Callable[[Session, Sender], None], session: Session, sender: Sender
) -> None:
    """Where its connection is not free, or it would have to be waited for, or it takes long."""
    state(session, sender)
    ask(session, jobs_of([[1, 2]], info=ONE))
    unsent = len(session.table.unsent["interactive"])
    assert not claim_ahead(session, sender)
    assert len(session.table.unsent["interactive"]) == unsent
    assert not any(flight.sent for flight in session.table.flights.values())


def test_what_asks_for_much_of_little_is_claimed_by_the_sender(
    session: Session, sender: Sender, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few tokens, and a want that is far longer."""
    monkeypatch.setattr("lmpool.producer.claims.AHEAD_BYTES", 8)
    ask(session, jobs_of([[1, 2]], info=ONE))
    assert not claim_ahead(session, sender)
    assert len(session.table.unsent["interactive"]) == 1
    sender._serve()
    assert len(queued(server, session.shards[0])) == 1


def is_made_again(session: Session, sender: Sender, server: redis.Redis) -> None:
    """By the sender, and counted once."""
    assert session.table.has_unsent()
    sender._serve()
    assert len(queued(server, session.shards[0])) == 1
    assert session.table.statistics.queued == 1


def test_a_claim_that_is_refused_is_made_again(
    session: Session, sender: Sender, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script("enqueue"), "sha", "0" * 40)  # which no server knows
    call = ask(session, jobs_of([[1, 2]], info=ONE))
    assert claim_ahead(session, sender)
    sender._end_ahead()
    assert not call.done
    is_made_again(session, sender, server)


def test_a_claim_that_is_lost_is_made_again(
    session: Session, sender: Sender, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends as it is written to."""
    send = CommandAhead.send

    def cut_and_send(command: CommandAhead) -> None:
        command._connection._sock.shutdown(socket.SHUT_RDWR)
        send(command)

    monkeypatch.setattr(CommandAhead, "send", cut_and_send)
    call = ask(session, jobs_of([[1, 2]], info=ONE))
    assert claim_ahead(session, sender)
    with pytest.raises(redis.exceptions.ConnectionError):
        sender._end_ahead()
    assert not call.done
    is_made_again(session, sender, server)


def test_a_connection_that_was_lost_is_tried_by_the_sender(
    session: Session, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows for how long, and when to tell who asks that it is too long."""
    lost_since = iter([5.0, None])
    has_work = iter([True, False, True, False, True])
    rested: list[bool] = []

    def close_in_the_end() -> bool:
        session.closed = len(rested) == 2
        return next(has_work)

    monkeypatch.setattr(sender, "_attempt", lambda step, since: next(lost_since))
    monkeypatch.setattr(sender, "_has_work", close_in_the_end)
    monkeypatch.setattr(session.work, "wait", lambda seconds: rested.append(sender._rests))
    sender.run()
    assert rested == [False, True]


def test_one_prompt_is_claimed_by_the_thread_that_asks_for_it(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's and an event loop's, also after it was asked by others."""
    senders: list[str] = []
    claim_ahead = Sender.claim_ahead

    def note_and_claim(sender: Sender) -> Any:
        if sent := claim_ahead(sender):
            senders.append(threading.current_thread().name)
        return sent

    monkeypatch.setattr(Sender, "claim_ahead", note_and_claim)
    numbers = iter(range(10_000))

    def fresh() -> list[int]:
        number = next(numbers)
        return [number % 16, number // 16 % 16, number // 256]

    with (
        in_process_worker(any_server, pool_name),
        lmpool.connect(any_server, pool_name, framework="numpy") as lm,
    ):
        size = lm.info.vocab_size

        def by_thread() -> bool:
            assert lm.sync.next_token_logprobs(fresh()).shape == (size,)
            return "MainThread" in senders

        until(by_thread)  # not where the sender was still at work

        def in_loop() -> None:
            async def one() -> bool:
                return (await lm.next_token_logprobs(fresh())).shape == (size,)

            assert asyncio.run(one())

        def by_loop() -> bool:
            loop = threading.Thread(target=in_loop, name="loop")
            loop.start()
            loop.join()
            return "loop" in senders

        until(by_loop)
        assert set(senders) == {"MainThread", "loop"}


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The keys of each command by which answers are fetched, small ones or rows."""
    found: list[Sequence[str]] = []

    def noting(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_fetch(client: OneConnectionClient, keys: Sequence[str], *given: Any) -> Any:
            found.append(keys)
            return fetch(client, keys, *given)

        return note_and_fetch

    for name in ("mget", "values"):
        monkeypatch.setattr(OneConnectionClient, name, noting(getattr(OneConnectionClient, name)))
    return found


@pytest.mark.parametrize("vocab_size", [256, LARGEST])
def test_the_answer_to_a_lone_prompt_comes_together_with_its_notice(
    any_server: str,
    pool_name: str,
    vocab_size: int,
    fetched: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is asked for it once that is there; and where it does not come so, it is fetched."""
    prompts = ([n % 16, n // 16 % 16, n // 256] for n in itertools.count())
    opts = {"vocab_size": vocab_size}
    with (
        in_process_worker(any_server, pool_name, engine_opts=opts, near_bytes=0),
        lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as lm,
    ):

        def fetches() -> int:
            before = len(fetched)
            assert lm.sync.next_token_logprobs(next(prompts)).shape == (lm.info.vocab_size,)
            return len(fetched) - before

        until(lambda: fetches() == 0)  # not where a thread was still at work
        monkeypatch.setattr(OneConnectionClient, "get_behind", lambda client, key: None)
        until(lambda: fetches() == 1)  # not where the sender looked for it, as it took so long
        monkeypatch.setattr(OneConnectionClient, "_read_blocked", _read_other_values)
        until(lambda: fetches() == 1)


@pytest.mark.parametrize(
    ("vocab_size", "prompts", "behind"), [(LARGEST + 1, 1, 0), (LARGEST // 3, 4, 3)]
)
def test_more_bytes_than_a_round_trip_is_worth_are_fetched(
    any_server: str,
    pool_name: str,
    vocab_size: int,
    prompts: int,
    behind: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    ahead: list[bool] = []

    def note(client: OneConnectionClient, key: str) -> None:
        asked.append(key)

    monkeypatch.setattr(OneConnectionClient, "get_behind", note)
    claim_ahead = Sender.claim_ahead

    def count(sender: Sender) -> Any:
        ahead.append(bool(sent := claim_ahead(sender)))
        return sent

    monkeypatch.setattr(Sender, "claim_ahead", count)
    numbers = itertools.count()
    opts = {"vocab_size": vocab_size}
    with (
        in_process_worker(any_server, pool_name, engine_opts=opts, near_bytes=0),
        lmpool.connect(any_server, pool_name, framework="numpy", cache_bytes=0) as lm,
    ):

        def claimed_ahead() -> bool:
            asked.clear()
            given = [[next(numbers)] for _ in range(prompts)]
            assert len(lm.sync.batch_next_token_logprobs(given)) == prompts
            return ahead[-1]

        until(claimed_ahead)
        assert len(asked) == behind


@pytest.mark.parametrize("first", ["row", "top"])
def test_one_that_is_too_large_does_not_hide_a_small_one(
    session: Session, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.info is not None
    row, top = Row("f32"), Top(5)
    monkeypatch.setattr(collector, "BEHIND_BYTES", row.stored_bytes(session.info) - 1)
    asked: list[str] = []
    at_hand = SimpleNamespace(get_behind=asked.append)
    reader = collector.Collector(session)
    reader._servers = SimpleNamespace(at_hand=lambda shard: at_hand)  # type: ignore[assignment]
    jobs = {
        name: Job(want, Digest(name.encode().ljust(16)), b"\0" * 4, None)
        for name, want in (("row", row), ("top", top))
    }
    order = sorted(jobs, key=lambda name: name != first)
    reader.get_behind([SimpleNamespace(shard=0, job=jobs[name]) for name in order])  # type: ignore[misc]
    assert asked == [session.shards[0].result(jobs["top"].digest)]


def _read_other_values(client: Any, connection: Any) -> Any:
    client.behind = {"another": b"value"}
    return connection.read_response()
