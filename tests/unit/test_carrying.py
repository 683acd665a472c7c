"""What comes along from shards that a pool has left: each thing once, whoever brings it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis

from lmpool.keys import PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.registry import REMOVED_MS, Change
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.worker import carrying
from lmpool.worker.carrying import carry_over, end_lanes, enter, without
from lmpool.worker.homes import Homes
from lmpool.worker.membership import OLD_KEYS_MS
from lmpool.worker.mending import mend
from tests.support.parts import info_of

LONG_MS = 3_600_000
"""Of a worker's life, however slow the machine is."""


@pytest.fixture
def server(fake_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def servers(server: Any) -> Servers:
    return Servers(lambda: server)


@pytest.fixture
def keys(pool_name: str) -> PoolKeys:
    return PoolKeys(pool_name)


def layouts(*counts: int) -> list[ModelInfo]:
    """A pool that lay in so many shards, one after another."""
    found = [info_of(counts[0])]
    for count in counts[1:]:
        found.append(found[-1].moved_to(count, 1))
    return found


def fill(server: Any, shards: Sequence[ShardKeys]) -> None:
    """Counters, and two dead letters in each."""
    for shard in shards:
        server.hset(shard.counters, mapping={"computed": 10 + shard.number, "failed": 1})
        for number in (1, 2):
            fields = {"job": "x", "reason": f"{shard.number} {number}"}
            server.xadd(shard.dead, fields, id=f"{1000 * number}-{shard.number}")


def totals(server: Any, shards: Sequence[ShardKeys]) -> dict[str, int]:
    found: dict[str, int] = {}
    for shard in shards:
        for name, count in server.hgetall(shard.counters).items():
            found[name.decode()] = found.get(name.decode(), 0) + int(count)
    return found


def reasons(server: Any, shards: Sequence[ShardKeys]) -> list[tuple[str, int]]:
    """Why, and when by what the entry says."""
    return sorted(
        (fields[b"reason"].decode(), int(fields[b"came_from"].rpartition(b"/")[2].split(b"-")[0]))
        for shard in shards
        for _, fields in server.xrange(shard.dead)
    )


def bring(servers: Servers, keys: PoolKeys, info: ModelInfo, **how: bool) -> bool:
    """Carry over all that was left, as a worker does that serves `info`."""
    heirs, left = info.shard_keys(keys), info.left_shards(keys)
    found = [carry_over(servers, shard, info, heirs, **how) for shard in left]
    return None not in found


# --- counters and dead letters -----------------------------------------------------------------


@pytest.mark.parametrize("step", ["_drop", "_part", "_inherit"])
def test_who_dies_in_the_midst_is_made_good_by_the_next(
    step: str, server: Any, servers: Servers, keys: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, now = layouts(3, 2)
    former, heirs = before.shard_keys(keys), now.shard_keys(keys)
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
            bring(servers, keys, now)
    for _ in range(2):
        assert bring(servers, keys, now)
        assert totals(server, heirs) == {"computed": 100 + 10 + 11 + 12, "failed": 3}
        wanted = sorted((f"{n} {each}", 1000 * each) for n in range(3) for each in (1, 2))
        assert reasons(server, heirs) == wanted
    assert totals(server, former) == {}
    assert not any(server.xlen(shard.dead) for shard in former)


def test_many_who_bring_the_same_at_once_count_it_once(
    fake_url: str, server: Any, keys: PoolKeys
) -> None:
    before, now = layouts(1, 4)
    fill(server, before.shard_keys(keys))
    at_once = threading.Barrier(4)

    def bring_often() -> None:
        with redis.Redis.from_url(fake_url, protocol=2) as client:
            at_once.wait(60)
            for _ in range(5):
                bring(Servers(lambda: client), keys, now)  # type: ignore[arg-type,return-value]

    threads = [threading.Thread(target=bring_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(server, now.shard_keys(keys)) == {"computed": 10, "failed": 1}
    assert reasons(server, now.shard_keys(keys)) == [("0 1", 1000), ("0 2", 2000)]


def test_workers_of_two_layouts_bring_it_to_the_same_heir(
    server: Any, servers: Servers, keys: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = layouts(1, 2, 3)
    fill(server, first.shard_keys(keys))

    def drop_nothing(*_: Any) -> int:
        return 0

    with monkeypatch.context() as patch:  # who comes next finds all that there was
        patch.setattr(carrying, "_drop", drop_nothing)
        bring(servers, keys, second)
        bring(servers, keys, third)
    for shard in second.shard_keys(keys):
        server.hset(shard.bounds, "layout", second.layout)
    bring(servers, keys, third)
    bring(servers, keys, third)
    assert totals(server, third.shard_keys(keys)) == {"computed": 10, "failed": 1}
    assert reasons(server, third.shard_keys(keys)) == [("0 1", 1000), ("0 2", 2000)]


def test_keys_end_once_nobody_lives_there_and_jobs_at_the_last(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    before, now = layouts(1, 2)
    (shard,) = before.shard_keys(keys)
    jobs, held, digest = shard.stream().key, 1000, bytes(16)
    server.xadd(jobs, {"job": "x"})
    entry = {"held": held, "bytes": held, "life": 600_000, "digests": digest.hex()}
    server.xadd(shard.account, entry)
    server.set(shard.result(digest), "row")
    millis = int(server.time()[0]) * 1000
    server.zadd(shard.workers, {"": -3, "somebody": millis + LONG_MS})
    bring(servers, keys, now, empty=True)
    assert (server.pttl(jobs), server.xlen(jobs)) == (-1, 1)
    assert server.exists(shard.result(digest))
    server.zadd(shard.workers, {"somebody": millis - 1000})
    bring(servers, keys, now)
    assert 0 < server.pttl(jobs) <= OLD_KEYS_MS
    assert server.xlen(jobs) == 1
    assert not server.exists(shard.result(digest), shard.account)  # nobody will read it
    server.pexpire(jobs, 1000)
    bring(servers, keys, now, empty=True)
    assert server.xlen(jobs) == 0
    assert server.pttl(jobs) <= 1000  # who looks again prolongs nothing
    assert server.zscore(shard.workers, "") == -3


def test_who_has_yet_to_see_that_the_pool_is_back_touches_nothing(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    first, second, third = layouts(1, 2, 1)
    (shard,) = first.shard_keys(keys)
    fill(server, [shard])
    server.xadd(shard.stream().key, {"job": "x"})
    enter(servers, keys, third)
    bring(servers, keys, second, empty=True)  # it is behind
    assert totals(server, [shard]) == {"computed": 10, "failed": 1}
    assert (server.pttl(shard.stream().key), server.xlen(shard.stream().key)) == (-1, 1)


def test_lanes_that_a_shard_has_no_more_end(server: Any, servers: Servers, keys: PoolKeys) -> None:
    before = replace(info_of(1), lanes=4)
    for lanes in (2, 1):
        now = before.moved_to(1, lanes)
        (wide,), (shard,) = now.left_shards(keys), now.shard_keys(keys)
        for stream in wide.streams:
            server.xadd(stream.key, {"job": "x"})
            server.persist(stream.key)
        server.xadd(wide.wake, {"at_once": "1"})
        ended = [s.key for s in wide.streams if s.lane >= lanes] + [wide.wake] * (lanes == 1)
        kept = {*(s.key for s in wide.streams), wide.wake} - set(ended)

        def state(some: Any) -> set[tuple[bool, bool]]:
            return {(server.pttl(key) > 0, server.xlen(key) > 0) for key in some}

        server.hset(shard.bounds, "lanes", 4)  # no worker is there yet
        end_lanes(servers, wide, shard, empty=True)
        assert state([*ended, *kept]) == {(False, True)}
        server.hset(shard.bounds, "lanes", lanes)
        end_lanes(servers, wide, shard)
        assert (state(ended), state(kept)) == ({(True, True)}, {(False, True)})
        end_lanes(servers, wide, shard, empty=True)
        assert (state(ended), state(kept)) == ({(True, False)}, {(False, True)})


# --- adapters ----------------------------------------------------------------------------------


_versions = itertools.count(10**13)


def note(server: Any, shards: Sequence[ShardKeys], **done: str) -> None:
    """Names are registered with these fingerprints, or removed with '', as workers do it."""
    for name, fingerprint in done.items():
        entry = Change(next(_versions), fingerprint.encode(), b"").pack()
        for shard in shards:
            script("enter")(server, [shard.adapters], [REMOVED_MS, 1, name, entry])


def registered(server: Any, shard: ShardKeys) -> dict[bytes, bytes]:
    found = {name: Change.parse(entry) for name, entry in server.hgetall(shard.adapters).items()}
    return {name: change.fingerprint for name, change in found.items() if not change.removed}


def known(server: Any, keys: PoolKeys, info: ModelInfo) -> list[dict[bytes, bytes]]:
    return [registered(server, shard) for shard in info.shard_keys(keys)]


def test_the_registry_comes_along_once_and_then_what_was_changed_there(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    before, now = layouts(1, 2)
    (former,), heirs = before.shard_keys(keys), now.shard_keys(keys)
    note(server, [former], one="1", two="1")
    server.hset(heirs[0].bounds, "layout", "of another time")
    note(server, heirs[:1], gone="0")
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"one": b"1", b"two": b"1"}] * 2
    # What was done here meanwhile stands, whoever comes later with what was there.
    note(server, heirs, one="", two="2")
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"two": b"2"}] * 2
    # What was done there by who had yet to move is done here, too.
    note(server, [former], three="1")
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"two": b"2", b"three": b"1"}] * 2
    note(server, [former], three="")
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"two": b"2"}] * 2


def test_a_pool_that_begins_anew_does_not_take_an_older_registry_for_its_own(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    """As the model info was lost with all workers."""
    wide, narrow = layouts(2, 1)
    for heir in wide.shard_keys(keys):
        server.hset(heir.bounds, "layout", "of another time")
        note(server, [heir], gone="0")
    enter(servers, keys, narrow)
    (former,) = narrow.shard_keys(keys)
    fill(server, [former])
    server.hset(former.bounds, "backlog", 1000)  # somebody serves there
    for names in ({"one": "1"}, {"two": "2"}, {}):
        before, now = layouts(1, 2)
        server.delete(former.adapters)
        note(server, [former], **names)
        enter(servers, keys, before)
        enter(servers, keys, now)
        expected = {name.encode(): entry.encode() for name, entry in names.items()}
        assert known(server, keys, before) == [expected]
        assert known(server, keys, now) == [expected] * 2
        bring(servers, keys, now)
    assert totals(server, now.shard_keys(keys)) == {"computed": 10, "failed": 1}


def test_where_a_worker_comes_from_is_of_no_other_time(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    """Whatever that layout was called: it may have missed more of them than are known."""
    first, *_, now = layouts(2, 1, 2)
    heirs = now.shard_keys(keys)
    for heir in heirs:
        server.hset(heir.bounds, "layout", "one that is not known any more")
        note(server, [heir], one="1")
    enter(servers, keys, now, first.shard_keys(keys))
    assert known(server, keys, now) == [{b"one": b"1"}] * 2


def test_who_joins_as_the_layout_was_left_out_does_not_forget_it(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    """An older release said what is served, and others of its workers live."""
    wide, narrow = layouts(2, 1)
    note(server, [wide.shard_keys(keys)[0]], one="1")
    enter(servers, keys, narrow)
    (shard,) = narrow.shard_keys(keys)
    note(server, [shard], two="2")
    server.zadd(shard.workers, {"somebody": 1000 * int(server.time()[0]) + LONG_MS})
    enter(servers, keys, layouts(1)[0])
    enter(servers, keys, narrow)
    assert known(server, keys, narrow) == [{b"one": b"1", b"two": b"2"}]


def test_it_comes_from_where_the_pool_was_and_not_from_where_nobody_came(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    first, second, third = layouts(1, 2, 1)
    (shard,) = first.shard_keys(keys)
    note(server, [shard], one="1")
    (another, _) = second.shard_keys(keys)
    server.hset(another.bounds, "layout", "of another time")
    note(server, [another], gone="0")
    enter(servers, keys, third)  # nobody saw the second
    assert known(server, keys, third) == [{b"one": b"1"}]
    fourth = third.moved_to(3, 1)
    enter(servers, keys, fourth)
    assert known(server, keys, fourth) == [{b"one": b"1"}] * 3
    # One that was there, and back: what was changed there counts.
    fifth = fourth.moved_to(1, 1)
    note(server, fourth.shard_keys(keys), one="2")
    enter(servers, keys, fifth)
    assert known(server, keys, fifth) == [{b"one": b"2"}]


def test_a_pool_whose_shards_no_command_changed_brings_it_too(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    before, now = info_of(1), info_of(2)  # LMPOOL_REPLACE=1, LMPOOL_SHARDS=2
    (former,), heirs = before.shard_keys(keys), now.shard_keys(keys)
    note(server, [former], one="1")
    note(server, [heirs[0]], two="2")
    enter(servers, keys, now, [former])
    assert known(server, keys, now) == [{b"one": b"1", b"two": b"2"}] * 2


def somebody_lives(server: Any, shards: Sequence[ShardKeys]) -> None:
    for shard in shards:
        server.zadd(shard.workers, {"somebody": 1000 * int(server.time()[0]) + LONG_MS})
        server.hset(shard.bounds, "backlog", 1000)


def test_where_the_name_alone_was_lost_the_registry_stays(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    before, now = layouts(1, 2)
    (former,), heirs = before.shard_keys(keys), now.shard_keys(keys)
    somebody_lives(server, [former])
    note(server, [former], one="1")
    enter(servers, keys, now)
    for heir in heirs:
        note(server, [heir], two="2")
        server.delete(heir.bounds)
    somebody_lives(server, heirs)
    for _ in range(2):
        enter(servers, keys, now)
        assert known(server, keys, now) == [{b"one": b"1", b"two": b"2"}] * 2
    assert {server.hget(heir.bounds, "layout") for heir in heirs} == {now.layout.encode()}
    note(server, [former], three="3")
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"one": b"1", b"two": b"2", b"three": b"3"}] * 2


def test_what_was_registered_before_the_rest_came_stands_beside_it(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    """The shard was away as the pool came into it."""
    before, now = layouts(2, 1)
    (heir,) = now.shard_keys(keys)
    somebody_lives(server, before.shard_keys(keys))
    note(server, before.shard_keys(keys), one="1", two="1")
    somebody_lives(server, [heir])
    note(server, [heir], two="2", three="2")
    for _ in range(2):
        enter(servers, keys, now)
        assert known(server, keys, now) == [{b"one": b"1", b"two": b"2", b"three": b"2"}]


def test_where_the_name_alone_was_lost_what_was_removed_does_not_come_back(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    before, now = layouts(1, 2)
    (former,), heirs = before.shard_keys(keys), now.shard_keys(keys)
    somebody_lives(server, [former])
    note(server, [former], one="1")
    enter(servers, keys, now)
    for heir in heirs:
        note(server, [heir], one="")  # it was the last
        server.delete(heir.bounds)
    somebody_lives(server, heirs)
    for _ in range(2):
        enter(servers, keys, now)
        assert known(server, keys, now) == [{}, {}]
    note(server, [former], two="2")
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"two": b"2"}] * 2


@pytest.mark.parametrize("lays", [1, 3])
def test_where_the_former_shards_are_no_more_nothing_comes_from_them(
    lays: int, server: Any, servers: Servers, keys: PoolKeys
) -> None:
    """A day after a move, or as a server lost everything."""
    *_, before, now = layouts(*range(1, lays + 1), 2)
    former = before.shard_keys(keys)
    somebody_lives(server, former)
    note(server, former, one="1")
    enter(servers, keys, before)
    enter(servers, keys, now)
    for shard in former:
        server.delete(shard.workers)
    bring(servers, keys, now)
    ends = [server.pttl(key) for s in former for key in (s.bounds, s.adapters)]
    assert all(0 < end <= OLD_KEYS_MS for end in ends)
    # Who comes later prolongs nothing.
    keys_that_end = [former[0].bounds, former[0].adapters]
    for key in keys_that_end:
        server.pexpire(key, 600_000)
    enter(servers, keys, now)
    bring(servers, keys, now)
    assert all(0 < server.pttl(key) <= 600_000 for key in keys_that_end)
    for shard in former:
        server.delete(shard.bounds, shard.adapters)
    for _ in range(2):
        enter(servers, keys, now)
        assert known(server, keys, now) == [{b"one": b"1"}] * 2
        bring(servers, keys, now)  # it notes an heir


@pytest.mark.parametrize("lays", [1, 2])
@pytest.mark.parametrize("where", ["former", "now"])
@pytest.mark.parametrize("what", ["adapters", "bounds"])
def test_damage_keeps_nobody_from_coming(
    what: str, where: str, lays: int, server: Any, servers: Servers, keys: PoolKeys
) -> None:
    before = layouts(1)[0]
    now = before.moved_to(2, 1) if lays == 2 else before
    former, heirs = before.shard_keys(keys), now.shard_keys(keys)
    somebody_lives(server, former)
    note(server, [former[0]], one="1")
    enter(servers, keys, now)
    for shard in former if where == "former" else heirs:
        server.delete(getattr(shard, what))
        server.set(getattr(shard, what), "x")
    enter(servers, keys, now)
    damaged = what == "adapters" and lays == 1
    if damaged:
        # It is served: who mends it may know what was there.
        assert server.type(former[0].adapters) == b"string"
        server.delete(former[0].adapters)
    assert known(server, keys, now) == [{} if damaged else {b"one": b"1"}] * now.shards
    for heir in heirs if lays == 2 else ():
        assert server.hget(heir.bounds, "layout") == now.layout.encode()


class Away(Servers):
    """Shards that fail apart: nothing is heard of those that are `away`."""

    def __init__(self, server: Any) -> None:
        super().__init__(lambda: server)
        self.away: set[ShardKeys] = set()

    def apart(self, shards: Any, do: Any, lost: Any = None) -> Any:
        return None if shards[0] in self.away else do(self.for_shard(shards[0]))


def forget(server: Any, shard: ShardKeys) -> None:
    """Its node has lost everything."""
    for key in server.scan_iter(f"{shard.prefix}:*"):
        server.delete(key)


def test_a_shard_that_lost_its_data_has_the_registry_of_the_others(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    """And not that of where the pool lay before: of that some were removed."""
    before, now = layouts(1, 3)
    (former,), heirs = before.shard_keys(keys), now.shard_keys(keys)
    somebody_lives(server, [former])
    note(server, [former], one="1", two="1")
    enter(servers, keys, now)
    somebody_lives(server, heirs)
    for heir in heirs:
        note(server, [heir], one="", three="1")
    forget(server, heirs[0])
    somebody_lives(server, heirs)
    for _ in range(2):
        enter(servers, keys, now)
        assert known(server, keys, now) == [{b"two": b"1", b"three": b"1"}] * 3
    # What is done there by who has yet to move is done here as in the others.
    note(server, [former], two="", four="1")
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"three": b"1", b"four": b"1"}] * 3
    # Also once nothing is known any more of where it came from; one that was damaged has it again.
    server.delete(former.bounds, former.adapters, heirs[0].adapters)
    forget(server, heirs[1])
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"three": b"1", b"four": b"1"}] * 3


def test_what_was_changed_where_the_pool_came_back_to_stands_once_the_others_are_back(
    server: Any, keys: PoolKeys
) -> None:
    """They were away as it came back: nobody could say what was changed there."""
    first, there, now = layouts(2, 1, 2)
    servers, shards, others = Away(server), first.shard_keys(keys), there.shard_keys(keys)
    somebody_lives(server, shards)
    note(server, shards, one="1", before="1")
    enter(servers, keys, there)
    somebody_lives(server, others)
    for shard in shards:
        carry_over(servers, shard, there, others)
    note(server, others, three="1", before="")
    servers.away.update(others)
    enter(servers, keys, now)
    assert {server.hget(shard.bounds, "layout") for shard in shards} == {now.layout.encode()}
    for shard in shards:
        note(server, [shard], one="", two="1")
    servers.away.clear()
    for _ in range(2):
        enter(servers, keys, now)
        assert known(server, keys, now) == [{b"two": b"1", b"three": b"1"}] * 2


def test_a_damaged_registry_that_no_other_shard_has_is_what_was_brought(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    before, now = layouts(2, 1)
    former, (heir,) = before.shard_keys(keys), now.shard_keys(keys)
    somebody_lives(server, [*former, heir])
    note(server, former, one="1")
    enter(servers, keys, now)
    server.set(heir.adapters, "damaged")
    assert heir.adapters in mend(servers, [heir], now, Homes([heir], "me"), set())
    for _ in range(2):
        enter(servers, keys, now)
        assert known(server, keys, now) == [{b"one": b"1"}]


@pytest.mark.parametrize("first", [1, 2])
def test_a_shard_that_was_away_as_the_pool_came_back_forgets_what_was_there(
    first: int, server: Any, keys: PoolKeys
) -> None:
    """It may have no layout's name, as one that has lost it, and somebody beats there by then."""
    *_, before, there, now = layouts(*([1, 2, 3, 2] if first == 2 else [2, 3, 2]))
    servers, heirs = Away(server), before.shard_keys(keys)
    somebody_lives(server, heirs)
    enter(servers, keys, before)
    for heir in heirs:
        note(server, [heir], one="1", two="1")
    servers.away.add(heirs[1])
    enter(servers, keys, there)
    carry_over(servers, heirs[0], there, there.shard_keys(keys))
    somebody_lives(server, there.shard_keys(keys))
    note(server, there.shard_keys(keys), one="")
    enter(servers, keys, now)
    servers.away.clear()
    somebody_lives(server, heirs)
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"two": b"1"}] * 2
    assert {server.hget(heir.bounds, "layout") for heir in heirs} == {now.layout.encode()}


def test_shards_without_a_layout_have_the_registry_of_one_that_has_adapters(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    (info,) = layouts(3)
    heirs = info.shard_keys(keys)
    somebody_lives(server, heirs)
    note(server, [heirs[2]], one="1")
    enter(servers, keys, info)
    assert known(server, keys, info) == [{b"one": b"1"}] * 3


def test_who_has_yet_to_see_that_the_pool_lies_elsewhere_calls_no_shard_by_the_former_name(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    first, second, third = layouts(1, 2, 1)
    (shard,) = first.shard_keys(keys)
    note(server, [shard], one="1")
    server.set(keys.info, third.pack())
    enter(servers, keys, third)
    note(server, [shard], two="1")
    for behind in (first, second):
        enter(servers, keys, behind)
    assert server.hget(shard.bounds, "layout") == third.layout.encode()
    assert not any(server.exists(s.bounds, s.adapters) for s in second.shard_keys(keys))
    enter(servers, keys, third)
    assert known(server, keys, third) == [{b"one": b"1", b"two": b"1"}]


def test_what_is_changed_two_layouts_behind_comes_along_the_newest_of_each_name(
    server: Any, servers: Servers, keys: PoolKeys
) -> None:
    """Whoever served those between has died."""
    first, second, third = layouts(1, 2, 3)
    (shard,) = first.shard_keys(keys)
    note(server, [shard], one="1", two="1", three="1")
    for info in (second, third):
        enter(servers, keys, info)
    note(server, [shard], one="", four="1")  # by who has seen neither
    note(server, third.shard_keys(keys), two="")
    enter(servers, keys, third, [shard])
    assert known(server, keys, third) == [{b"three": b"1", b"four": b"1"}] * 3


def test_what_is_changed_while_a_shard_is_brought_the_registry_stands(
    server: Any, keys: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has just come back, and was written to as the others were."""
    before, now = layouts(1, 2)
    servers, heirs = Away(server), now.shard_keys(keys)
    note(server, before.shard_keys(keys), one="1", two="1")
    servers.away.add(heirs[1])
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"one": b"1", b"two": b"1"}, {}]
    servers.away.clear()
    give = carrying._enter

    def change_first(*arguments: Any) -> bool:
        note(server, heirs, one="", two="2", three="1")
        return give(*arguments)

    monkeypatch.setattr(carrying, "_enter", change_first)
    enter(servers, keys, now)
    assert known(server, keys, now) == [{b"two": b"2", b"three": b"1"}] * 2


def test_removals_are_forgotten_after_a_day(server: Any, servers: Servers, keys: PoolKeys) -> None:
    (shard,) = info_of(1).shard_keys(keys)
    now = 1000 * int(server.time()[0])
    for name, age in (("old", REMOVED_MS + 60_000), ("new", 60_000)):
        entry = Change(now - age, b"", b"").pack()
        script("enter")(server, [shard.adapters], [REMOVED_MS, 1, name, entry])
    assert server.hkeys(shard.adapters) == [b"new"]
    # Where nothing else is known, with all that is; not once there is an adapter.
    assert 0 < server.pttl(shard.adapters) <= REMOVED_MS
    note(server, [shard], one="1")
    assert server.pttl(shard.adapters) == -1
    note(server, [shard], one="")
    assert server.pttl(shard.adapters) > 0


@pytest.mark.parametrize("entry", [b"", b"1", b"1\n", b"1\n/a", b"1\n/a\n2", b"1\n-2\n/a", b"\n\n"])
def test_entries_that_no_worker_wrote_are_older_than_all(
    entry: bytes, server: Any, servers: Servers, keys: PoolKeys
) -> None:
    (info,) = layouts(2)
    shards = info.shard_keys(keys)
    change = Change.parse(entry)
    assert (change.version, change.removed) == (0, False)
    note(server, shards[:1], one="2")
    server.hset(shards[1].adapters, "one", entry)
    enter(servers, keys, info)
    assert known(server, keys, info) == [{b"one": b"2"}] * 2


def test_shards_of_the_same_keys_are_the_same(keys: PoolKeys) -> None:
    with_lanes = keys.shards("01234567", 2, 64)
    assert without(keys.shards("01234567", 2), with_lanes) == []
    three = keys.shards("01234567", 3)
    assert without(three, with_lanes) == list(three)
