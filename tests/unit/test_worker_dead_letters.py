"""What a worker puts among the dead letters: refused entries, and jobs that kill workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lmpool.errors import JobFormatError
from lmpool.keys import PRIORITIES, Priority, ShardKeys
from lmpool.servers import Servers
from lmpool.wire import RefusedJob, pack_job
from lmpool.worker import dead_letters as dead_letters_module
from lmpool.worker.dead_letters import GARBAGE_BYTES, DeadLetters
from tests.support.fake import FakeServer
from tests.support.parts import SplitServers
from tests.support.protocol import (
    FINGERPRINT,
    Caller,
    Consumer,
    entries_of,
    new_job,
    shard_of_pool,
)

JOB = new_job(1, 2)


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def letters(server: redis.Redis) -> DeadLetters:
    return DeadLetters(Servers(lambda: server), "me")  # type: ignore[arg-type,return-value]


@pytest.fixture
def shard(pool_name: str) -> ShardKeys:
    return shard_of_pool(pool_name, FINGERPRINT, 2)


def held(server: Any, shard: ShardKeys, data: bytes, priority: Priority = "interactive") -> bytes:
    """An entry that this worker holds."""
    server.xadd(shard.stream(priority).key, {"job": data})
    return Consumer(server, shard, "me", priority).read()[0]


@pytest.mark.parametrize("priority", PRIORITIES)
def test_garbage_is_kept_cut_and_taken_off_its_stream(
    priority: Priority, letters: DeadLetters, server: redis.Redis, shard: ShardKeys
) -> None:
    data = b"\xc1" * (GARBAGE_BYTES + 5)
    entry = held(server, shard, data, priority)
    letters.refuse(shard.stream(priority), entry, data, JobFormatError("not msgpack"))
    ((_, kept),) = entries_of(server, shard.dead)
    assert kept == {
        b"job": data[:GARBAGE_BYTES],
        b"reason": b"not msgpack",
        b"deliveries": b"0",
        b"worker": b"me",
    }
    assert entries_of(server, shard.stream(priority).key) == []
    assert Consumer(server, shard, "me", priority).held() == []
    assert server.hgetall(shard.counters) == {b"failed": b"1"}
    assert 0 < server.pttl(shard.counters) <= 30 * 86_400_000  # type: ignore[operator]


def test_what_is_buried_is_among_the_workers_failures(
    server: redis.Redis, shard: ShardKeys
) -> None:
    noted: list[tuple[str, str]] = []
    letters = DeadLetters(Servers(lambda: server), "me", lambda *what: noted.append(what))  # type: ignore[arg-type,return-value]
    entry = held(server, shard, b"no job")
    letters.refuse(shard.stream(), entry, b"no job", JobFormatError("not msgpack"))
    assert noted == [("refused", "not msgpack")]


def test_whoever_asked_for_a_refused_job_is_told(
    letters: DeadLetters, server: redis.Redis, shard: ShardKeys
) -> None:
    caller = Caller(server, shard)
    caller.enqueue(JOB)
    (entry,) = Consumer(server, shard, "me").read()
    data = pack_job(JOB)
    letters.refuse(shard.stream(), entry, data, RefusedJob("job version 9", JOB.digest))
    (notice,) = caller.notices()
    assert (notice.digest, notice.status, notice.error) == (JOB.digest, "refused", "job version 9")
    assert not caller.flight(JOB)
    assert entries_of(server, shard.dead)[0][1][b"job"] == data


def test_a_job_that_is_given_up_says_where_to_look(
    letters: DeadLetters,
    server: redis.Redis,
    shard: ShardKeys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caller = Caller(server, shard)
    caller.enqueue(JOB)
    (entry,) = Consumer(server, shard, "me").read()
    with caplog.at_level(logging.ERROR):
        letters.give_up(shard.stream(), entry, pack_job(JOB), JOB, 3, "worker-7")
    (notice,) = caller.notices()
    assert (notice.digest, notice.status) == (JOB.digest, "failed")
    assert "given up after 3 deliveries" in notice.error
    assert "the last one worker-7; see its log, and lmpool dead show" in notice.error
    ((_, kept),) = entries_of(server, shard.dead)
    assert kept[b"job"] == pack_job(JOB)
    assert (kept[b"deliveries"], kept[b"worker"]) == (b"3", b"worker-7")
    assert kept[b"reason"].decode() == notice.error
    assert notice.error in caplog.text


def test_the_dead_are_bounded(
    letters: DeadLetters, server: redis.Redis, shard: ShardKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters_module, "DEAD_MOST", 10)
    for number in range(250):
        entry = held(server, shard, b"garbage %d" % number)
        letters.refuse(shard.stream(), entry, b"garbage %d" % number, JobFormatError("no"))
    left = entries_of(server, shard.dead)
    assert 10 <= len(left) <= 210  # about: a server cuts whole nodes
    assert left[-1][1][b"job"] == b"garbage 249"


def test_who_cannot_be_kept_is_told_and_the_worker_says_so(
    letters: DeadLetters,
    server: redis.Redis,
    shard: ShardKeys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caller = Caller(server, shard)
    caller.enqueue(JOB)
    (entry,) = Consumer(server, shard, "me").read()
    server.set(shard.dead, b"in the way")
    letters.give_up(shard.stream(), entry, pack_job(JOB), JOB, 3, "worker-7")
    assert [notice.status for notice in caller.notices()] == ["failed"]
    assert f"{shard.dead} cannot be written, the job is not kept" in caplog.text


def test_shards_on_several_servers_have_their_dead_where_they_lie(pool_name: str) -> None:
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        letters = DeadLetters(SplitServers(clients), "me")
        for number in range(2):
            shard = shard_of_pool(pool_name, shard=number)
            entry = held(clients[number], shard, b"garbage")
            letters.refuse(shard.stream(), entry, b"garbage", JobFormatError("no"))
            assert [client.exists(shard.dead) for client in clients] == [1 - number, number]
            assert Consumer(clients[number], shard, "me").held() == []
