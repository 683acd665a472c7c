"""When a worker looks after what its pool left."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from lmpool.keys import PoolKeys
from lmpool.model_info import ModelInfo
from lmpool.servers import Servers
from lmpool.worker import moving
from lmpool.worker.carrying import carry_over, enter
from lmpool.worker.moving import AWAY_PAUSE, CARRY_AFTER, Mover, left_on_the_way
from lmpool.worker.status import WorkerStatus
from tests.support import logged
from tests.support.parts import Time, info_of


class Apart(Servers):
    """Shards that fail apart: nothing is heard of those that are `away`."""

    def __init__(self, server: Any) -> None:
        super().__init__(lambda: server)
        self.away: set[str] = set()

    def apart(self, shards: Any, do: Any, lost: Any = None) -> Any:
        return None if shards[0].prefix in self.away else do(self.for_shard(shards[0]))


@dataclass
class Looking:
    """A mover whose thread is the test, at times that the test makes."""

    now: ModelInfo
    keys: PoolKeys
    servers: Apart
    clock: Time
    mover: Mover = field(init=False)

    def __post_init__(self) -> None:
        status = WorkerStatus({}, lambda: None)
        status.stopping.set()  # it has no thread
        seat = SimpleNamespace(info=self.now, shards=self.now.shard_keys(self.keys))
        service: Any = SimpleNamespace(seat=seat, keys=self.keys, status=status)
        self.mover = Mover(service, lambda: self.servers)
        self.mover.look_after(left_on_the_way(self.now, self.keys))

    def go_on(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.mover._carry(self.servers)
            self.clock.now += 0.5


@pytest.fixture
def server(fake_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(moving, "time", found)
    return found


def test_what_was_away_for_as_long_as_others_are_looked_at_is_taken_along_once_it_is_back(
    server: Any, clock: Time, pool_name: str
) -> None:
    keys, servers = PoolKeys(pool_name), Apart(server)
    before = info_of(2)
    now = before.moved_to(1, 1)
    former, (heir,) = before.shard_keys(keys), now.shard_keys(keys)
    for shard in former:
        server.hset(shard.counters, "computed", 10 + shard.number)
        server.xadd(shard.stream().key, {"job": "x"})
    servers.away.add(former[1].prefix)
    looking = Looking(now, keys, servers, clock)
    looking.go_on(2 * CARRY_AFTER[-1])
    assert server.hgetall(heir.counters) == {b"computed": b"10"}
    assert [server.xlen(shard.stream().key) for shard in former] == [0, 1]
    servers.away.clear()
    looking.go_on(AWAY_PAUSE + 1)
    assert server.hgetall(heir.counters) == {b"computed": b"21"}
    assert [server.xlen(shard.stream().key) for shard in former] == [0, 1]
    looking.go_on(CARRY_AFTER[-1])
    assert [server.xlen(shard.stream().key) for shard in former] == [0, 0]
    # And then no more.
    server.hset(former[1].counters, "computed", 1)
    looking.go_on(2 * CARRY_AFTER[-1])
    assert server.hgetall(heir.counters) == {b"computed": b"21"}


def test_what_was_away_across_two_moves_comes_along_by_way_of_the_first_heir(
    server: Any, clock: Time, pool_name: str
) -> None:
    keys, servers = PoolKeys(pool_name), Apart(server)
    first = info_of(1)
    second = first.moved_to(2, 1)
    third = second.moved_to(3, 1)
    (shard,) = first.shard_keys(keys)
    enter(servers, keys, second)
    carry_over(servers, shard, second, second.shard_keys(keys))  # it is told its heir
    enter(servers, keys, third)
    server.hset(shard.counters, "computed", 10)
    for number in range(3):
        server.xadd(shard.dead, {"job": "x", "reason": f"so {number}"})
    servers.away.add(shard.prefix)
    looking = Looking(third, keys, servers, clock)
    looking.go_on(2 * CARRY_AFTER[-1])
    servers.away.clear()
    looking.go_on(AWAY_PAUSE + 1)
    heirs = third.shard_keys(keys)
    assert sum(int(server.hget(heir.counters, "computed") or 0) for heir in heirs) == 10
    assert sum(server.xlen(heir.dead) for heir in heirs) == 3
    looking.go_on(2 * CARRY_AFTER[-1])
    assert not looking.mover._left


def test_what_was_set_aside_for_one_that_was_away_is_not_lost_where_the_pool_comes_back(
    server: Any, clock: Time, pool_name: str
) -> None:
    keys, servers = PoolKeys(pool_name), Apart(server)
    first = info_of(2)
    second = first.moved_to(1, 1)
    third = second.moved_to(2, 1)
    (heir,) = second.shard_keys(keys)
    shards = third.shard_keys(keys)
    for shard in shards:
        server.hset(shard.counters, "computed", 10)
    enter(servers, keys, second)
    servers.away.add(heir.prefix)
    for shard in shards:
        assert carry_over(servers, shard, second, [heir]) is None
    enter(servers, keys, third)
    for shard in shards:
        server.hincrby(shard.counters, "computed", 1)
        server.xadd(shard.dead, {"job": "x", "reason": "so"})
    looking = Looking(third, keys, servers, clock)
    looking.go_on(2 * CARRY_AFTER[-1])
    servers.away.clear()
    looking.go_on(3 * CARRY_AFTER[-1])
    assert sum(int(server.hget(shard.counters, "computed")) for shard in shards) == 22
    assert [server.xlen(shard.dead) for shard in shards] == [1, 1]
    assert not server.exists(heir.counters, *(shard.parted for shard in shards))
    assert not looking.mover._left


def test_lanes_end_also_while_one_is_away_for_whom_something_was_set_aside(
    server: Any, clock: Time, pool_name: str
) -> None:
    keys, servers = PoolKeys(pool_name), Apart(server)
    first = info_of(1, lanes=4)
    second = first.moved_to(2, 4)
    third = second.moved_to(1, 2)
    (wide,), (shard,) = first.shard_keys(keys), third.shard_keys(keys)
    heirs = second.shard_keys(keys)
    server.hset(shard.counters, "computed", 10)
    enter(servers, keys, second)
    servers.away.update(heir.prefix for heir in heirs)
    assert carry_over(servers, wide, second, heirs) is None
    enter(servers, keys, third)
    for stream in wide.streams:
        server.xadd(stream.key, {"job": "x"})
    server.hset(shard.bounds, "lanes", 2)
    Looking(third, keys, servers, clock).go_on(1)
    assert {stream.lane for stream in wide.streams if server.pttl(stream.key) > 0} == {2, 3}


def test_what_keeps_adapters_from_coming_is_said_once_until_they_do(
    server: Any,
    clock: Time,
    pool_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys, servers = PoolKeys(pool_name), Apart(server)
    looking = Looking(info_of(2), keys, servers, clock)

    def cut(*_: Any) -> bool:
        raise redis.exceptions.ConnectionError("cut")

    said = []
    with caplog.at_level(logging.WARNING, "lmpool"):
        for brings in (cut, enter, cut):
            monkeypatch.setattr(moving, "enter", brings)
            caplog.clear()
            for _ in range(3):
                looking.mover.bring(servers)
            said.append(logged.messages(caplog))
    once = ["adapters and the layout's name could not be brought: cut"]
    assert said == [once, [], once]


def test_shards_that_have_yet_to_come_into_the_layout_are_brought_it_again_and_again(
    server: Any, clock: Time, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time a silent node may be waited for."""
    keys, servers = PoolKeys(pool_name), Apart(server)
    looking = Looking(info_of(2), keys, servers, clock)
    asked: list[float] = []
    monkeypatch.setattr(moving, "enter", lambda *_: asked.append(clock.now))
    looking.go_on(1)
    assert asked == []
    began = clock.now
    while clock.now < began + 3 * AWAY_PAUSE:
        looking.mover.bring_later()
        looking.go_on(1)
    assert asked == [began + number * AWAY_PAUSE for number in range(3)]
