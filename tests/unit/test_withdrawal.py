"""Withdrawing: from each shard what lies there, again after a loss, and not after a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lmpool.keys import PRIORITIES
from lmpool.producer import withdrawal as withdrawal_module
from lmpool.producer.alone import Alone
from lmpool.producer.sender import Sender
from lmpool.producer.session import Session
from lmpool.producer.withdrawal import withdraw
from lmpool.servers import Servers
from tests.support.fake import FakeServer
from tests.support.parts import (
    SplitServers,
    ask,
    jobs_of,
    new_session,
    shard_of_job,
    some_prompts,
)
from tests.support.protocol import Caller


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def servers(server: redis.Redis) -> Servers:
    return Servers(lambda: server)  # type: ignore[arg-type,return-value]


@pytest.fixture
def session(fake_url: str, pool_name: str) -> Session:
    return new_session(fake_url, pool_name)


def claim(session: Session, servers: Servers) -> None:
    """Send what is to be sent."""
    sender = Sender(session, Alone(session, lambda worker: False), lambda: None)
    sender._servers.close()
    sender._servers = sender._answers._servers = servers
    while sender._claim():
        pass


def left(server: redis.Redis, session: Session) -> int:
    """How many jobs are in the streams."""
    keys = [stream.key for shard in session.shards for stream in shard.streams]
    return sum(int(server.xlen(key)) for key in keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", PRIORITIES)
def test_jobs_that_nobody_else_waits_for_leave_their_streams(
    priority: Any, session: Session, servers: Servers, server: redis.Redis
) -> None:
    jobs = jobs_of(some_prompts(9))
    call = ask(session, jobs, priority=priority)
    claim(session, servers)
    other = Caller(server, shard_of_job(session, jobs[0]), "other")
    other.enqueue(jobs[0])
    session.forget(call)
    withdraw(session, servers)
    assert left(server, session) == 1
    for job in jobs:
        shard = shard_of_job(session, job)
        flight: Any = server.get(shard.flight(job.digest))
        waiting = flight.split(b" ")[3:-1] if flight else []
        assert waiting == ([b"other"] if job is jobs[0] else [])
    withdraw(session, servers)
    assert session.table.withdrawn == []


def test_shards_on_several_servers_are_told_where_they_lie(session: Session) -> None:
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        servers = SplitServers(clients)
        call = ask(session, jobs_of(some_prompts(9)))
        claim(session, servers)
        assert all(left(client, session) for client in clients)
        session.forget(call)
        withdraw(session, servers)
        assert [left(client, session) for client in clients] == [0, 0]


def test_many_are_withdrawn_in_portions(
    session: Session, servers: Servers, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(withdrawal_module, "CLAIM_MOST", 2)
    told: list[int] = []
    script = withdrawal_module.script("withdraw")
    monkeypatch.setattr(
        withdrawal_module,
        "script",
        lambda name: lambda *given: [told.append(len(given[2]) - 2), script(*given)][1],
    )
    call = ask(session, jobs_of(some_prompts(9)))
    claim(session, servers)
    session.forget(call)
    withdraw(session, servers)
    assert left(server, session) == 0
    assert sum(told) == 9
    assert max(told) == 2


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (redis.exceptions.ConnectionError("gone"), True),
        (redis.exceptions.TimeoutError(), True),
        (redis.exceptions.ReadOnlyError("failing over"), True),
        (redis.exceptions.NoPermissionError("no"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_could_not_be_told_is_told_the_next_time_unless_it_was_refused(
    error: Exception,
    kept: bool,
    session: Session,
    servers: Servers,
    server: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = ask(session, jobs_of(some_prompts(9)))
    claim(session, servers)
    session.forget(call)
    original, told = withdrawal_module.script, []

    meanwhile = ask(session, jobs_of(some_prompts(1, start=30)))
    claim(session, servers)

    def script(name: str) -> Any:
        told.append(name)
        if len(told) == 2:
            with session.lock:  # another call is withdrawn at this moment
                session.forget(meanwhile)
            raise error
        return original(name)

    monkeypatch.setattr(withdrawal_module, "script", script)
    with pytest.raises(type(error)):
        withdraw(session, servers)
    assert len(session.table.withdrawn) == (10 if kept else 1)
    assert 1 < left(server, session) < 10
    withdraw(session, servers)
    assert (left(server, session) == 0) == kept


def test_what_is_asked_again_meanwhile_is_not_withdrawn_after_a_loss(
    session: Session, servers: Servers, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(some_prompts(6))
    call = ask(session, jobs)
    claim(session, servers)
    session.forget(call)
    original = withdrawal_module.script

    def lose(name: str) -> Any:
        raise redis.exceptions.ConnectionError("gone")

    monkeypatch.setattr(withdrawal_module, "script", lose)
    with pytest.raises(redis.exceptions.ConnectionError):
        withdraw(session, servers)
    monkeypatch.setattr(withdrawal_module, "script", original)
    ask(session, jobs[:2])
    withdraw(session, servers)
    assert left(server, session) == 2
