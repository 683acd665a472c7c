"""Slots of a Redis Cluster, and names that spread evenly over them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from lmpool.keys import PoolKeys
from lmpool.slots import NEAR, SLOTS, slot_of


@given(st.text(st.sampled_from("ab{}é:."), max_size=12))
def test_slots_are_the_servers(key: str) -> None:
    assert slot_of(key) == key_slot(key.encode())


@pytest.mark.parametrize("count", [2, 3, 6, 12, 32, 64])
def test_shards_lie_evenly_spread(count: int) -> None:
    for name in range(20):
        shards = PoolKeys(f"pool-{name}").shards("01234567", count)
        for number, shard in enumerate(shards):
            assert abs(shard.slot - (2 * number + 1) * SLOTS / (2 * count)) <= NEAR + 1
            assert shard.number == number
            assert {slot_of(key) for key in (shard.dead, shard.reply("me"), shard.streams[-1].key)}
            assert slot_of(shard.result(b"0" * 16)) == shard.slot


@pytest.mark.parametrize(("primaries", "count"), [(3, 6), (5, 10), (8, 16), (3, 12)])
def test_every_primary_has_as_many(primaries: int, count: int) -> None:
    for name in range(50):
        held = [0] * primaries
        for shard in PoolKeys(f"pool-{name}").shards("01234567", count):
            held[shard.slot * primaries // SLOTS] += 1
        assert max(held) - min(held) <= 2 - (count % primaries == 0), held


def test_a_single_shard_is_called_as_ever() -> None:
    (shard,) = PoolKeys("p").shards("01234567", 1)
    assert "." not in shard.prefix
