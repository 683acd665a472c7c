"""Every Redis key name, in one place.

All keys of a lane carry its hash tag, so that a script touches one slot of a Redis Cluster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lmpool.errors import SettingsError

GROUP = "workers"
"""The consumer group of every job stream, created at id 0."""

COUNTERS_TTL_MS = 30 * 86_400_000
"""How long a pool's counters are kept after they last changed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_pool_name(pool: str) -> str:
    """`pool` itself, or `SettingsError` if it cannot be part of a key."""
    if not isinstance(pool, str) or not _NAME.fullmatch(pool):
        raise SettingsError(
            f"pool={pool!r} is no pool name: write 1 to 64 letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )
    return pool


@dataclass(frozen=True)
class LaneKeys:
    """The keys of one lane: `prefix` is the hash tag, braces included.

    A lane has two streams of jobs. Its keys are the same for both but for `jobs`: see `batch`.
    """

    prefix: str
    later: bool = False
    """Whether these keys name the stream of jobs that others go before."""

    @cached_property
    def jobs(self) -> str:
        """Stream of jobs."""
        return f"{self.prefix}:batch" if self.later else f"{self.prefix}:jobs"

    @cached_property
    def batch(self) -> LaneKeys:
        """The same lane with the stream of what was asked for with ``priority="batch"``."""
        return LaneKeys(self.prefix, later=True)

    @cached_property
    def dead(self) -> str:
        """Stream of jobs given up, with the reason."""
        return f"{self.prefix}:dead"

    @cached_property
    def counters(self) -> str:
        """Hash of what the workers have done: computed, batches, failed, expired."""
        return f"{self.prefix}:counters"

    @cached_property
    def adapters(self) -> str:
        """Hash of adapter name to the adapter's fingerprint and folder."""
        return f"{self.prefix}:adapters"

    def result(self, digest: str) -> str:
        """An encoded row."""
        return f"{self.prefix}:result:{digest}"

    def flight(self, digest: str) -> str:
        """Hash: who waits for this digest, and its job's stream id."""
        return f"{self.prefix}:flight:{digest}"

    def reply(self, client: str) -> str:
        """Stream of notices to one client."""
        return f"{self.prefix}:reply:{client}"

    def alive(self, consumer: str) -> str:
        """A worker's heartbeat."""
        return f"{self.prefix}:alive:{consumer}"


@dataclass(frozen=True)
class PoolKeys:
    """The keys of one pool."""

    pool: str

    def __post_init__(self) -> None:
        check_pool_name(self.pool)

    @property
    def info(self) -> str:
        """The pool's model info."""
        return f"lmpool:{self.pool}"

    @property
    def serving(self) -> str:
        """What living workers serve, in the slot of the model info."""
        return f"{{lmpool:{self.pool}}}:serving"

    def vocabulary(self, fingerprint8: str) -> str:
        """Tokenizer files and byte vocabulary of the pool's model."""
        return f"lmpool:{self.pool}:{fingerprint8}:vocabulary"

    def control_queue(self, consumer: str) -> str:
        """The arq queue of one worker's control jobs."""
        return f"lmpool:{self.pool}:control:{consumer}"

    def lane(self, fingerprint8: str, lane: int) -> LaneKeys:
        """The keys of lane number `lane`."""
        return LaneKeys(f"{{lmpool:{self.pool}:{fingerprint8}:{lane}}}")

    def lanes(self, fingerprint8: str, count: int) -> tuple[LaneKeys, ...]:
        """The keys of all lanes, by number."""
        return tuple(self.lane(fingerprint8, lane) for lane in range(count))


def streams(lanes: Sequence[LaneKeys]) -> tuple[LaneKeys, ...]:
    """Every stream of jobs of these lanes, as the keys of its lane."""
    return tuple(keys for lane in lanes for keys in (lane, lane.batch))


def lane_of(digest: bytes, lanes: int) -> int:
    """The lane that a 16-byte digest belongs to."""
    return int.from_bytes(digest[:4], "big") % lanes
