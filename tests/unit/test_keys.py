from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from lmpool.errors import SettingsError
from lmpool.keys import GROUP, PoolKeys, ShardKeys, check_pool_name, shard_of

FINGERPRINT8 = "0123abcd"
DIGEST = "ab" * 16


def every_key(shard: ShardKeys) -> list[str]:
    return [
        shard.stream().key,
        shard.dead,
        shard.counters,
        shard.adapters,
        shard.result(DIGEST),
        shard.flight(DIGEST),
        shard.reply("client"),
        shard.alive("consumer"),
    ]


def test_names_are_those_of_the_design() -> None:
    keys = PoolKeys("llama")
    shard = keys.shard(FINGERPRINT8, 3)
    prefix = "{lmpool:llama:0123abcd:3}"
    assert keys.info == "lmpool:llama"
    assert shard.prefix == prefix
    assert shard.stream().key == f"{prefix}:jobs"
    assert shard.dead == f"{prefix}:dead"
    assert shard.result(DIGEST) == f"{prefix}:result:{DIGEST}"
    assert shard.flight(DIGEST) == f"{prefix}:flight:{DIGEST}"
    assert shard.reply("c") == f"{prefix}:reply:c"
    assert shard.alive("w") == f"{prefix}:alive:w"
    assert GROUP == "workers"


@given(
    pool=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    shard=st.integers(0, 63),
)
def test_all_keys_of_a_shard_are_in_one_cluster_slot(pool: str, shard: int) -> None:
    keys = every_key(PoolKeys(pool).shard(FINGERPRINT8, shard))
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


@given(digest=st.binary(min_size=16, max_size=16), shards=st.integers(1, 64))
def test_every_digest_has_one_of_the_shards(digest: bytes, shards: int) -> None:
    assert 0 <= shard_of(digest, shards) < shards
    assert shard_of(digest, 1) == 0


def test_digests_are_spread_over_the_shards() -> None:
    counts = [0] * 4
    for i in range(2000):
        counts[shard_of(hashlib.blake2b(bytes(i), digest_size=16).digest(), 4)] += 1
    assert min(counts) > 400, counts


def test_shards_are_numbered() -> None:
    shards = PoolKeys("p").shards(FINGERPRINT8, 3)
    assert [re.search(r":(\d)}", shard.prefix)[1] for shard in shards] == ["0", "1", "2"]  # type: ignore[index]
