from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.affinity import (
    LEAST_PATIENCE,
    MOST_PATIENCE,
    Placement,
    Waiting,
    homes,
    lanes_in_use,
    own_lanes,
    patience,
    steals,
    usual_lanes,
)

TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)
PLACES = [(6, 14), (5, 57), (3, 31), (0, 22), (7, 57), (1, 30), (7, 25), (0, 53)]
LONG_PLACE = (6, 60)
ADAPTERS = st.none() | st.text(min_size=1, max_size=10)


def packed(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


# --- places --------------------------------------------------------------------------------------


@given(tokens=TOKENS, adapter=ADAPTERS, shards=st.sampled_from([1, 3, 64]), lanes=st.integers(1, 9))
def test_every_prompt_has_a_place(
    tokens: list[int], adapter: str | None, shards: int, lanes: int
) -> None:
    shard, lane = Placement(shards, lanes).of(packed(*tokens), adapter)
    assert 0 <= shard < shards
    assert 0 <= lane < lanes
    assert Placement(1, 1).of(packed(*tokens), adapter) == (0, 0)


def test_a_prompt_has_the_same_place_in_every_release() -> None:
    # Two clients that disagree compute a prompt twice.
    place = Placement(8, 64, 16, 16)
    found = [place.of(packed(i), adapter) for i in range(4) for adapter in (None, "a@1")]
    assert found == PLACES
    assert place.of(packed(*range(300)), None) == LONG_PLACE


@pytest.mark.parametrize("adapter", [None, "a@77"])
@pytest.mark.parametrize(("shards", "lanes"), [(1, 64), (4, 16), (64, 1), (3, 7)])
def test_prompts_are_spread(adapter: str | None, shards: int, lanes: int) -> None:
    place, count = Placement(shards, lanes), 300
    found = Counter(place.of(packed(i), adapter) for i in range(count * shards * lanes))
    assert len(found) == shards * lanes
    assert min(found.values()) > 0.6 * count
    assert max(found.values()) < 1.4 * count


def test_prompts_of_adapters_are_spread_as_well() -> None:
    # One prompt under many adapters: not all in its own lane.
    assert len({Placement(4, 4).of(packed(7), f"a@{i}") for i in range(100)}) > 14


@pytest.mark.parametrize("which", ["shards", "lanes"])
def test_another_number_moves_as_few_as_can_be(which: str) -> None:
    prompts = [packed(i) for i in range(4000)]
    before, after = Placement(**{which: 8}), Placement(**{which: 9})
    moved = [after.of(p, None) for p in prompts if after.of(p, None) != before.of(p, None)]
    assert len(moved) / len(prompts) == pytest.approx(1 / 9, abs=0.03)
    assert set(moved) == {(8, 0) if which == "shards" else (0, 8)}


def test_the_first_blocks_decide() -> None:
    place = Placement(1, 1024, block_tokens=4, blocks=8)
    tokens = list(range(100, 140))
    lengths = [len(place.prefix(packed(*tokens[:n]))) // 4 for n in range(1, 41)]
    # Shorter than a block: all of it. Then 1, 2, 4 and 8 blocks.
    assert lengths == [1, 2, 3, *[4] * 4, *[8] * 8, *[16] * 16, *[32] * 9]
    assert len({place.of(packed(*tokens[:32], i), None) for i in range(50)}) == 1
    assert len({place.of(packed(*tokens[:31], i), None) for i in range(50)}) > 40


def test_blocks_that_are_no_power_of_two() -> None:
    place = Placement(1, 1024, block_tokens=1, blocks=6)
    lengths = [len(place.prefix(packed(*range(n)))) // 4 for n in range(1, 10)]
    assert lengths == [1, 2, 2, 4, 4, 6, 6, 6, 6]


# --- homes ---------------------------------------------------------------------------------------


def names(count: int) -> list[str]:
    return [f"host-{n}-gpu{n % 8}" for n in range(count)]


def test_lanes_are_spread_over_the_workers() -> None:
    found = np.bincount(homes(names(64), 3, 1024), minlength=64)
    assert found.sum() == 1024
    assert found.min() > 4
    assert found.max() < 34


def test_shards_have_homes_of_their_own() -> None:
    assert (homes(names(8), 0, 64) != homes(names(8), 1, 64)).mean() > 0.7


@given(count=st.integers(1, 12), who=st.integers(0, 11))
def test_a_worker_that_leaves_or_joins_moves_its_share_and_no_other(count: int, who: int) -> None:
    workers = names(count + 1)
    gone = workers[who % len(workers)]
    left = [worker for worker in workers if worker != gone]
    before = [workers[n] for n in homes(workers, 0, 256)]
    after = [left[n] for n in homes(left, 0, 256)]
    assert all(b == a for b, a in zip(before, after, strict=True) if b != gone)


def test_own_lanes_are_a_partition_whatever_the_order() -> None:
    workers = names(5)
    found = [own_lanes(worker, reversed(workers), 0, 64) for worker in workers]
    assert sorted(lane for own in found for lane in own) == list(range(64))
    # It is a worker itself, also where nobody has heard of it.
    assert own_lanes("alone", [], 0, 3) == (0, 1, 2)
    assert own_lanes("new", workers, 0, 64) == own_lanes("new", [*workers, "new"], 0, 64) != ()


def test_the_only_lane_is_everybodys() -> None:
    assert all(own_lanes(worker, names(5), 0, 1) == (0,) for worker in names(5))


def test_lanes_in_use_follow_the_workers() -> None:
    assert [lanes_in_use(n, 1024) for n in (0, 1, 2, 3, 4, 5, 8, 64, 900)] == [
        *(1, 1, 32, 64, 64, 128, 128, 1024, 1024)
    ]
    assert [lanes_in_use(n, 6) for n in (1, 2, 8)] == [1, 6, 6]


# --- what is anyone's ----------------------------------------------------------------------------


def test_patience_is_what_the_prompt_takes_within_bounds() -> None:
    assert patience(500, 0.0001) == pytest.approx(0.05)
    assert patience(0, 0) == patience(2, 0.0001) == LEAST_PATIENCE
    assert patience(100_000, 0.01) == MOST_PATIENCE


def test_half_of_the_longest_lanes_is_taken() -> None:
    short, long, young = Waiting(1, 0.9, 3), Waiting(2, 0.5, 10), Waiting(3, 0.01, 50)
    assert steals([short, long, young], 100, 0.1) == [(long, 5), (short, 2)]
    assert steals([short, long, young], 6, 0.1) == [(long, 5), (short, 1)]
    assert steals([short, long, young], 4, 0.1) == [(long, 4)]
    assert steals([short, long, young], 0, 0.1) == []
    assert steals([young], 100, 0.1) == []
    assert steals([Waiting(4, 1.0, 1)], 100, 0.1) == [(Waiting(4, 1.0, 1), 1)]


@given(
    lanes=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 100)), max_size=20),
    room=st.integers(0, 100),
)
def test_no_more_is_taken_than_there_is_room(lanes: list[tuple[float, int]], room: int) -> None:
    waiting = [Waiting(n, since, jobs) for n, (since, jobs) in enumerate(lanes)]
    taken = steals(waiting, room, 0.5)
    assert sum(count for _, count in taken) <= room
    assert all(1 <= count <= lane.jobs and lane.since >= 0.5 for lane, count in taken)
    ripe = [lane for lane in waiting if lane.since >= 0.5]
    assert bool(taken) == bool(ripe and room)


@pytest.mark.parametrize(
    ("shards", "lanes"), [(1, 64), (6, 64), (16, 64), (17, 60), (62, 16), (64, 16), (5000, 1)]
)
def test_lanes_where_nobody_says_how_many(shards: int, lanes: int) -> None:
    assert usual_lanes(shards) == lanes
