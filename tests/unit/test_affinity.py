from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.affinity import (
    LEAST_PATIENCE,
    MOST_PATIENCE,
    Placement,
    Rendezvous,
    Waiting,
    homes,
    lanes_in_use,
    most_homes,
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


def some_names(rng: np.random.Generator, count: int) -> list[str]:
    return [f"host-{n}" for n in rng.choice(1_000_000, count, replace=False)]


def home_names(workers: Sequence[str], lanes: int, shard: int = 0) -> list[str]:
    return [workers[int(n)] for n in homes(workers, shard, lanes)]


def unbounded(workers: Sequence[str], lanes: int) -> list[str]:
    """Homes by rendezvous hashing alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmpool.affinity.HOME_MOST", 1e9)
        return home_names(workers, lanes)


@given(
    workers=st.lists(st.text(max_size=20), min_size=1, max_size=40, unique=True),
    shard=st.integers(0, 63),
    lanes=st.integers(1, 1024),
)
def test_no_worker_is_the_home_of_far_more_lanes_than_the_mean(
    workers: list[str], shard: int, lanes: int
) -> None:
    found = homes(workers, shard, lanes)
    assert len(found) == lanes
    used = lanes_in_use(len(workers), lanes)
    for part in (found[:used], found[used:]):
        assert np.bincount(part).max(initial=0) <= math.ceil(17 / 16 * len(part) / len(workers))


@pytest.mark.parametrize(("workers", "most"), [(3, 23), (4, 17), (64, 17), (1000, 2), (5000, 1)])
def test_workers_are_the_home_of_a_sixteenth_more_lanes_than_the_mean_at_most(
    workers: int, most: int
) -> None:
    lanes = lanes_in_use(workers, 1024)
    assert most_homes(workers, lanes) == most
    assert np.bincount(homes(names(workers), 5, 1024)[:lanes]).max() == most
    assert Counter(unbounded(names(workers), lanes)).most_common(1)[0][1] > most


def test_only_who_is_full_turns_lanes_away() -> None:
    rng = np.random.default_rng(1)
    for count in range(2, 64):
        workers, lanes = some_names(rng, count), lanes_in_use(count, 1024)
        found, dearest = home_names(workers, lanes), unbounded(workers, lanes)
        full = {w for w, n in Counter(found).items() if n == most_homes(count, lanes)}
        away = {dear for home, dear in zip(found, dearest, strict=True) if home != dear}
        assert away <= full
        assert sum(map(str.__ne__, found, dearest)) < 0.15 * lanes


def test_workers_that_come_and_go_move_little_more_than_their_share() -> None:
    rng = np.random.default_rng(2)
    bounded, plain = [], []
    for count in range(2, 63):
        workers, lanes = some_names(rng, count + 1), lanes_in_use(count + 1, 1024)
        fewer = workers[:-1]
        for shares, find in ((bounded, home_names), (plain, unbounded)):
            before, after = find(fewer, lanes), find(workers, lanes)
            moved = sum(map(str.__ne__, before, after))
            shares.append(moved * (count + 1) / lanes)
            if find is unbounded:
                assert moved == after.count(workers[-1])
    assert np.mean(plain) == pytest.approx(1.0, abs=0.1)
    assert np.mean(bounded) < 1.7
    assert max(bounded) < 3.5


def test_where_lists_of_workers_differ_most_lanes_have_one_home_all_the_same() -> None:
    workers = names(20)
    lanes = lanes_in_use(19, 1024)
    # Half of the workers do not know the last one yet.
    claimed = Counter(
        lane
        for n, worker in enumerate(workers)
        for lane in own_lanes(worker, workers[: 19 + n % 2], 0, lanes)
    )
    assert sum(claimed[lane] != 1 for lane in range(lanes)) < 2.5 * lanes / 20


def by_all_hashes(workers: Sequence[str], shard: int, lanes: int) -> list[int]:
    """Homes by the same rule, one lane after another, of nothing but the hashes of all pairs."""

    def mixed(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in workers]
    words = [int.from_bytes(digest, "little") for digest in digests]
    found: list[int] = []
    used = lanes_in_use(len(workers), lanes)
    for part in (range(used), range(used, lanes)):
        hashes = {n: [mixed(mixed(n + (shard << 16)) ^ word) for word in words] for n in part}
        asks = {n: sorted(range(len(words)), key=hashes[n].__getitem__) for n in part}
        has: dict[int, list[int]] = {worker: [] for worker in range(len(words))}
        left = list(part)
        while left:
            lane = left.pop()
            worker = asks[lane].pop()
            has[worker].append(lane)
            if len(has[worker]) > most_homes(len(workers), len(part)):
                left.append(min(has[worker], key=lambda n: hashes[n][worker]))
                has[worker].remove(left[-1])
        at = {lane: worker for worker, its in has.items() for lane in its}
        found += [at[lane] for lane in part]
    return found


@pytest.mark.parametrize(("most", "lanes"), [(6, 40), (24, 64), (40, 12), (40, 200), (90, 64)])
def test_homes_of_workers_that_come_and_go_are_those_of_who_are_there(
    most: int, lanes: int
) -> None:
    """Whatever is remembered of others."""
    rng = np.random.default_rng(most * lanes)
    meet, workers = Rendezvous(5, lanes), some_names(rng, most)
    for step in range(30):
        found = meet.among(workers)
        assert found.tolist() == by_all_hashes(workers, 5, lanes)
        # One or some go, one or some come; at times many, in any order.
        many = 1 + int(rng.integers(3 if step % 10 else most))
        stay = list(rng.permutation(workers))[int(rng.integers(many + 1)) :]
        workers = [*map(str, stay), *some_names(rng, int(rng.integers(many + 1)))]
        workers = workers[: most + 4] or names(1)
        if step % 3:
            workers.sort()


def test_shards_have_homes_of_their_own() -> None:
    assert (homes(names(8), 0, 64) != homes(names(8), 1, 64)).mean() > 0.7


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
