"""What a worker counts of lanes and prefixes, added to what the pool has counted."""

from __future__ import annotations

import threading
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
    it. Nothing is added twice: what a worker that is killed had counted since its last beat is not
    added, and neither is what may have been as the connection was lost."""

    def __init__(self, shards: Sequence[ShardKeys], status: WorkerStatus) -> None:
        self._shards = shards
        self._status = status
        self._added: dict[Counter, int] = {}
        self._adding = threading.Lock()

    def move(self, shards: Sequence[ShardKeys]) -> None:
        """The pool lies in these shards now. For any thread."""
        self._shards = shards

    def add(self, servers: Servers) -> None:
        """Add what is new since the last time, in the first shard that answers and takes it.

        Raises redis-py's exceptions where none does, and adds it the next time. For any thread: of
        a worker that moves, two heartbeats may be on their way.
        """
        with self._adding:
            self._add(servers)

    def _add(self, servers: Servers) -> None:
        counts = self._status.counts()
        for shard in self._shards:
            new = {
                counter: count - self._added.get(counter, 0)
                for counter, count in counts.items()
                if count != self._added.get(counter, 0)
            }
            if not new:
                return
            servers.apart([shard], partial(self._add_in, shard, new))

    def _add_in(self, shard: ShardKeys, new: Mapping[Counter, int], server: Server) -> None:
        """Note what was added: nothing while the memory is full, not the fields that are damaged.

        Raises redis-py's exceptions where the server is away.
        """
        server.ping()  # whoever is away now was given nothing
        with server.pipeline(transaction=True) as pipeline:
            for counter, number in new.items():
                pipeline.hincrby(shard.counters, counter.field, number)
            pipeline.pexpire(shard.counters, COUNTERS_TTL_MS)
            try:
                answers = pipeline.execute(raise_on_error=False)
            except redis.exceptions.ResponseError as error:  # of all of them: none was run
                if is_lost(error):
                    raise
                return
            except Exception:  # it may have been added, or not
                self._note(new)
                raise
        self._note(
            {
                counter: number
                for (counter, number), answer in zip(new.items(), answers[: len(new)], strict=True)
                if not isinstance(answer, Exception)
            }
        )

    def _note(self, added: Mapping[Counter, int]) -> None:
        for counter, number in added.items():
            self._added[counter] = self._added.get(counter, 0) + number
