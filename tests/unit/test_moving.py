"""When a worker looks after what its pool left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from lmpool.keys import PoolKeys
from lmpool.servers import Servers
from lmpool.worker import moving
from lmpool.worker.moving import AWAY_PAUSE, CARRY_AFTER, Mover
from lmpool.worker.status import WorkerStatus
from tests.support.parts import Time, info_of


class Apart(Servers):
    """Shards that fail apart: nothing is heard of those that are `away`."""

    def __init__(self, server: Any) -> None:
        super().__init__(lambda: server)
        self.away: set[str] = set()

    def apart(self, shards: Any, do: Any, lost: Any = None) -> Any:
        return None if shards[0].prefix in self.away else do(self.for_shard(shards[0]))


def test_what_was_away_for_as_long_as_others_are_looked_at_is_taken_along_once_it_is_back(
    fake_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, clock = PoolKeys(pool_name), Time()
    monkeypatch.setattr(moving, "time", clock)
    before = info_of(2)
    now = before.moved_to(1, 1)
    former, (heir,) = before.shard_keys(keys), now.shard_keys(keys)
    status = WorkerStatus({}, lambda: None)
    status.stopping.set()  # it has no thread: the test is its thread
    seat = SimpleNamespace(info=now, shards=now.shard_keys(keys))
    service: Any = SimpleNamespace(seat=seat, keys=keys, status=status)
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        server: Any = client
        servers = Apart(server)
        mover = Mover(service, lambda: servers)
        for shard in former:
            server.hset(shard.counters, "computed", 10 + shard.number)
            server.xadd(shard.stream().key, {"job": "x"})
        servers.away.add(former[1].prefix)
        mover.look_after(now.left_shards(keys))

        def go_on(seconds: float) -> None:
            until = clock.now + seconds
            while clock.now < until:
                mover._carry(servers)
                clock.now += 0.5

        go_on(2 * CARRY_AFTER[-1])
        assert server.hgetall(heir.counters) == {b"computed": b"10"}
        assert [server.xlen(shard.stream().key) for shard in former] == [0, 1]
        servers.away.clear()
        go_on(AWAY_PAUSE + 1)
        assert server.hgetall(heir.counters) == {b"computed": b"21"}
        assert [server.xlen(shard.stream().key) for shard in former] == [0, 1]
        go_on(CARRY_AFTER[-1])
        assert [server.xlen(shard.stream().key) for shard in former] == [0, 0]
        # And then no more.
        server.hset(former[1].counters, "computed", 1)
        go_on(2 * CARRY_AFTER[-1])
        assert server.hgetall(heir.counters) == {b"computed": b"21"}
