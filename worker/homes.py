"""Which lanes are this worker's own: as of the latest heartbeat."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from lmpool.affinity import Rendezvous
from lmpool.keys import PRIORITIES, JobStream, ShardKeys


class Homes:
    """The streams of a worker's own lanes, by shard: all of them, until it knows the other workers.

    Heartbeats write, on whatever thread, and others read: what they get is never changed.
    """

    def __init__(self, shards: Sequence[ShardKeys], consumer: str) -> None:
        self._consumer = consumer
        self._lock = threading.Lock()
        self._meet = {shard.prefix: Rendezvous(shard.number, shard.lanes) for shard in shards}
        self._all = {shard.prefix: shard.streams for shard in shards}
        self._own = dict(self._all)
        self._read = dict(self._own)
        self._used = {shard.prefix: shard.lanes for shard in shards}
        self.change: dict[str, bytes] = {}
        """Which change of workers is known, by shard; see `alive.lua`."""

    def update(
        self, shard: ShardKeys, change: bytes, used: int, workers: Iterable[str] = ()
    ) -> None:
        """Take over who lives, as far as that has changed, and how many lanes are in use."""
        living = set(workers)
        with self._lock:
            if living:
                lanes = self._meet[shard.prefix].own(self._consumer, living)
                self._own[shard.prefix] = tuple(
                    shard.stream(priority, lane) for lane in lanes for priority in PRIORITIES
                )
            if living or used != self._used[shard.prefix]:
                own = self._own[shard.prefix]
                self._read[shard.prefix] = tuple(stream for stream in own if stream.lane < used)
                self._used[shard.prefix] = used
            self.change[shard.prefix] = change

    def own(self, shard: ShardKeys) -> tuple[JobStream, ...]:
        """The streams of this worker's lanes of a shard."""
        return self._own[shard.prefix]

    def read(self, shard: ShardKeys) -> tuple[JobStream, ...]:
        """Those of the lanes that are in use. What is left in others is anyone's."""
        return self._read[shard.prefix]

    def has_several(self, shard: ShardKeys) -> bool:
        """Whether several lanes of a shard are in use: then clients tell which of them wait."""
        return self._used[shard.prefix] > 1

    def has_others(self, shard: ShardKeys) -> bool:
        """Whether some lanes of a shard that are in use are others'."""
        return len(self._read[shard.prefix]) < len(PRIORITIES) * self._used[shard.prefix]

    def lanes(self) -> int:
        """How many lanes in use it is the home of; none of a shard with one lane, which all read,
        and none before it knows the other workers."""
        return sum(
            len(self._read[prefix]) // len(PRIORITIES)
            for prefix in list(self.change)
            if len(self._all[prefix]) > len(PRIORITIES)
        )
