from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from lmpool.errors import SettingsError
from lmpool.keys import GROUP, LaneKeys, PoolKeys, check_pool_name, lane_of

FINGERPRINT8 = "0123abcd"
DIGEST = "ab" * 16


def every_key(lane: LaneKeys) -> list[str]:
    return [
        lane.jobs,
        lane.dead,
        lane.counters,
        lane.adapters,
        lane.result(DIGEST),
        lane.flight(DIGEST),
        lane.reply("client"),
        lane.alive("consumer"),
    ]


def test_names_are_those_of_the_design() -> None:
    keys = PoolKeys("llama")
    lane = keys.lane(FINGERPRINT8, 3)
    prefix = "{lmpool:llama:0123abcd:3}"
    assert keys.info == "lmpool:llama"
    assert lane.prefix == prefix
    assert lane.jobs == f"{prefix}:jobs"
    assert lane.dead == f"{prefix}:dead"
    assert lane.result(DIGEST) == f"{prefix}:result:{DIGEST}"
    assert lane.flight(DIGEST) == f"{prefix}:flight:{DIGEST}"
    assert lane.reply("c") == f"{prefix}:reply:c"
    assert lane.alive("w") == f"{prefix}:alive:w"
    assert GROUP == "workers"


@given(
    pool=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    lane=st.integers(0, 63),
)
def test_all_keys_of_a_lane_are_in_one_cluster_slot(pool: str, lane: int) -> None:
    keys = every_key(PoolKeys(pool).lane(FINGERPRINT8, lane))
    assert len(set(keys)) == len(keys)
    assert len({key_slot(key.encode()) for key in keys}) == 1


def test_no_two_pools_lanes_or_fingerprints_share_a_key() -> None:
    seen: set[str] = set()
    for pool in ("a", "a.0", "a-0", "a_0", "A"):
        keys = PoolKeys(pool)
        assert keys.info not in seen
        seen.add(keys.info)
        for fingerprint8 in ("00000000", "00000001"):
            for key in (keys.vocabulary(fingerprint8), keys.control_queue(f"w-{fingerprint8}")):
                assert key not in seen
                seen.add(key)
            for lane in keys.lanes(fingerprint8, 3):
                for key in every_key(lane):
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


@given(digest=st.binary(min_size=16, max_size=16), lanes=st.integers(1, 64))
def test_every_digest_has_one_of_the_lanes(digest: bytes, lanes: int) -> None:
    assert 0 <= lane_of(digest, lanes) < lanes
    assert lane_of(digest, 1) == 0


def test_digests_are_spread_over_the_lanes() -> None:
    counts = [0] * 4
    for i in range(2000):
        counts[lane_of(hashlib.blake2b(bytes(i), digest_size=16).digest(), 4)] += 1
    assert min(counts) > 400, counts


def test_lanes_are_numbered() -> None:
    lanes = PoolKeys("p").lanes(FINGERPRINT8, 3)
    assert [re.search(r":(\d)}", lane.prefix)[1] for lane in lanes] == ["0", "1", "2"]  # type: ignore[index]
