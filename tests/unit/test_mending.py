"""Jobs that were passed over: no worker has them, and none would be given them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis

from lmpool.keys import GROUP, ShardKeys
from lmpool.servers import Servers
from lmpool.worker.homes import Homes
from lmpool.worker.mending import mend
from tests.support import logged
from tests.support.parts import info_of
from tests.support.protocol import Caller, Consumer, entries_of, new_job, shard_of_pool

JOBS = [new_job(number) for number in range(1, 8)]
LAST = "18446744073709551615-18446744073709551615"


@pytest.fixture
def shard(pool_name: str) -> ShardKeys:
    return shard_of_pool(pool_name)


def look_after(server: redis.Redis, shard: ShardKeys) -> None:
    """As a worker does with each beat."""
    servers = Servers(lambda: server)  # type: ignore[arg-type,return-value]
    assert mend(servers, [shard], info_of(1), Homes([shard], "me"), set()) == []


def ids(server: redis.Redis, shard: ShardKeys) -> list[bytes]:
    return [entry for entry, _ in entries_of(server, shard.stream().key)]


@pytest.mark.parametrize("place", ["$", LAST])
def test_jobs_behind_the_groups_place_are_asked_again(
    place: str,
    redis_client: redis.Redis,
    shard: ShardKeys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caller, worker = Caller(redis_client, shard), Consumer(redis_client, shard)
    caller.enqueue(*JOBS[:4])
    first, *_ = worker.read(1)
    redis_client.xgroup_setid(shard.stream().key, GROUP, place)
    caller.enqueue(JOBS[4])
    assert caller.check(*JOBS[:5]) == ("jjjjj", False)  # each is still there
    with caplog.at_level(logging.ERROR):
        look_after(redis_client, shard)
    behind = 3 if place == "$" else 4
    assert f"{behind} jobs of {shard.prefix} had been passed over" in caplog.text
    assert caller.check(*JOBS[:5])[0] == "j" + "u" * behind + "j" * (4 - behind)
    assert caller.enqueue(*JOBS[1 : behind + 1])[0] == "q" * behind
    later = worker.read()
    assert [first, *later] == ids(redis_client, shard)
    assert len(later) == 4
    caplog.clear()
    look_after(redis_client, shard)
    assert logged.messages(caplog) == []
    assert [first, *later] == ids(redis_client, shard) == worker.held()


def test_what_workers_have_and_what_they_will_be_given_stays(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """Wherever it stands: one that was taken from its worker has others around it."""
    stream = shard.stream().key
    one, other = (Consumer(redis_client, shard, name) for name in ("one", "other"))
    Caller(redis_client, shard).enqueue(*JOBS)
    mine, theirs = one.read(3), other.read(2)
    before = ids(redis_client, shard)
    look_after(redis_client, shard)
    assert ids(redis_client, shard) == before
    redis_client.xack(stream, GROUP, mine[1], theirs[1])
    look_after(redis_client, shard)
    assert ids(redis_client, shard) == [mine[0], mine[2], theirs[0], *before[5:]]
    redis_client.xgroup_delconsumer(stream, GROUP, "one")
    look_after(redis_client, shard)
    assert ids(redis_client, shard) == [theirs[0], *before[5:]]
    redis_client.xgroup_delconsumer(stream, GROUP, "other")
    look_after(redis_client, shard)
    assert ids(redis_client, shard) == before[5:]
    assert one.read() == before[5:]


def test_many_that_were_passed_over_are_taken_off_in_parts(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """Behind one that a worker has for long, that is: before it at once."""
    stream, worker = shard.stream().key, Consumer(redis_client, shard)

    def put(count: int) -> Any:
        with redis_client.pipeline(transaction=False) as pipeline:
            for _ in range(count):
                pipeline.xadd(stream, {"job": "x"})
            return pipeline.execute()

    put(1500)
    worker.read(1500)
    (held,) = put(1)
    worker.read()
    redis_client.xack(stream, GROUP, *ids(redis_client, shard)[:1500])
    put(1500)
    redis_client.xgroup_setid(stream, GROUP, "$")
    waits = put(1)
    look_after(redis_client, shard)
    assert ids(redis_client, shard)[0] == held
    assert len(ids(redis_client, shard)) == 502
    look_after(redis_client, shard)
    assert ids(redis_client, shard) == [held, *waits]


def test_what_is_behind_many_that_workers_have_is_taken_off_once_these_are_done(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """A look at each of thousands would cost more than that is worth."""
    stream, worker = shard.stream().key, Consumer(redis_client, shard)
    for _ in range(40):
        redis_client.xadd(stream, {"job": "x"})
    held = worker.read(30)
    redis_client.xgroup_setid(stream, GROUP, "$")
    while held:
        look_after(redis_client, shard)
        assert ids(redis_client, shard)[: len(held)] == held
        if len(held) < 16:
            assert ids(redis_client, shard) == held
        redis_client.xack(stream, GROUP, held[0])
        redis_client.xdel(stream, held.pop(0))


def test_ids_are_compared_as_numbers_of_any_length(
    redis_client: redis.Redis, shard: ShardKeys
) -> None:
    """A place just beyond the last id is none that a double could tell from it."""
    stream, number = shard.stream().key, 2**53
    for place in (f"9-{number + 1}", "10-0", f"9-{number}"):
        redis_client.delete(stream)
        redis_client.xadd(stream, {"job": "x"}, id=f"9-{number}")
        worker = Consumer(redis_client, shard)
        redis_client.xgroup_setid(stream, GROUP, place)
        look_after(redis_client, shard)
        groups: Any = redis_client.xinfo_groups(stream)
        assert groups[0]["last-delivered-id"] == f"9-{number}".encode(), place
        assert worker.read() == []
