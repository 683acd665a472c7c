"""What waits in lanes, and since when, without jobs being read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.producer.statistics import pool_statistics
from lmpool.queues import LONGEST, LOOKS, read_queues
from lmpool.replies import REPLY_BYTES
from lmpool.servers import Servers
from tests.support.protocol import Consumer

pytestmark = [pytest.mark.server]


@pytest.fixture
def shard(pool_name: str) -> ShardKeys:
    return PoolKeys(pool_name).shards("0" * 8, 1, 8)[0]


@pytest.fixture
def servers(server_url: str) -> Iterator[Servers]:
    servers = Servers.of_url(server_url, bounded=True)
    yield servers
    servers.close()


def is_as_old(age: float, least: float, began: int) -> bool:
    """Whether what began then, in ms, and is at least so many seconds old, may be so old by now."""
    return least <= age <= time.time() - began / 1000 + 1


def calls(server: redis.Redis, command: str) -> int:
    found: Any = server.info("commandstats")
    found = found.get(f"cmdstat_{command}", {"calls": 0})
    return int(found["calls"])


def test_who_withdraws_what_a_worker_has_hides_nothing_that_waits(
    redis_client: redis.Redis, servers: Servers, shard: ShardKeys
) -> None:
    worker = Consumer(redis_client, shard, "w-1")
    for number in range(10):
        redis_client.xadd(worker.stream, {"job": str(number)})
    taken = worker.read(4)
    redis_client.xdel(worker.stream, *taken[:3])
    found = pool_statistics(servers, [shard])
    assert found["backlog"] == 7
    assert found["lanes"]["waiting_jobs"] == found["lanes"]["longest_jobs"] == 6
    redis_client.xack(worker.stream, GROUP, *taken)
    redis_client.xdel(worker.stream, taken[3])
    assert pool_statistics(servers, [shard])["lanes"]["waiting_jobs"] == 6


@pytest.mark.one_server
@pytest.mark.parametrize("fresh", [0, 2, 30])
def test_the_oldest_job_is_found_in_a_short_lane_and_few_are_read_for_it(
    fresh: int, redis_client: redis.Redis, servers: Servers, pool_name: str
) -> None:
    """`fresh` lanes have jobs since a second ago and are as long as the one whose job is old; in
    others, longer ones, workers read a second ago."""
    shard = PoolKeys(pool_name).shards("0" * 8, 1, 64)[0]
    now = int(1000 * time.time())
    for lane in range(20 + fresh):
        worker = Consumer(redis_client, shard, "w-1", lane=lane)
        for number in range(2):
            redis_client.xadd(worker.stream, {"job": "a"}, id=f"{now - 2000 - lane}-{number + 1}")
        taken = worker.read()
        redis_client.xack(worker.stream, GROUP, *taken)
        redis_client.xdel(worker.stream, *taken)
        for number in range(9 if lane < 20 else 1):
            redis_client.xadd(worker.stream, {"job": "a"}, id=f"{now - 1000}-{number + 1}")
    for priority, age in (("interactive", 600), ("batch", 60)):
        key = shard.stream(priority, 63).key  # type: ignore[arg-type]
        redis_client.xgroup_create(key, GROUP, id="0", mkstream=True)
        redis_client.xadd(key, {"job": "a"}, id=f"{now - 1000 * age}-1")
    before = calls(redis_client, "xrange")
    found = read_queues(servers.for_shard(shard), shard).streams
    assert calls(redis_client, "xrange") - before == 5 + 2
    for priority, age in (("interactive", 600), ("batch", 60)):
        ages = [queue.age for queue in found if queue.stream.priority == priority]
        assert is_as_old(max(ages), age, now - 1000 * age)


@pytest.mark.one_server
def test_few_jobs_are_read_though_nobody_has_read_any(
    redis_client: redis.Redis, servers: Servers, pool_name: str
) -> None:
    shard = PoolKeys(pool_name).shards("0" * 8, 1, 64)[0]
    began = int(1000 * time.time()) - 60_000
    for stream in shard.streams:
        redis_client.xgroup_create(stream.key, GROUP, id="0", mkstream=True)
        redis_client.xadd(stream.key, {"job": "a"}, id=f"{began}-1")
    before = calls(redis_client, "xrange")
    found = read_queues(servers.for_shard(shard), shard).streams
    assert calls(redis_client, "xrange") - before == LONGEST + 2 * LOOKS
    assert sum(queue.age > 0 for queue in found) == LONGEST + 2 * LOOKS
    assert is_as_old(max(queue.age for queue in found), 60, began)


def test_the_age_of_a_job_that_a_worker_has_is_that_of_its_entry(
    redis_client: redis.Redis, servers: Servers, shard: ShardKeys
) -> None:
    worker = Consumer(redis_client, shard, "w-1", lane=3)
    began = int(1000 * time.time()) - 60_000
    redis_client.xadd(worker.stream, {"job": "a"}, id=f"{began}-1")
    worker.read(1)
    (queue,) = read_queues(servers.for_shard(shard), shard).streams
    assert is_as_old(queue.age, 60, began)


def test_a_job_too_long_to_be_read_hides_no_other(
    redis_client: redis.Redis, servers: Servers, shard: ShardKeys
) -> None:
    long, other = shard.stream("interactive", 3).key, shard.stream("interactive", 5).key
    redis_client.xadd(long, {"job": b"x" * (REPLY_BYTES + (1 << 20))})
    began = int(1000 * time.time()) - 60_000
    redis_client.xadd(other, {"job": "a"}, id=f"{began}-1")
    try:
        found = pool_statistics(servers, [shard])
        assert found["lanes"]["waiting_jobs"] == 2
        ages = {lane["lane"]: lane["oldest_seconds"] for lane in found["lanes"]["longest"]}
        assert ages.keys() == {3, 5}
        assert ages[3] == 0.0
        assert is_as_old(ages[5], 60, began)
    finally:
        redis_client.delete(long)


@pytest.mark.one_server
def test_rights_of_an_earlier_release_tell_what_they_told(
    redis_client: redis.Redis, server_url: str, shard: ShardKeys
) -> None:
    worker = Consumer(redis_client, shard, "w-1")
    began = int(1000 * time.time()) - 60_000
    for number in range(5):
        redis_client.xadd(worker.stream, {"job": "a"}, id=f"{began}-{number + 1}")
    worker.read(2)
    rights = "+ping +time +hget +xlen +xrange +xinfo|stream +xinfo|consumers"
    redis_client.execute_command(
        "ACL", "SETUSER", "earlier", "on", ">word", "%R~*", "-@all", "+@connection", *rights.split()
    )
    own = redis_client.connection_pool.connection_kwargs
    options: Any = {name: own[name] for name in ("host", "port", "path", "db") if name in own}
    kind: Any = redis.UnixDomainSocketConnection if "path" in own else redis.Connection
    options |= {"username": "earlier", "password": "word", "protocol": 2}
    pool = redis.ConnectionPool(connection_class=kind, **options)
    try:
        client: Any = redis.Redis(connection_pool=pool)
        (queue,) = read_queues(client, shard).streams
        assert (queue.jobs, queue.pending, queue.waiting) == (5, 2, 3)
        assert is_as_old(queue.age, 60, began)
        pool.disconnect()
    finally:
        redis_client.execute_command("ACL", "DELUSER", "earlier")
