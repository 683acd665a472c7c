"""Every Redis key name, in one place.

All keys of a shard carry its hash tag, so that a script touches one slot of a Redis Cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from lmpool.errors import SettingsError
from lmpool.slots import slot_of, spread_tag

PROTOCOL: Final = 5
"""Raised when what travels or a key's form changes: it is part of every key of a shard, so that
workers and clients of different protocols never meet on one."""

GROUP: Final = "workers"
"""The consumer group of every job stream, created at id 0."""

COUNTERS_TTL_MS: Final = 30 * 86_400_000
"""How long a pool's counters are kept after they last changed."""

Priority = Literal["interactive", "batch"]
"""Interactive jobs go before those of priority ``batch``."""

PRIORITIES: Final[tuple[Priority, ...]] = ("interactive", "batch")

_STREAM_NAMES: Final[dict[Priority, str]] = {"interactive": "jobs", "batch": "batch"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_pool_name(pool: str) -> str:
    """`pool` itself, or `SettingsError` if it cannot be part of a key."""
    if not isinstance(pool, str) or not _NAME.fullmatch(pool):
        raise SettingsError(
            f"pool={pool!r} is no pool name: write 1 to 64 letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )
    return pool


@dataclass(frozen=True, eq=False)
class JobStream:
    """One stream of jobs: of a shard's lane, for one priority."""

    shard: ShardKeys
    lane: int
    priority: Priority

    @cached_property
    def key(self) -> str:
        """The stream's key."""
        return f"{self.shard.prefix}:{_STREAM_NAMES[self.priority]}:{self.lane}"


@dataclass(frozen=True)
class ShardKeys:
    """The keys of one shard: `prefix` is its hash tag, braces included; `lanes` how many it has."""

    prefix: str
    number: int = 0
    lanes: int = 1

    @cached_property
    def slot(self) -> int:
        """The slot of a Redis Cluster that all of its keys lie in."""
        return slot_of(self.prefix)

    @cached_property
    def streams(self) -> tuple[JobStream, ...]:
        """Its streams of jobs: of each lane one for each priority, the interactive one first."""
        return tuple(
            JobStream(self, lane, priority) for lane in range(self.lanes) for priority in PRIORITIES
        )

    def stream(self, priority: Priority = "interactive", lane: int = 0) -> JobStream:
        """The stream of jobs of a lane and priority."""
        return self.streams[lane * len(PRIORITIES) + PRIORITIES.index(priority)]

    @cached_property
    def dead(self) -> str:
        """Stream of jobs given up, with the reason."""
        return f"{self.prefix}:dead"

    @cached_property
    def counters(self) -> str:
        """Hash of what the workers have done: see `lmpool.counters`."""
        return f"{self.prefix}:counters"

    @cached_property
    def account(self) -> str:
        """Stream of what workers stored, oldest first: see ``evict.lua``."""
        return f"{self.prefix}:account"

    @cached_property
    def held(self) -> str:
        """The sum of the account, while it is known: see ``complete.lua``."""
        return f"{self.prefix}:held"

    @cached_property
    def adapters(self) -> str:
        """Hash of adapter name to the adapter's fingerprint and folder."""
        return f"{self.prefix}:adapters"

    @cached_property
    def bounds(self) -> str:
        """Hash of what workers allow: the jobs that may wait in a stream, and the lanes; and which
        layout of the pool the shard was last part of."""
        return f"{self.prefix}:bounds"

    @cached_property
    def waiting(self) -> str:
        """Sorted set: the lanes that have jobs nobody took, as a hint, by since when."""
        return f"{self.prefix}:waiting"

    @cached_property
    def wake(self) -> str:
        """Stream where an idle worker is called to look for waiting lanes of others."""
        return f"{self.prefix}:wake"

    @cached_property
    def workers(self) -> str:
        """Sorted set: its workers by the end of their life, as of their last beat."""
        return f"{self.prefix}:workers"

    @cached_property
    def parted(self) -> str:
        """Hash: counters of a shard that the pool has left, until another has them: `part.lua`."""
        return f"{self.prefix}:parted"

    @cached_property
    def inherited(self) -> str:
        """Set: what this shard took over of those that the pool has left; see ``inherit.lua``."""
        return f"{self.prefix}:inherited"

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The keys of all streams that workers read as a group."""
        return (*(stream.key for stream in self.streams), *self.calls)

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """`wake`, if there are several lanes."""
        return (self.wake,) if self.lanes > 1 else ()

    def result(self, digest: bytes) -> str:
        """A stored answer, of a digest of 16 bytes."""
        return f"{self.prefix}:result:{digest.hex()}"

    def results(self, digests: Iterable[bytes]) -> list[str]:
        """Those of many."""
        start = f"{self.prefix}:result:"
        return [start + digest.hex() for digest in digests]

    def pieces(self, digest: bytes) -> str:
        """Stream of what was drawn of a continuation that runs, as it is drawn: see `pieces.lua`.

        One of the result keys, which workers alone may write.
        """
        return f"{self.prefix}:result:{digest.hex()}:pieces"

    def flight(self, digest: bytes) -> str:
        """String: this digest's job, where it waits and until when, and who waits for it."""
        return f"{self.prefix}:flight:{digest.hex()}"

    def reply(self, client: str) -> str:
        """Stream of notices to one client."""
        return f"{self.prefix}:reply:{client}"

    @cached_property
    def steady(self) -> str:
        """String: since when its workers' heartbeats have come without a gap, in ms."""
        return f"{self.prefix}:steady"

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
    def tag(self) -> str:
        """The hash tag, braces included, of what lies in the slot of the model info."""
        return f"{{lmpool:{self.pool}}}"

    @property
    def serving(self) -> str:
        """What living workers serve, in the slot of the model info."""
        return f"{self.tag}:serving"

    def vocabulary(self, fingerprint8: str) -> str:
        """Tokenizer files and byte vocabulary of the pool's model."""
        return f"lmpool:{self.pool}:{fingerprint8}:vocabulary"

    def control_queue(self, consumer: str) -> str:
        """The arq queue of one worker's control jobs."""
        return f"{self.tag}:control:{consumer}"

    def control_job(self, number: str) -> str:
        """The id of a control job: arq puts it at the end of keys that it writes with the queue.

        `number` is 32 hex digits.
        """
        return f"{self.tag}{number}"

    @property
    def control_slot(self) -> int:
        """The slot of a Redis Cluster that all control jobs lie in."""
        return slot_of(self.tag)

    @property
    def aborted(self) -> str:
        """What arq calls ``arq:abort``: it writes that with the queue, too."""
        return f"arq:abort:{self.tag}"

    def health(self, place: str) -> str:
        """Where arq says that the worker of a place lives, for ``arq --check``."""
        return f"{self.tag}:health:{place}"

    def shard(
        self, fingerprint8: str, number: int, lanes: int = 1, count: int | None = None
    ) -> ShardKeys:
        """The keys of shard `number` of `count`; without a count those of a name without a salt."""
        start = f"{{lmpool:{self.pool}:{fingerprint8}:{PROTOCOL}:{number}"
        tag = start + "}" if count is None else spread_tag(start, number, count)
        return ShardKeys(tag, number, lanes)

    def shards(self, fingerprint8: str, count: int, lanes: int = 1) -> tuple[ShardKeys, ...]:
        """The keys of all shards, by number: their slots lie evenly spread."""
        return tuple(self.shard(fingerprint8, number, lanes, count) for number in range(count))


def streams(shards: Iterable[ShardKeys]) -> tuple[JobStream, ...]:
    """Every stream of jobs of these shards."""
    return tuple(stream for shard in shards for stream in shard.streams)
