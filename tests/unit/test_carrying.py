"""What comes along from shards that a pool has left: each thing once, whoever brings it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from lmpool.keys import PoolKeys, ShardKeys
from lmpool.liveness import LIFE_MS
from lmpool.servers import Servers
from lmpool.worker import carrying
from lmpool.worker.adapters import Adapters
from lmpool.worker.carrying import carry_adapters, carry_over, register_again, without
from lmpool.worker.membership import OLD_KEYS_MS


@pytest.fixture
def server(fake_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def servers(server: Any) -> Servers:
    return Servers(lambda: server)


@pytest.fixture
def shards(pool_name: str) -> Callable[[int], tuple[ShardKeys, ...]]:
    return lambda count: PoolKeys(pool_name).shards("01234567", count)


def fill(server: Any, shards: tuple[ShardKeys, ...]) -> None:
    """Counters, and two dead letters in each."""
    for shard in shards:
        server.hset(shard.counters, mapping={"computed": 10 + shard.number, "failed": 1})
        for number in (1, 2):
            fields = {"job": "x", "reason": f"{shard.number} {number}"}
            server.xadd(shard.dead, fields, id=f"{1000 * number}-{shard.number}")


def totals(server: Any, shards: tuple[ShardKeys, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for shard in shards:
        for name, count in server.hgetall(shard.counters).items():
            found[name.decode()] = found.get(name.decode(), 0) + int(count)
    return found


def reasons(server: Any, shards: tuple[ShardKeys, ...]) -> list[tuple[str, int]]:
    """Why, and when by what the entry says."""
    return sorted(
        (fields[b"reason"].decode(), int(fields[b"given_up_ms"]))
        for shard in shards
        for _, fields in server.xrange(shard.dead)
    )


@pytest.mark.parametrize("step", ["_drop", "_part", "_inherit"])
def test_who_dies_in_the_midst_is_made_good_by_the_next(
    step: str,
    server: Any,
    servers: Servers,
    shards: Callable[[int], tuple[ShardKeys, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    former, heirs = shards(3), shards(2)
    fill(server, former)
    server.hset(heirs[0].counters, "computed", 100)
    told = getattr(carrying, step)
    calls = 0

    def dies(*arguments: Any, **named: Any) -> Any:
        """As it is to be taken back where it was, after it was given to the other."""
        nonlocal calls
        calls += 1
        if calls == 2:
            raise redis.exceptions.ConnectionError("killed")
        return told(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(carrying, step, dies)
        with pytest.raises(redis.exceptions.ConnectionError):
            carry_over(servers, former, heirs)
    for _ in range(2):
        carry_over(servers, former, heirs)
        assert totals(server, heirs) == {"computed": 100 + 10 + 11 + 12, "failed": 3}
        wanted = sorted((f"{n} {each}", 1000 * each) for n in range(3) for each in (1, 2))
        assert reasons(server, heirs) == wanted
    assert totals(server, former) == {}
    assert not any(server.xlen(shard.dead) for shard in former)


def test_many_who_bring_the_same_at_once_count_it_once(
    fake_url: str, server: Any, shards: Callable[[int], tuple[ShardKeys, ...]]
) -> None:
    former, heirs = shards(1), shards(4)
    fill(server, former)
    at_once = threading.Barrier(4)

    def bring() -> None:
        with redis.Redis.from_url(fake_url, protocol=2) as client:
            at_once.wait(10)
            for _ in range(5):
                carry_over(Servers(lambda: client), former, heirs)  # type: ignore[arg-type,return-value]

    threads = [threading.Thread(target=bring) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(server, heirs) == {"computed": 10, "failed": 1}
    assert reasons(server, heirs) == [("0 1", 1000), ("0 2", 2000)]


def test_keys_end_once_nobody_lives_there_and_jobs_at_the_last(
    server: Any, servers: Servers, shards: Callable[[int], tuple[ShardKeys, ...]]
) -> None:
    (shard,), heirs = shards(1), shards(2)
    jobs = shard.stream().key
    server.xadd(jobs, {"job": "x"})
    now = int(server.time()[0]) * 1000
    server.zadd(shard.workers, {"": -3, "somebody": now + LIFE_MS})
    carry_over(servers, [shard], heirs, end=True, empty=True)
    assert (server.pttl(jobs), server.xlen(jobs)) == (-1, 1)
    server.zadd(shard.workers, {"somebody": now - 1000})
    carry_over(servers, [shard], heirs, end=True)
    assert 0 < server.pttl(jobs) <= OLD_KEYS_MS
    assert server.xlen(jobs) == 1
    carry_over(servers, [shard], heirs, end=True, empty=True)
    assert server.xlen(jobs) == 0
    assert server.zscore(shard.workers, "") == -3


def test_the_registry_is_taken_over_by_who_is_first_in_each_move(
    server: Any, servers: Servers, shards: Callable[[int], tuple[ShardKeys, ...]]
) -> None:
    former, heirs = shards(1), shards(2)

    def known() -> list[set[bytes]]:
        return [set(server.hkeys(heir.adapters)) for heir in heirs]

    server.hset(former[0].adapters, "one", "1")
    server.hset(heirs[0].adapters, "of another time", "0")
    carry_adapters(servers, former, heirs, 3)
    assert known() == [{b"one"}] * 2
    # Who comes later was asleep: what became of the registry meanwhile stands.
    server.hdel(heirs[0].adapters, "one")
    carry_adapters(servers, former, heirs, 3)
    assert known() == [set(), {b"one"}]
    carry_adapters(servers, former, heirs, 4)
    assert known() == [{b"one"}] * 2
    # But what it did itself a moment ago is done there, too.
    register_again(servers, heirs, {"one": None, "two": "2"})
    assert known() == [{b"two"}] * 2


def test_adapters_know_what_was_done_to_them_lately(
    server: Any, servers: Servers, shards: Callable[[int], tuple[ShardKeys, ...]]
) -> None:
    adapters = Adapters(None, servers, shards(1), [])  # type: ignore[arg-type]
    adapters.remove("one")
    assert adapters.latest(60.0) == {"one": None}
    assert adapters.latest(0.0) == {}


def test_shards_of_the_same_keys_are_the_same(
    shards: Callable[[int], tuple[ShardKeys, ...]], pool_name: str
) -> None:
    with_lanes = PoolKeys(pool_name).shards("01234567", 2, 64)
    assert without(shards(2), with_lanes) == []
    assert without(shards(3), with_lanes) == list(shards(3))
