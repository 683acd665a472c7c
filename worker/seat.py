"""What a worker has in a pool's shards and lanes, while the pool lies in these."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from lmpool.commands import Server
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.worker.engine_thread import spawn
from lmpool.worker.heartbeat import Heartbeat
from lmpool.worker.homes import Homes
from lmpool.worker.status import WorkerStatus
from lmpool.worker.tally import Tally


class Seat:
    """A worker's place among a pool's shards: where it beats and reads. The engine is no part of
    it: a worker that moves leaves one for another."""

    def __init__(
        self,
        info: ModelInfo,
        keys: PoolKeys,
        consumer: str,
        status: WorkerStatus,
        servers: Servers,
        on_moved: Callable[[ModelInfo], None],
        tally: Tally,
    ) -> None:
        self.info = info
        self.shards: tuple[ShardKeys, ...] = info.shard_keys(keys)
        self.homes = Homes(self.shards, consumer)
        self.heartbeat = Heartbeat(
            servers, self.shards, consumer, status, keys, info, self.homes, on_moved, tally
        )
        self.ended = threading.Event()
        """Set once: claim nothing more here."""
        self.ended_at = 0.0
        """When it had been left for another, on the monotonic clock."""
        self.left = threading.Event()
        """Set once: beat no more."""
        self.opened: list[Servers] = [servers]
        """The connections of its threads."""
        self.reads: Servers | None = None
        """Those of them that wait for jobs."""
        self._consumer = consumer
        self._status = status
        self._threads: dict[str, threading.Thread] = {}

    def spawn(self, name: str, target: Callable[[], None]) -> None:
        """Run one of its threads."""
        self._threads[name] = spawn(name, target, self._status)

    def join(self, name: str, seconds: float) -> bool:
        """Wait for one of its threads. Whether it has ended."""
        thread = self._threads.get(name)
        if thread is None:
            return True
        thread.join(seconds)
        if thread.is_alive():
            return False
        del self._threads[name]
        return True

    @property
    def is_busy(self) -> bool:
        """Whether one of its threads has not ended."""
        return any(thread.is_alive() for thread in self._threads.values())

    def end_heartbeat(self) -> None:
        """Beat no more. A beat that is on its way is waited for."""
        self.left.set()
        self.join("heartbeat", 5)

    def leave(self, servers: Servers, shards: Sequence[ShardKeys]) -> None:
        """End the heartbeats in these of its shards."""
        for shard in shards:
            servers.apart([shard], partial(self._leave_shard, shard))

    def _leave_shard(self, shard: ShardKeys, server: Server) -> None:
        keys = [shard.alive(self._consumer), shard.workers, *shard.groups]
        script("leave")(server, keys, [GROUP, self._consumer])
