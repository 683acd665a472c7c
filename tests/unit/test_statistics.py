"""What a pool's workers have done, read from a server that tests fill."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgpack
import pytest
import redis

from lmpool.affinity import own_lanes
from lmpool.counters import COUNTERS, answers
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.liveness import LIFE_MS
from lmpool.producer.statistics import PoolStatistics, pool_statistics
from lmpool.servers import Servers
from tests.support.heartbeats import beating
from tests.support.protocol import Consumer


@pytest.fixture
def shards(fake_url: str, pool_name: str) -> tuple[ShardKeys, ...]:
    return PoolKeys(pool_name).shards("0" * 8, 2)


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


def read(server: redis.Redis, shards: tuple[ShardKeys, ...]) -> PoolStatistics:
    return pool_statistics(Servers(lambda: server), shards)  # type: ignore[arg-type]


def test_a_pool_that_nobody_has_served_has_done_nothing(server, shards) -> None:
    found = read(server, shards)
    numbers = ("computed", "batches", "failed", "expired", "evicted", "backlog", "held_bytes")
    assert {name: found[name] for name in numbers} == dict.fromkeys(numbers, 0)
    assert found["oldest_seconds"] is None
    assert found["workers"] == []


def test_every_counter_is_summed_over_the_lanes_and_others_are_left_out(server, shards) -> None:
    for number, shard in enumerate(shards, start=1):
        for power, counter in enumerate(COUNTERS):
            server.hset(shard.counters, counter.field, number * 10**power)
        server.hset(shard.counters, "of_a_later_release", 5)
    found = read(server, shards)
    sums = {counter.field: 3 * 10**power for power, counter in enumerate(COUNTERS)}
    assert {name: found[name] for name in sums} == sums
    assert found["answers"] == {"row": 3}


def test_answers_are_counted_by_kind_and_rows_are_the_rest(server, shards) -> None:
    for shard in shards:
        server.hset(shard.counters, mapping={"computed": 10, answers("top"): 3})
    server.hset(shards[0].counters, answers("draw"), 1)
    assert read(server, shards)["answers"] == {"row": 13, "top": 6, "draw": 1}


def test_the_backlog_is_of_both_priorities_and_all_shards(server, shards) -> None:
    for shard in shards:
        server.xadd(shard.stream().key, {"job": "a"})
        server.xadd(shard.stream("batch").key, {"job": "b"})
        server.xadd(shard.stream("batch").key, {"job": "c"})
    assert read(server, shards)["backlog"] == 6


def test_lanes_are_told_with_what_nobody_has_taken_and_their_homes(server, pool_name) -> None:
    shards = PoolKeys(pool_name).shards("0" * 8, 2, 8)
    for name in ("w-1", "w-2"):
        Consumer(server, shards[0], name)
        server.set(shards[0].alive(name), msgpack.packb({"id": name}), px=LIFE_MS)
    server.hset(shards[0].bounds, "used", 4)
    for lane, jobs, taken in ((0, 2, 2), (3, 5, 1), (6, 1, 0)):
        of_lane = Consumer(server, shards[0], "w-1", lane=lane)
        for number in range(jobs):
            server.xadd(of_lane.stream, {"job": f"{lane}-{number}"})
        if taken:
            of_lane.read(taken)
    server.xadd(shards[1].stream("batch", 7).key, {"job": "b"})  # and no group yet
    found = read(server, shards)
    lanes = found["lanes"]
    assert found["backlog"] == 9
    # What the second shard has in use nobody has said.
    assert (lanes["lanes"], lanes["in_use"]) == (16, 5)
    assert (lanes["waiting_jobs"], lanes["waiting_lanes"]) == (6, 3)
    longest = [(e["shard"], e["lane"], e["priority"], e["waiting"]) for e in lanes["longest"]]
    assert longest[0] == (0, 3, "interactive", 4)
    assert sorted(longest[1:]) == [(0, 6, "interactive", 1), (1, 7, "batch", 1)]
    home = {(lane["shard"], lane["lane"]): lane["home"] for lane in lanes["longest"]}
    assert 3 in own_lanes(home[0, 3], ["w-1", "w-2"], 0, 8)
    # What was left in lanes that are in use no more is anyone's.
    assert home[0, 6] == home[1, 7] == ""


def test_the_longest_lane_is_that_with_most_jobs_of_both_priorities(server, pool_name) -> None:
    shards = PoolKeys(pool_name).shards("0" * 8, 2, 8)
    for shard, lane, priority, jobs in (
        *((0, 3, "interactive", 3), (0, 3, "batch", 3)),
        *((1, 3, "batch", 5), (0, 5, "interactive", 4)),
    ):
        for number in range(jobs):
            server.xadd(shards[shard].stream(priority, lane).key, {"job": str(number)})
    lanes = read(server, shards)["lanes"]
    assert (lanes["longest_jobs"], lanes["waiting_jobs"], lanes["waiting_lanes"]) == (6, 15, 3)
    order = [(e["shard"], e["lane"], e["waiting"]) for e in lanes["longest"]]
    assert order == [(0, 3, 3), (0, 3, 3), (1, 3, 5), (0, 5, 4)]


def test_what_is_held_is_of_all_shards_and_its_age_that_of_the_oldest(server, shards) -> None:
    for age, held, shard in zip((9, 3), (100, 5), shards, strict=True):
        now = int(1000 * time.time())
        for ms, sum_ in ((now - 1000 * age, 1), (now, held)):
            fields = {"held": sum_, "bytes": 1, "life": 60_000, "digests": "0" * 32}
            server.xadd(shard.account, fields, id=f"{ms}-0")
    found = read(server, shards)
    assert found["held_bytes"] == 105
    assert found["oldest_seconds"] == pytest.approx(9, abs=0.5)


def test_workers_with_a_heartbeat_are_listed_by_name(server, shards) -> None:
    for name in ("w-2", "w-1", "dead"):
        Consumer(server, shards[0], name)
    beat = {
        "id": "w-1",
        "host": "h",
        "pid": 7,
        "engine": "hf",
        "gpu": "0",
        "rows_per_second": 1.5,
        "lanes": 16,
        "own_jobs": 90,
        "stolen_jobs": 10,
        "stolen_per_second": 0.5,
        "prompt_tokens": 400,
        "computed_tokens": 100,
        "execution": "one prompt at a time: it bears no company",
        "control": "redis://other:6379/0",
        "failures": [{"at": 1.5, "reason": "too long", "jobs": 2}],
    }
    # Of one that died as the server's clock was set back an hour, and of one whose heartbeat was
    # restored without its life.
    for name, life in (("w-3", LIFE_MS + 3_600_000), ("w-4", None)):
        Consumer(server, shards[0], name)
        server.set(shards[0].alive(name), msgpack.packb({"id": name}), px=life)
    with (
        beating(server, shards[0], "w-1", msgpack.packb(beat)),
        beating(server, shards[0], "w-2", msgpack.packb({"id": "w-2"})),
    ):
        first, second = read(server, shards)["workers"]
    assert first == beat
    assert second["id"] == "w-2"
    assert second["rows_per_second"] == second["lanes"] == second["own_jobs"] == 0
    assert second["execution"] is second["control"] is None  # it does not say
    assert second["failures"] == []


@pytest.mark.parametrize("fields", [{"a": "b"}, {"held": "x"}, None], ids=str)
def test_a_damaged_key_counts_as_empty(server, shards, fields) -> None:
    first, second = shards
    server.set(first.stream().key, "no stream")
    server.xadd(second.stream().key, {"job": "a"})
    if fields is None:
        server.set(first.account, "no stream")
    else:
        server.xadd(first.account, fields)
    found = read(server, shards)
    assert found["backlog"] == 1
    assert found["held_bytes"] == 0
