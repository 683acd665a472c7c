"""A worker's heartbeat: in every shard, with the pool's model info behind it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import redis

from lmpool.address import SENTINEL_TIMEOUT
from lmpool.keys import COUNTERS_TTL_MS, GROUP, PoolKeys, ShardKeys
from lmpool.liveness import BEAT_MS, GAP_MS, LIFE_MS
from lmpool.model_info import INFO_VERSION, ModelInfo
from lmpool.servers import Servers
from lmpool.worker import heartbeat as heartbeat_module
from lmpool.worker.heartbeat import AGAIN, ANSWER_WITHIN, EVERY, Heartbeat
from lmpool.worker.homes import Homes
from lmpool.worker.intake import create_groups
from lmpool.worker.membership import join
from lmpool.worker.status import WorkerStatus
from lmpool.worker.tally import Tally
from tests.support import logged
from tests.support.fake import FakeServer
from tests.support.parts import SplitServers, Time, info_of
from tests.support.protocol import Consumer, be_steady, new_job
from tests.support.waiting import until

INFO = info_of(3)
LONG_LIFE_MS, LONG_GAP_MS = 600_000, 300_000


@pytest.fixture(autouse=True)
def _nothing_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(heartbeat_module, "LIFE_MS", LONG_LIFE_MS)
    monkeypatch.setattr(heartbeat_module, "GAP_MS", LONG_GAP_MS)


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
def clock() -> Time:
    return Time()


def new(
    servers: Servers, keys: PoolKeys, info: ModelInfo = INFO, consumer: str = "me"
) -> Heartbeat:
    status = WorkerStatus({"id": consumer, "pid": 7}, lambda: None)
    return Heartbeat(servers, info.shard_keys(keys), consumer, status, keys, info)


def consumers(server: Any, shard: ShardKeys) -> set[bytes]:
    return {c["name"] for c in server.xinfo_consumers(shard.stream().key, GROUP)}


def test_the_lanes_that_it_is_the_home_of_are_those_in_use() -> None:
    keys = PoolKeys("homes")
    shards = keys.shards("0" * 8, 2, 64)
    homes = {name: Homes(shards, name) for name in ("a", "b")}
    # Nobody is known to be the home of anything before the first beat was answered.
    assert [mine.lanes() for mine in homes.values()] == [0, 0]
    for mine in homes.values():
        mine.update(shards[0], b"-1", 32, homes)
    assert sum(mine.lanes() for mine in homes.values()) == 32
    for mine in homes.values():
        mine.update(shards[1], b"-1", 64, homes)
    assert sum(mine.lanes() for mine in homes.values()) == 96
    # One lane is read by all, and nobody's.
    one = Homes(keys.shards("0" * 8, 2), "a")
    for shard in keys.shards("0" * 8, 2):
        one.update(shard, b"-1", 1, ["a", "b"])
    assert one.lanes() == 0


def test_what_it_counts_is_added_to_the_pools_counters_once(
    servers: Servers, server: Any, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    status = WorkerStatus({"id": "me"}, lambda: None)
    tally = Tally(shards, status)
    server.hset(shards[0].counters, "own_jobs", 100)  # others' work
    tally.add(servers)
    assert server.hgetall(shards[0].counters) == {b"own_jobs": b"100"}
    status.own_jobs, status.stolen_jobs = 5, 2
    status.note_tokens(30, 20)
    for _ in range(2):
        tally.add(servers)
    status.own_jobs += 1
    tally.add(servers)
    expected = {"own_jobs": 106, "stolen_jobs": 2, "prompt_tokens": 30, "computed_tokens": 20}
    found = {name.decode(): int(n) for name, n in server.hgetall(shards[0].counters).items()}
    assert found == expected
    assert not any(server.exists(shard.counters) for shard in shards[1:])
    assert 0 < server.pttl(shards[0].counters) <= COUNTERS_TTL_MS


def test_two_heartbeats_of_one_worker_add_nothing_twice(
    server: Any, shards: tuple[ShardKeys, ...]
) -> None:
    """As one that moves has for a moment."""
    status = WorkerStatus({"id": "me"}, lambda: None)
    tally, adds = Tally(shards[:1], status), threading.Barrier(2)

    class Slow(Servers):
        def apart(self, shards: Any, do: Any, lost: Any = None) -> Any:
            with suppress(threading.BrokenBarrierError):
                adds.wait(0.5)  # until both are here, if they may
            return super().apart(shards, do, lost)

    status.own_jobs = 5
    servers: Any = Slow(lambda: server)
    threads = [threading.Thread(target=tally.add, args=(servers,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.hgetall(shards[0].counters) == {b"own_jobs": b"5"}


def test_what_could_not_be_added_is_added_later(
    servers: Servers, server: Any, shards: tuple[ShardKeys, ...]
) -> None:
    status = WorkerStatus({"id": "me"}, lambda: None)
    tally = Tally(shards[:1], status)
    server.set(shards[0].counters, "damaged")
    status.own_jobs = 5
    tally.add(servers)
    server.delete(shards[0].counters)
    tally.add(servers)
    assert server.hgetall(shards[0].counters) == {b"own_jobs": b"5"}


def test_a_beat_is_seen_in_every_shard_and_says_who_it_is(
    servers: Servers, server: redis.Redis, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    new(servers, keys).beat(servers)  # there are no groups yet: no harm
    for shard in shards:
        value: Any = server.get(shard.alive("me"))
        told = msgpack.unpackb(value)
        assert (told["id"], told["pid"], told["rows_per_second"]) == ("me", 7, 0.0)
        left: Any = server.pttl(shard.alive("me"))
        assert LONG_LIFE_MS - 60_000 < left <= LONG_LIFE_MS
    assert server.get(keys.info) == INFO.pack()
    assert server.get(keys.serving) == INFO.mark()
    left = server.pttl(keys.serving)
    assert LONG_LIFE_MS - 60_000 < left <= LONG_LIFE_MS


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
    assert server.get(keys.serving) == INFO.mark()
    # The pool was taken over: nothing is said of what this one serves.
    other = replace(INFO, fingerprint="f" * 32)
    server.set(keys.info, other.pack())
    server.set(keys.serving, other.mark())
    heartbeat.beat(servers)
    assert server.get(keys.info) == other.pack()
    assert server.get(keys.serving) == other.mark()


@pytest.mark.parametrize("is_later", [False, True])
def test_a_model_that_was_replaced_comes_back_only_where_the_other_has_gone(
    is_later: bool,
    servers: Servers,
    server: redis.Redis,
    keys: PoolKeys,
    clock: Time,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that loses everything is told by those who took the pool over what it serves."""
    monkeypatch.setattr(heartbeat_module, "time", clock)
    other = replace(INFO, fingerprint="f" * 32)
    packed = other.pack()
    if is_later:
        packed = msgpack.packb({**msgpack.unpackb(packed), "v": INFO_VERSION + 1})
    replaced, current = new(servers, keys), new(servers, keys, other, "another")
    replaced.beat(servers)
    for _ in range(2):
        server.set(keys.info, packed)
        server.set(keys.serving, other.mark())
        replaced.beat(servers)
        server.delete(keys.info, keys.serving)
        replaced.beat(servers)
        assert server.get(keys.info) is None
    current.beat(servers)
    replaced.beat(servers)
    assert server.get(keys.info) == other.pack()
    assert server.get(keys.serving) == other.mark()
    # Nobody is left who would say it.
    server.delete(keys.info, keys.serving)
    replaced.beat(servers)
    clock.now += LONG_LIFE_MS / 1000
    replaced.beat(servers)
    assert server.get(keys.info) == INFO.pack()
    # It is the pool's own model again.
    server.delete(keys.info, keys.serving)
    replaced.beat(servers)
    assert server.get(keys.info) == INFO.pack()


def test_a_replaced_model_does_not_come_back_whenever_the_server_loses_its_data(
    servers: Servers, server: redis.Redis, keys: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing lies between a worker's look and its word."""
    other = replace(INFO, fingerprint="f" * 32)
    replaced = new(servers, keys)
    replaced.beat(servers)
    server.set(keys.info, other.pack())
    server.set(keys.serving, other.mark())
    replaced.beat(servers)

    real = heartbeat_module.script

    def losing(name: str) -> Any:
        if name == "serve":
            server.delete(keys.info, keys.serving)
        return real(name)

    monkeypatch.setattr(heartbeat_module, "script", losing)
    for _ in range(2):
        replaced.beat(servers)
        assert server.get(keys.info) is None
        server.set(keys.info, other.pack())
        server.set(keys.serving, other.mark())


def test_a_pool_that_was_given_another_layout_lives_until_its_workers_have_moved(
    servers: Servers, server: redis.Redis, keys: PoolKeys
) -> None:
    moved = INFO.moved_to(4, 8)
    server.set(keys.info, moved.pack())
    server.set(keys.serving, moved.mark(), px=60_000)
    new(servers, keys).beat(servers)
    left: Any = server.pttl(keys.serving)
    assert left > 60_000
    assert server.get(keys.serving) == moved.mark()


def test_a_replaced_model_does_not_come_back_where_the_data_are_lost_behind_the_look(
    servers: Servers, server: redis.Redis, keys: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(INFO, fingerprint="f" * 32)
    replaced = new(servers, keys)
    replaced.beat(servers)
    server.set(keys.info, other.pack())
    server.set(keys.serving, other.mark())
    real = heartbeat_module.get_string

    def losing(*asked: Any) -> Any:
        server.delete(keys.info, keys.serving)
        return real(*asked)

    monkeypatch.setattr(heartbeat_module, "get_string", losing)
    for _ in range(2):
        replaced.beat(servers)
        assert server.get(keys.info) is None


def test_who_was_replaced_says_of_nobody_that_they_live(
    servers: Servers, server: redis.Redis, keys: PoolKeys
) -> None:
    """Else their model could not be replaced once they are gone, but by force."""
    other = replace(INFO, fingerprint="f" * 32)
    server.set(keys.info, other.pack())
    server.set(keys.serving, other.mark(), px=60_000)
    new(servers, keys).beat(servers)
    left: Any = server.pttl(keys.serving)
    assert 0 < left <= 60_000


def test_what_is_to_be_there_and_is_not_is_told_at_each_beat_while_the_pool_is_its_own(
    servers: Servers, server: redis.Redis, keys: PoolKeys
) -> None:
    heartbeat, expected = new(servers, keys), keys.vocabulary(INFO.fingerprint8)
    assert expected not in heartbeat.beat(servers)  # an engine may have none
    heartbeat.expects = [expected]
    assert expected in heartbeat.beat(servers)
    server.hset(expected, "no", "string")
    assert expected in heartbeat.beat(servers)
    other = replace(INFO, fingerprint="f" * 32)
    server.set(keys.info, other.pack())
    server.set(keys.serving, other.mark())
    assert expected not in heartbeat.beat(servers)
    server.delete(keys.info, keys.serving)
    server.set(expected, b"a vocabulary")
    assert expected not in heartbeat.beat(servers)


@pytest.mark.parametrize("damage", [b"", b"\xff\0", b"\x80", INFO.pack()[:-1]])
def test_a_model_info_that_nobody_can_read_is_published_again(
    damage: bytes, servers: Servers, server: redis.Redis, keys: PoolKeys
) -> None:
    heartbeat = new(servers, keys)
    heartbeat.beat(servers)
    server.set(keys.info, damage)
    heartbeat.beat(servers)
    assert server.get(keys.info) == INFO.pack()
    assert server.get(keys.serving) == INFO.mark()


def test_a_model_info_of_a_later_release_is_left(
    servers: Servers, server: redis.Redis, keys: PoolKeys
) -> None:
    """Others of its pool can read it."""
    heartbeat = new(servers, keys)
    heartbeat.beat(servers)
    later = msgpack.packb({**msgpack.unpackb(INFO.pack()), "v": INFO_VERSION + 1})
    server.set(keys.info, later)
    heartbeat.beat(servers)
    assert server.get(keys.info) == later


@pytest.mark.parametrize("until_when", [3_600_000, float("inf")])
def test_nobody_is_said_to_live_for_longer_than_a_life(
    until_when: float, servers: Servers, server: Any, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    """Not who died before the clock was set back, either: lanes have no home with the dead."""
    heartbeat = new(servers, keys)
    heartbeat.beat(servers)
    workers = shards[0].workers
    seconds, _ = server.time()
    server.zadd(workers, {"dead": 1000 * seconds + until_when})
    heartbeat.beat(servers)
    seconds, _ = server.time()
    ends = dict(server.zrangebyscore(workers, 0, "+inf", withscores=True))
    assert set(ends) == {b"dead", b"me"}
    assert max(ends.values()) <= 1000 * (seconds + 1) + LONG_LIFE_MS


def test_of_two_layouts_the_later_is_served_whoever_says_the_other(
    servers: Servers, server: redis.Redis, keys: PoolKeys
) -> None:
    def beat(mine: ModelInfo, there: ModelInfo) -> tuple[list[ModelInfo], ModelInfo]:
        """Where one that serves `mine` moves, and what the pool serves then."""
        server.set(keys.info, there.pack())
        server.set(keys.serving, there.mark())
        told: list[ModelInfo] = []
        status = WorkerStatus({}, lambda: None)
        shards = mine.shard_keys(keys)
        Heartbeat(servers, shards, "me", status, keys, mine, on_moved=told.append).beat(servers)
        held: Any = server.get(keys.info)
        return told, ModelInfo.unpack(held)

    second = INFO.moved_to(2, 4)
    third = second.moved_to(INFO.shards, INFO.lanes)
    for mine, there in ((INFO, second), (INFO, third), (second, third)):
        assert beat(mine, there) == ([there], there)
        assert beat(there, mine) == ([], there)
    # Asked for as somebody had left the layout out.
    asked = replace(third, layout="", layouts=()).moved_to(5, 1)
    assert beat(third, asked) == ([asked], asked)
    # Who joined may say of prompts, too, where they belong.
    other = replace(third, blocks=third.blocks + 1)
    assert beat(third, other) == ([other], other)


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
    damaged = f"{shards[0].prefix}:bounds"
    for damage in (b"", b"nonsense", b"0", b"-1", b"nan", b"inf", b"1025", b"99999"):
        server.hset(damaged, "lanes", damage)  # what cannot be meant is said anew, and nothing else
        first.beat(servers)
        assert server.hget(damaged, "lanes") == b"%d" % INFO.lanes
        assert bounds() == {b"5"}
    for damage in (b"", b"nonsense", b"0", b"-1", b"nan", b"inf", b"1.5"):
        server.hset(damaged, "backlog", damage)
        first.beat(servers)
        assert bounds() == {b"50", b"5"}
    server.delete(*(f"{shard.prefix}:bounds" for shard in shards))
    second.beat(servers)
    assert bounds() == {b"5"}


def test_shards_that_have_yet_to_come_into_the_layout_are_told_at_each_beat(
    servers: Servers, server: Any, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    info = INFO.moved_to(INFO.shards, INFO.lanes)
    heartbeat, every = new(servers, keys, info), [shard.bounds for shard in shards]
    for _ in range(2):
        assert heartbeat.beat(servers) == every
    for shard in shards:
        server.hset(shard.bounds, "layout", info.layout)
    assert heartbeat.beat(servers) == []
    server.delete(shards[0].bounds)
    server.hset(shards[1].bounds, "layout", "of before")
    assert heartbeat.beat(servers) == every[:2]
    for shard in shards:  # of a pool that no command laid there is nothing to be told
        server.delete(shard.bounds)
    assert new(servers, keys).beat(servers) == []
    # Also where shards have the name of a time when the pool was laid there.
    for shard in shards:
        server.hset(shard.bounds, "layout", info.layout)
    assert new(servers, keys).beat(servers) == []


def test_who_joins_keeps_what_others_had_end_also_where_a_shard_is_away_at_first(
    servers: Servers, server: Any, keys: PoolKeys, shards: tuple[ShardKeys, ...], monkeypatch: Any
) -> None:
    asked = servers.apart
    heartbeat, away = new(servers, keys), {shards[0].prefix}
    ending = [key for shard in shards for key in (shard.stream().key, shard.dead, shard.adapters)]

    def apart(some: Any, do: Any, lost: Any = None) -> Any:
        return None if some[0].prefix in away else asked(some, do, lost)

    def have_them_end() -> None:
        for shard in shards:
            server.xadd(shard.stream().key, {"job": "x"})
            server.xadd(shard.dead, {"job": "x"})
            server.hset(shard.adapters, "one", "1")
        for key in ending:
            server.pexpire(key, 600_000)

    have_them_end()
    monkeypatch.setattr(servers, "apart", apart)
    heartbeat.beat(servers)
    assert [server.pttl(key) < 0 for key in ending] == [False] * 3 + [True] * (len(ending) - 3)
    away.clear()
    heartbeat.beat(servers)
    assert {server.pttl(key) for key in ending} == {-1}
    have_them_end()
    heartbeat.beat(servers)  # it has joined
    assert all(server.pttl(key) > 0 for key in ending)


def test_who_joins_and_stores_nothing_keeps_nothing_that_ends(
    servers: Servers, server: Any, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    """What accounts for results lives as long as they do."""
    for shard in shards:
        Consumer(server, shard).complete([], stored=[new_job(1)], bytes_each=9)
    join(servers, keys, INFO, False, LIFE_MS)
    new(servers, keys).beat(servers)
    for shard in shards:
        assert all(server.pttl(key) > 0 for key in (shard.account, shard.held))


def test_a_damaged_registry_is_mended_by_who_may_know_what_was_there(
    servers: Servers, server: Any, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    registry, bounds = shards[0].adapters, shards[0].bounds
    info = INFO.moved_to(INFO.shards, INFO.lanes)
    first = new(servers, keys, info)
    server.set(registry, "damaged")
    assert registry in first.beat(servers)  # nobody else is there
    for shard in shards:
        server.hset(shard.bounds, "layout", info.layout)
    server.set(registry, "damaged")
    assert new(servers, keys, info, consumer="other").beat(servers) == []
    assert server.type(registry) == b"string"
    # And other shards may know it, as long as this one goes by no name.
    assert first.beat(servers) == [registry, bounds]


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
    assert pytest.approx(LIFE_MS / 3000, abs=0.001) == EVERY


def test_a_beat_that_failed_is_tried_again_soon_and_each_reason_said_once(
    servers: Servers,
    keys: PoolKeys,
    clock: Time,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heartbeat = new(servers, keys)
    failures = ["", "gone", "gone", "", "", "gone", "", "gone", "full", "gone", ""]

    def beat(servers: Servers) -> None:
        if why := failures.pop(0):
            raise redis.exceptions.ConnectionError(why)

    monkeypatch.setattr(heartbeat, "beat", beat)
    ended: Any = Ended(clock, [EVERY] * 11)
    with caplog.at_level(logging.WARNING):
        heartbeat.run(ended)
    assert ended.asked == [
        *(EVERY, EVERY, AGAIN, AGAIN, EVERY, EVERY),
        *(AGAIN, EVERY, AGAIN, AGAIN, AGAIN, EVERY),
    ]
    assert caplog.text.count("could not be written: gone") == 3
    assert caplog.text.count("could not be written: full") == 1


def test_a_beat_is_not_said_to_be_missed_where_mending_alone_is_refused(
    server: redis.Redis,
    servers: Servers,
    keys: PoolKeys,
    shards: tuple[ShardKeys, ...],
    clock: Time,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise redis.exceptions.NoPermissionError("no xinfo")

    monkeypatch.setattr(heartbeat_module, "mend", refuse)
    ended: Any = Ended(clock, [EVERY])
    with caplog.at_level(logging.WARNING):
        new(servers, keys).run(ended)
    assert all(server.exists(shard.alive("me")) for shard in shards)
    (said,) = logged.messages(caplog)
    assert said.startswith("the heartbeat, or what is mended")
    assert said.endswith(": no xinfo")


def test_a_beat_says_since_when_there_was_no_gap(
    servers: Servers, server: redis.Redis, keys: PoolKeys, shards: tuple[ShardKeys, ...]
) -> None:
    def since() -> int:
        began = now()
        new(servers, keys).beat(servers)  # whichever worker's
        found = [int(server.get(shard.steady)) for shard in shards]  # type: ignore[arg-type]
        assert found[0] <= found[-1] <= found[0] + now() - began
        return found[0]

    def now() -> int:
        seconds, micros = server.time()  # type: ignore[misc]
        return int(seconds * 1000 + micros // 1000)

    before, first = now(), since()
    assert before <= first <= now()
    for shard in shards:
        left: Any = server.pttl(shard.steady)
        assert LONG_GAP_MS - 60_000 < left <= LONG_GAP_MS
    be_steady(server, *shards, for_ms=60_000)
    assert since() < now() - 50_000
    be_steady(server, *shards, for_ms=-60_000)  # the clock was set back
    assert since() <= now()
    be_steady(server, *shards, for_ms=60_000)
    for shard in shards:
        server.pexpire(shard.steady, 1)  # none came for so long
    until(lambda: not any(server.exists(shard.steady) for shard in shards))
    assert since() >= first
    for shard in shards:
        server.delete(shard.steady)
        server.rpush(shard.steady, "in the way")
    assert since() >= first


def test_no_gap_ends_a_living_workers_heartbeat() -> None:
    assert BEAT_MS < GAP_MS
    assert BEAT_MS + GAP_MS < LIFE_MS
    # Nor does a primary that answers nothing, and then a Sentinel that does not.
    assert ANSWER_WITHIN + AGAIN + SENTINEL_TIMEOUT < LIFE_MS / 1000


def test_it_ends_at_once(servers: Servers, keys: PoolKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVERY", "AGAIN"):
        monkeypatch.setattr(heartbeat_module, name, 600.0)
    heartbeat, ended = new(servers, keys), threading.Event()
    thread = threading.Thread(target=heartbeat.run, args=(ended,))
    thread.start()
    ended.set()
    thread.join(60)
    assert not thread.is_alive()
