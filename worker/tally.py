"""What a worker counts of lanes and prefixes, added to what the pool has counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import redis.exceptions

from lmpool.commands import Server
from lmpool.counters import Counter
from lmpool.keys import COUNTERS_TTL_MS, ShardKeys
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.worker.status import WorkerStatus


class Tally:
    """Adds to the pool's counters beside the heartbeat, and not with each batch: nobody waits for
    it. What a worker that is killed had counted since its last beat is not added."""

    def __init__(self, shards: Sequence[ShardKeys], status: WorkerStatus) -> None:
        self._shards = shards
        self._status = status
        self._added: dict[Counter, int] = {}

    def move(self, shards: Sequence[ShardKeys]) -> None:
        """The pool lies in these shards now. For any thread."""
        self._shards = shards

    def add(self, servers: Servers) -> None:
        """Add what is new since the last time, in the first shard that answers.

        Raises redis-py's exceptions where none does, and adds it the next time.
        """
        counts = self._status.counts()
        new = {
            counter: count - self._added.get(counter, 0)
            for counter, count in counts.items()
            if count != self._added.get(counter, 0)
        }
        if new and any(servers.apart([s], partial(_add_in, s, new)) for s in self._shards):
            self._added = counts


def _add_in(shard: ShardKeys, new: Mapping[Counter, int], server: Server) -> bool:
    """Whether it could be added: not while the memory is full, or the hash is damaged."""
    with server.pipeline(transaction=True) as pipeline:
        for counter, number in new.items():
            pipeline.hincrby(shard.counters, counter.field, number)
        pipeline.pexpire(shard.counters, COUNTERS_TTL_MS)
        try:
            pipeline.execute()
        except redis.exceptions.ResponseError as error:
            if is_lost(error):
                raise
            return False
    return True
