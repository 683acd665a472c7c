"""What a pool's workers have done, read from a server that tests fill."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import pytest
import redis

from lmpool.counters import COUNTERS
from lmpool.keys import GROUP, LaneKeys, PoolKeys
from lmpool.producer.statistics import PoolStatistics, pool_statistics
from tests.support.protocol import Consumer


@pytest.fixture
def lanes(fake_url: str, pool_name: str) -> tuple[LaneKeys, ...]:
    return PoolKeys(pool_name).lanes("0" * 8, 2)


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


def read(server: redis.Redis, lanes: tuple[LaneKeys, ...]) -> PoolStatistics:
    return pool_statistics(server, lanes, GROUP)  # type: ignore[arg-type]


def test_a_pool_that_nobody_has_served_has_done_nothing(server, lanes) -> None:
    found = read(server, lanes)
    assert {name: found[name] for name in found if name != "workers"} == dict.fromkeys(
        ("computed", "batches", "failed", "expired", "backlog"), 0
    )
    assert found["workers"] == []


def test_every_counter_is_summed_over_the_lanes_and_others_are_left_out(server, lanes) -> None:
    for number, lane in enumerate(lanes, start=1):
        for power, counter in enumerate(COUNTERS):
            server.hset(lane.counters, counter.field, number * 10**power)
        server.hset(lane.counters, "of_a_later_release", 5)
    found = read(server, lanes)
    assert [found[counter.field] for counter in COUNTERS] == [3, 30, 300, 3000]


def test_the_backlog_is_of_both_priorities_and_all_lanes(server, lanes) -> None:
    for lane in lanes:
        server.xadd(lane.jobs, {"job": "a"})
        server.xadd(lane.batch.jobs, {"job": "b"})
        server.xadd(lane.batch.jobs, {"job": "c"})
    assert read(server, lanes)["backlog"] == 6


def test_workers_with_a_heartbeat_are_listed_by_name(server, lanes) -> None:
    for name in ("w-2", "w-1", "dead"):
        Consumer(server, lanes[0], name)
    beat = {"id": "w-1", "host": "h", "pid": 7, "engine": "hf", "gpu": "0", "rows_per_second": 1.5}
    server.set(lanes[0].alive("w-1"), msgpack.packb(beat))
    server.set(lanes[0].alive("w-2"), msgpack.packb({"id": "w-2"}))
    first, second = read(server, lanes)["workers"]
    assert first == beat
    assert second["id"] == "w-2"
    assert second["rows_per_second"] == 0.0


def test_a_key_of_another_type_is_the_servers_error(server, lanes) -> None:
    server.set(lanes[0].jobs, "no stream")
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        read(server, lanes)
