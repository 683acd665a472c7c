"""Where prompts with a common prefix meet: lanes, their homes, and what others may take of them.

Pure functions, used by clients, by workers and by the simulation of thousands of them
(`tests.simulation`).

A prompt belongs to a lane by its adapter and its first blocks of tokens. A lane has a home among
the living workers: the one whose hash with the lane is the highest (rendezvous hashing, Thaler and
Ravishankar 1998) of those that are not full (a bound on loads: Mirrokni, Thorup and Zadimoghaddam
2018). So a worker that joins or leaves moves little more than its own share of lanes, and none is
the home of far more prefixes than the others, which it could not keep.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

# Imported where it is used: settings and commands know of places, and start quickly.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TOKEN_BYTES: Final = 4
BLOCK_TOKENS: Final = 16
"""Tokens of a block, by default."""
BLOCKS: Final = 16
"""Blocks that a prompt is known by, at most, by default."""
PLACES: Final = 1 << 16
"""Hashes of prompts are told apart up to so many; each has its shard and its lane in a table."""

LEAST_PATIENCE: Final = 0.005
"""Seconds for which a waiting job is its home's alone, at least: less than that it waits anyway
where its home is at work."""
MOST_PATIENCE: Final = 0.25
"""And at most: so long a prompt of a home that died waits for another worker."""

LANES_PER_WORKER: Final = 16
"""So many lanes are in use for each worker, and up to twice as many: few enough to be read
together, enough for shares that differ little."""

HOME_MOST: Final = 17 / 16
"""A worker is the home of so many times the mean of lanes, rounded up, and of no more: prompts are
spread over the lanes by chance as it is. Less would move more lanes when workers come and go."""

LANES_MOST: Final = 1024
"""Lanes that a pool has, in all, where nobody says how many."""

ASKED_TOGETHER: Final = 1 << 15
"""Hashes of lanes with workers that are looked at together."""

KNOWN_FIRST: Final = 8
"""So many workers that a lane asks first are remembered while others come and go."""

Words: TypeAlias = "npt.NDArray[np.uint64]"


@dataclass(frozen=True)
class Placement:
    """Shard and lane of every prompt, for a pool's numbers of them.

    A prompt is known by its first 1, 2, 4, 8, ... blocks of `block_tokens` tokens, the most that it
    has up to `blocks`; one that is shorter than a block by all its tokens. So a prompt that grows
    token by token moves a few times in its life and not at every block, and what many prompts begin
    with, as a chat template, does not make one lane of them all.
    """

    shards: int = 1
    lanes: int = 1
    block_tokens: int = BLOCK_TOKENS
    blocks: int = BLOCKS

    @cached_property
    def _block_bytes(self) -> int:
        return TOKEN_BYTES * self.block_tokens

    @cached_property
    def _shard_table(self) -> array[int]:
        return _table(self.shards)

    @cached_property
    def _lane_table(self) -> array[int]:
        return _table(self.lanes)

    @cached_property
    def is_one(self) -> bool:
        """Whether there is one place for all."""
        return self.shards == self.lanes == 1

    def prefix(self, tokens: bytes) -> bytes:
        """The part of a prompt that decides, of its ids as little-endian uint32 bytes."""
        size = self._block_bytes
        blocks = len(tokens) // size
        if blocks >= self.blocks:
            return tokens[: size * self.blocks]
        return tokens[: size << (blocks.bit_length() - 1)] if blocks else tokens

    def of(self, tokens: bytes, adapter: str | None) -> tuple[int, int]:
        """The shard and the lane of a prompt, whatever is wanted of it.

        `tokens` are its ids as little-endian uint32 bytes, `adapter` is ``name@fingerprint``.
        """
        if self.is_one:
            return 0, 0
        start = 0 if adapter is None else zlib.crc32(adapter.encode())
        found = zlib.crc32(self.prefix(tokens), start)
        return self._shard_table[found >> 16], self._lane_table[found & 0xFFFF]


@cache
def _table(buckets: int) -> array[int]:
    """The bucket of each of `PLACES` hashes: another number of buckets moves as few as can be.

    Jump consistent hashing (Lamping and Veach 2014), of all of them at once.
    """
    import numpy as np

    key = _mixed(np.arange(PLACES, dtype=np.uint64))
    bucket, jump = np.zeros(PLACES, np.int64), np.zeros(PLACES, np.int64)
    while (left := np.flatnonzero(jump < buckets)).size:
        bucket[left] = jump[left]
        key[left] = key[left] * np.uint64(2862933555777941757) + np.uint64(1)
        steps = float(1 << 31) / ((key[left] >> np.uint64(33)).astype(np.float64) + 1.0)
        jump[left] = ((bucket[left] + 1) * steps).astype(np.int64)
    return array("H", bucket.astype(np.uint16).tobytes())


def _mixed(words: Words) -> Words:
    """Each word's hash: the finalizer of splitmix64."""
    import numpy as np

    words = words + np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


@lru_cache(maxsize=1 << 14)
def _word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def homes(workers: Sequence[str], shard: int, lanes: int) -> npt.NDArray[np.intp]:
    """The home of each lane of a shard: intp [lanes], places in `workers`; there must be one."""
    return Rendezvous(shard, lanes).among(workers)


def most_homes(workers: int, lanes: int) -> int:
    """How many of so many lanes one of so many workers is the home of, at most."""
    return math.ceil(HOME_MOST * lanes / workers)


class Rendezvous:
    """The homes of a shard's lanes, among workers that come and go.

    The workers that each lane asks first are known from before: of one that comes no more than its
    own hashes are computed, and those of all for lanes whom none of these takes.
    """

    def __init__(self, shard: int, lanes: int) -> None:
        import numpy as np

        self._places = _mixed(np.arange(lanes, dtype=np.uint64) + np.uint64(shard << 16))
        self._workers: Sequence[str] = ()
        self._words: Words = np.zeros(0, np.uint64)
        self._first = np.zeros((lanes, KNOWN_FIRST), np.intp)
        """By lane: nobody who is not among them has a higher hash."""
        self._hashes = np.zeros((lanes, KNOWN_FIRST), np.uint64)
        """Theirs, the highest first; 0 where nobody is known."""

    def own(self, worker: str, workers: Iterable[str]) -> tuple[int, ...]:
        """The lanes whose home `worker` is, among it and the others of `workers`."""
        if len(self._places) == 1:
            return (0,)
        living = sorted({worker, *workers})
        mine = self.among(living) == living.index(worker)
        return tuple(mine.nonzero()[0].tolist())

    def among(self, workers: Sequence[str]) -> npt.NDArray[np.intp]:
        """The home of each lane: intp [lanes], places in `workers`; there must be one.

        Lanes in use by so many workers are shared out by themselves, up to `most_homes` to each; so
        are the others, in which something may have been left.
        """
        import numpy as np

        now = {worker: place for place, worker in enumerate(workers)}
        moved = np.array([now.get(worker, -1) for worker in self._workers], np.intp)
        came = now.keys() - self._workers
        self._workers = workers
        self._words = np.array([_word(worker) for worker in workers], np.uint64)
        learns = 4 * len(came) < len(workers)  # else many more may be about to come
        if not learns:
            self._first[:], self._hashes[:] = 0, 0
        else:
            self._move(moved)
            if came:
                self._add(np.array([now[worker] for worker in came], np.intp))
        lanes = len(self._places)
        used = lanes_in_use(len(workers), lanes)
        return np.concatenate(
            [self._shared_out(*part, learns) for part in ((0, used), (used, lanes))]
        )

    def _move(self, moved: npt.NDArray[np.intp]) -> None:
        """Workers have other places now, or -1 for none."""
        import numpy as np

        first = moved[self._first]
        gone = first < 0
        self._first = np.where(gone, 0, first)
        self._hashes[gone] = 0
        lanes = np.flatnonzero(gone.any(1))
        self._know(lanes, self._first[lanes], self._hashes[lanes])

    def _add(self, came: npt.NDArray[np.intp]) -> None:
        """Workers at these places have come."""
        import numpy as np

        hashes = _mixed(self._places[:, None] ^ self._words[came])
        # Of those below the last that is known, others may come before.
        last = np.where(self._hashes, self._hashes, ~np.uint64(0)).min(1)
        hashes[hashes < last[:, None]] = 0
        lanes = np.flatnonzero(hashes.any(1))
        first = np.broadcast_to(came, (lanes.size, came.size))
        self._know(
            lanes,
            np.concatenate([self._first[lanes], first], 1),
            np.concatenate([self._hashes[lanes], hashes[lanes]], 1),
        )

    def _know(
        self, lanes: npt.NDArray[np.intp], first: npt.NDArray[np.intp], hashes: Words
    ) -> None:
        """Those with the highest hashes come first in these lanes: of some workers' places and
        hashes, [lanes, workers] each."""
        import numpy as np

        order = (~hashes).argsort(1)[:, :KNOWN_FIRST]
        count = order.shape[1]
        self._hashes[lanes] = 0
        self._hashes[lanes, :count] = np.take_along_axis(hashes, order, 1)
        self._first[lanes, :count] = np.take_along_axis(first, order, 1)

    def _learn(self, lanes: npt.NDArray[np.intp], hashes: Words) -> None:
        """Know who comes first in these lanes, whose hashes with all workers are given."""
        import numpy as np

        share = min(1.0, 1.5 * KNOWN_FIRST / self._words.size)
        lane, place = (hashes >= np.uint64((1.0 - share) * 2**64)).nonzero()
        nth = np.arange(lane.size) - np.searchsorted(lane, lane)
        shape = len(lanes), nth.max(initial=0) + 1
        first, known = np.zeros(shape, np.intp), np.zeros(shape, np.uint64)
        first[lane, nth] = place
        known[lane, nth] = hashes[lane, place]
        self._know(lanes, first, known)

    def _ask(self, lanes: npt.NDArray[np.intp], bound: Words) -> tuple[npt.NDArray[np.intp], Words]:
        """The first worker that is known of each lane and that takes hashes above its `bound`, and
        that hash; 0 where there is none."""
        import numpy as np

        first, hashes = self._first[lanes], self._hashes[lanes]
        taken = np.where(hashes > bound[first], hashes, 0)
        which = taken.argmax(1)[:, None]
        return (
            np.take_along_axis(first, which, 1)[:, 0],
            np.take_along_axis(taken, which, 1)[:, 0],
        )

    def _shared_out(self, begin: int, end: int, learns: bool) -> npt.NDArray[np.intp]:
        """A worker for each of these lanes, and none for more than it may have: intp [lanes].

        The stable marriage of both by the hash that they have in common (Gale and Shapley 1962): a
        lane asks the worker with the highest hash that has not turned it away, and a worker that is
        asked by too many turns away those with the lowest. The order of either does not matter.
        """
        import numpy as np

        names = self._words
        most = most_homes(names.size, end - begin)
        home = np.zeros(end - begin, np.intp)
        score = np.zeros(end - begin, np.uint64)
        bound = np.zeros(names.size, np.uint64)
        left = np.arange(end - begin)
        while left.size:
            home[left], score[left] = self._ask(begin + left, bound)
            others = left[score[left] == 0]
            # A few lanes with all workers at a time: what fits into a processor's cache.
            for some in np.array_split(others, 1 + others.size * names.size // ASKED_TOGETHER):
                hashes = _mixed(self._places[begin + some, None] ^ names)
                if learns:
                    self._learn(begin + some, hashes)
                hashes[hashes <= bound] = 0
                home[some] = hashes.argmax(1)
                score[some] = hashes.max(1)
            order = np.lexsort((~score, home))
            nth = np.arange(order.size) - np.searchsorted(home[order], home[order])
            last, left = order[nth == most - 1], order[nth >= most]
            bound[home[last]] = score[last]
        return home


def lanes_in_use(workers: int, lanes: int) -> int:
    """How many of a shard's lanes have jobs put into them: one for one worker, which needs none.

    Otherwise a power of two: when it doubles, half of the prompts stay where they are. `alive.lua`
    counts so, too.
    """
    used = 1
    while workers > 1 and used < LANES_PER_WORKER * workers:
        used *= 2
    return min(used, lanes)


def usual_lanes(shards: int) -> int:
    """How many lanes each shard has where nobody says: enough for four workers a shard, and no more
    than `LANES_MOST` in all."""
    return max(1, min(4 * LANES_PER_WORKER, LANES_MOST // shards))


def own_lanes(worker: str, workers: Iterable[str], shard: int, lanes: int) -> tuple[int, ...]:
    """The lanes of a shard whose home `worker` is, among it and the others of `workers`."""
    return Rendezvous(shard, lanes).own(worker, workers)


def patience(tokens: float, seconds_per_token: float) -> float:
    """Seconds for which a job is its home's alone: what computing its prompt elsewhere would take.

    `tokens` is how long prompts are, `seconds_per_token` what a token takes that was not kept.
    """
    return min(MOST_PATIENCE, max(LEAST_PATIENCE, tokens * seconds_per_token))


@dataclass(frozen=True, slots=True)
class Waiting:
    """A lane's jobs of one priority that nobody has taken: since when the first of them waits, in
    seconds, and about how many there are."""

    lane: int
    since: float
    jobs: int


def steals(waiting: Iterable[Waiting], room: int, patience: float) -> list[tuple[Waiting, int]]:
    """What a worker with room for `room` more jobs takes of others' lanes: (lane, how many).

    Of the longest lanes that have waited for `patience` seconds, half of each: its home is at it,
    too.
    """
    taken: list[tuple[Waiting, int]] = []
    ripe = [lane for lane in waiting if lane.since >= patience]
    for lane in sorted(ripe, key=lambda lane: (-lane.jobs, -lane.since)):
        if room <= 0:
            break
        count = min(room, (lane.jobs + 1) // 2)
        taken.append((lane, count))
        room -= count
    return taken
