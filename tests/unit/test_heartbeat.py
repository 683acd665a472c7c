"""A worker's heartbeat: in every shard, with the pool's model info behind it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import redis

from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.liveness import LIFE_MS
from lmpool.model_info import ModelInfo
from lmpool.servers import Servers
from lmpool.worker import heartbeat as heartbeat_module
from lmpool.worker.heartbeat import EVERY, Heartbeat
from lmpool.worker.intake import create_groups
from lmpool.worker.membership import mark
from lmpool.worker.status import WorkerStatus
from tests.support.fake import FakeServer
from tests.support.parts import SplitServers, Time, info_of

INFO = info_of(3)


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def servers(server: redis.Redis) -> Servers:
    return Servers(lambda: server)  # type: ignore[arg-type,return-value]


@pytest.fixture
def keys(pool_name: str) -> PoolKeys:
    return PoolKeys(pool_name)


@pytest.fixture
def shards(keys: PoolKeys) -> tuple[ShardKeys, ...]:
    return INFO.shard_keys(keys)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(heartbeat_module, "time", clock)
    return clock


def new(servers: Servers, keys: PoolKeys, info: ModelInfo = INFO) -> Heartbeat:
    status = WorkerStatus({"id": "me", "pid": 7}, lambda: None)
    return Heartbeat(servers, info.shard_keys(keys), "me", status, keys, info)


def consumers(server: Any, shard: ShardKeys) -> set[bytes]:
    return {c["name"] for c in server.xinfo_consumers(shard.stream().key, GROUP)}


def test_a_beat_is_seen_in_every_shard_and_says_who_it_is(
    servers: Servers, server: redis.Redis, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    new(servers, keys).beat(servers)  # there are no groups yet: no harm
    for shard in shards:
        value: Any = server.get(shard.alive("me"))
        assert msgpack.unpackb(value) == {"id": "me", "pid": 7, "rows_per_second": 0.0}
        assert LIFE_MS - 1000 < server.pttl(shard.alive("me")) <= LIFE_MS  # type: ignore[operator]
    assert server.get(keys.info) == INFO.pack()
    assert server.get(keys.serving) == mark(INFO)
    assert LIFE_MS - 1000 < server.pttl(keys.serving) <= LIFE_MS  # type: ignore[operator]


def test_shards_on_several_servers_get_theirs_where_they_lie(
    keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        servers = SplitServers(clients)
        new(servers, keys).beat(servers)
        for shard in shards:
            found = [client.exists(shard.alive("me")) for client in clients]
            assert found == ([1, 0] if shard.number % 2 == 0 else [0, 1])
        assert [client.exists(keys.info) for client in clients] == [1, 0]


def test_a_consumer_that_others_removed_is_made_again(
    servers: Servers, server: redis.Redis, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    create_groups(servers, shards, "me")
    for shard in shards:
        server.xgroup_delconsumer(shard.stream().key, GROUP, "me")
    new(servers, keys).beat(servers)
    assert [consumers(server, shard) for shard in shards] == [{b"me"}] * 3


def test_a_model_info_that_was_lost_is_published_again_and_anothers_is_left(
    servers: Servers, server: redis.Redis, keys: PoolKeys
) -> None:
    heartbeat = new(servers, keys)
    heartbeat.beat(servers)
    server.delete(keys.info)
    heartbeat.beat(servers)
    assert server.get(keys.info) == INFO.pack()
    # Who joined later with other bounds decides; both serve the same.
    later = replace(INFO, max_backlog=5)
    server.set(keys.info, later.pack())
    heartbeat.beat(servers)
    assert server.get(keys.info) == later.pack()
    assert server.get(keys.serving) == mark(INFO)
    # The pool was taken over: nothing is said of what this one serves.
    other = replace(INFO, fingerprint="f" * 32)
    server.set(keys.info, other.pack())
    server.set(keys.serving, mark(other))
    heartbeat.beat(servers)
    assert server.get(keys.info) == other.pack()
    assert server.get(keys.serving) == mark(other)


def test_the_latest_to_join_bounds_the_backlog_and_no_beat_changes_that(
    servers: Servers, server: redis.Redis, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    def bounds() -> set[bytes]:
        return {server.hget(f"{shard.prefix}:bounds", "backlog") for shard in shards}  # type: ignore[misc]

    first = new(servers, keys, replace(INFO, max_backlog=50))
    first.beat(servers)
    assert bounds() == {b"50"}
    second = new(servers, keys, replace(INFO, max_backlog=5))
    second.beat(servers)
    first.beat(servers)
    assert bounds() == {b"5"}
    for damage in (b"", b"nonsense", b"0"):  # what cannot be meant is said anew
        server.hset(f"{shards[0].prefix}:bounds", "backlog", damage)
        first.beat(servers)
        assert bounds() == {b"50", b"5"}
    server.delete(*(f"{shard.prefix}:bounds" for shard in shards))
    second.beat(servers)
    assert bounds() == {b"5"}


class Ended:
    """The event that ends a heartbeat, after so many waits; the clock goes on meanwhile."""

    def __init__(self, clock: Time, waits: list[float]) -> None:
        self._clock = clock
        self._waits = waits
        self.asked: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.asked.append(seconds)
        if not self._waits:
            return True
        self._clock.now += self._waits.pop(0)
        return False


def test_it_beats_at_a_third_of_its_life_until_it_ends(
    servers: Servers, server: redis.Redis, keys: PoolKeys, clock: Time, monkeypatch: Any
) -> None:
    heartbeat = new(servers, keys)
    beats: list[float] = []
    monkeypatch.setattr(heartbeat, "beat", lambda servers: beats.append(clock.now))
    ended: Any = Ended(clock, [EVERY] * 5)
    heartbeat.run(ended)
    assert len(beats) == 5
    assert set(ended.asked) == {EVERY}
    assert pytest.approx(LIFE_MS / 3000) == EVERY
    assert heartbeat.steady()


def test_a_beat_that_failed_is_said_once_and_makes_it_unsteady_for_a_life(
    servers: Servers,
    keys: PoolKeys,
    clock: Time,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heartbeat = new(servers, keys)
    seen: list[bool] = []
    failures = [False, True, True, False, False, False, False, True, False]

    def beat(servers: Servers) -> None:
        seen.append(heartbeat.steady())
        if failures.pop(0):
            raise redis.exceptions.ConnectionError("gone")

    monkeypatch.setattr(heartbeat, "beat", beat)
    with caplog.at_level(logging.WARNING):
        heartbeat.run(Ended(clock, [EVERY] * 9))  # type: ignore[arg-type]
    # A life after the last failure, and not before, it is trusted again.
    assert seen == [True, True, False, False, False, False, True, True, False]
    assert caplog.text.count("could not be renewed: gone") == 2


def test_a_machine_that_slept_is_unsteady(
    servers: Servers, keys: PoolKeys, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = new(servers, keys)
    seen: list[bool] = []
    monkeypatch.setattr(heartbeat, "beat", lambda servers: seen.append(heartbeat.steady()))
    heartbeat.run(Ended(clock, [EVERY, 60.0, EVERY, EVERY]))  # type: ignore[arg-type]
    assert not heartbeat.steady()
    clock.now += LIFE_MS / 1000
    assert heartbeat.steady()
    assert seen == [True, True, False, False]


def test_it_ends_at_once(servers: Servers, keys: PoolKeys) -> None:
    heartbeat, ended = new(servers, keys), threading.Event()
    thread = threading.Thread(target=heartbeat.run, args=(ended,))
    thread.start()
    ended.set()
    thread.join(1.0)
    assert not thread.is_alive()
