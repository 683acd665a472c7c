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
from functools import cache, cached_property
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
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def homes(workers: Sequence[str], shard: int, lanes: int) -> npt.NDArray[np.intp]:
    """The home of each lane of a shard: intp [lanes], places in `workers`; there must be one.

    Those in use by so many workers are shared out by themselves, up to `most_homes` to each; so are
    the others, in which something may have been left.
    """
    import numpy as np

    names = np.array([_word(worker) for worker in workers], np.uint64)
    places = _mixed(np.arange(lanes, dtype=np.uint64) + np.uint64(shard << 16))
    used = lanes_in_use(len(workers), lanes)
    return np.concatenate([_shared_out(places[:used], names), _shared_out(places[used:], names)])


def most_homes(workers: int, lanes: int) -> int:
    """How many of so many lanes one of so many workers is the home of, at most."""
    return math.ceil(HOME_MOST * lanes / workers)


def _shared_out(places: Words, names: Words) -> npt.NDArray[np.intp]:
    """A worker for each lane, and none for more than it may have: intp [lanes].

    The stable marriage of both by the hash that they have in common (Gale and Shapley 1962): a lane
    asks the worker with the highest hash that has not turned it away, and a worker that is asked by
    too many turns away those with the lowest. The order of either does not matter.
    """
    import numpy as np

    most = most_homes(names.size, places.size)
    home = np.zeros(places.size, np.intp)
    score = np.zeros(places.size, np.uint64)
    bound = np.zeros(names.size, np.uint64)
    left = np.arange(places.size)
    while left.size:
        # A few lanes with all workers at a time: what fits into a processor's cache.
        for some in np.array_split(left, -(-left.size * names.size // ASKED_TOGETHER)):
            scores = _mixed(places[some, None] ^ names)
            scores[scores <= bound] = 0
            home[some] = scores.argmax(1)
            score[some] = scores.max(1)
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
    if lanes == 1:
        return (0,)
    living = sorted({worker, *workers})
    mine = homes(living, shard, lanes) == living.index(worker)
    return tuple(mine.nonzero()[0].tolist())


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
