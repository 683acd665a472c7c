from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from lmpool.errors import SettingsError
from lmpool.keys import (
    GROUP,
    PRIORITIES,
    PROTOCOL,
    PoolKeys,
    ShardKeys,
    check_pool_name,
    streams,
)

FINGERPRINT8 = "0123abcd"
DIGEST = b"\xab" * 16


def every_key(shard: ShardKeys) -> list[str]:
    return [
        *(stream.key for stream in shard.streams),
        shard.dead,
        shard.counters,
        shard.account,
        shard.held,
        shard.waiting,
        shard.wake,
        shard.workers,
        shard.adapters,
        shard.result(DIGEST),
        shard.flight(DIGEST),
        shard.reply("client"),
        shard.alive("consumer"),
    ]


def test_names_are_those_of_the_design() -> None:
    keys = PoolKeys("llama")
    shard = keys.shard(FINGERPRINT8, 3)
    assert PROTOCOL == 5
    prefix = "{lmpool:llama:0123abcd:5:3}"
    assert keys.info == "lmpool:llama"
    assert shard.prefix == prefix
    assert shard.stream().key == f"{prefix}:jobs:0"
    assert shard.stream("batch").key == f"{prefix}:batch:0"
    assert shard.dead == f"{prefix}:dead"
    assert shard.result(DIGEST) == f"{prefix}:result:{'ab' * 16}"
    assert shard.flight(DIGEST) == f"{prefix}:flight:{'ab' * 16}"
    assert shard.reply("c") == f"{prefix}:reply:c"
    assert shard.alive("w") == f"{prefix}:alive:w"
    assert GROUP == "workers"


@given(
    pool=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    shard=st.integers(0, 63),
    lanes=st.integers(1, 5),
)
def test_all_keys_of_a_shard_are_in_one_cluster_slot(pool: str, shard: int, lanes: int) -> None:
    keys = every_key(PoolKeys(pool).shard(FINGERPRINT8, shard, lanes))
    assert len(keys) == 2 * lanes + 12
    assert len(set(keys)) == len(keys)
    assert len({key_slot(key.encode()) for key in keys}) == 1


def test_no_two_pools_shards_or_fingerprints_share_a_key() -> None:
    seen: set[str] = set()
    for pool in ("a", "a.0", "a-0", "a_0", "A"):
        keys = PoolKeys(pool)
        assert keys.info not in seen
        seen.add(keys.info)
        for fingerprint8 in ("00000000", "00000001"):
            for key in (keys.vocabulary(fingerprint8), keys.control_queue(f"w-{fingerprint8}")):
                assert key not in seen
                seen.add(key)
            for shard in keys.shards(fingerprint8, 3):
                for key in every_key(shard):
                    assert key not in seen
                    seen.add(key)


@pytest.mark.parametrize("name", ["a", "9", "my-pool_2.x", "A" * 64])
def test_pool_names(name: str) -> None:
    assert check_pool_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "_a", "a b", "a:b", "a{b", "a}", "a\n", "ä", "A" * 65, None, 3, b"a"]
)
def test_what_cannot_be_part_of_a_key_is_no_pool_name(name: object) -> None:
    with pytest.raises(SettingsError, match=r"is no pool name: write 1 to 64") as refused:
        check_pool_name(name)  # type: ignore[arg-type]
    assert repr(name) in str(refused.value)
    with pytest.raises(SettingsError):
        PoolKeys(name)  # type: ignore[arg-type]


def test_every_lane_of_a_shard_has_a_stream_for_each_priority() -> None:
    shard = PoolKeys("p").shard(FINGERPRINT8, 1, lanes=3)
    assert [(s.priority, s.lane) for s in shard.streams] == [
        (priority, lane) for lane in range(3) for priority in ("interactive", "batch")
    ]
    for stream in shard.streams:
        assert shard.stream(stream.priority, stream.lane) is stream
        assert stream.shard is shard
    names = [stream.key.removeprefix(shard.prefix) for stream in shard.streams]
    assert names == [":jobs:0", ":batch:0", ":jobs:1", ":batch:1", ":jobs:2", ":batch:2"]
    assert shard.stream() is shard.stream("interactive", 0)


def test_the_streams_of_several_shards_are_all_of_theirs() -> None:
    shards = PoolKeys("p").shards(FINGERPRINT8, 2, lanes=2)
    found = streams(shards)
    assert len(found) == 8
    assert [(s.shard.number, s.lane, s.priority) for s in found] == sorted(
        ((n, lane, p) for n in range(2) for lane in range(2) for p in PRIORITIES),
        key=lambda place: (place[0], place[1], PRIORITIES.index(place[2])),
    )
    assert streams([]) == ()


def test_shards_are_numbered() -> None:
    shards = PoolKeys("p").shards(FINGERPRINT8, 3)
    assert [re.search(r":(\d)[.]\d+}", shard.prefix)[1] for shard in shards] == ["0", "1", "2"]  # type: ignore[index]
    assert [shard.number for shard in shards] == [0, 1, 2]
