"""Looking after the jobs of workers that died, and of this one where an answer was lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Final

import redis.exceptions

from lmpool.commands import Server, Value
from lmpool.errors import JobFormatError
from lmpool.keys import GROUP, JobStream, ShardKeys, streams
from lmpool.liveness import LIFE_MS
from lmpool.scripts import script
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.wants import Digester
from lmpool.worker.batching import Batcher, Delivery
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.intake import fields_of, read_job
from lmpool.worker.status import WorkerStatus

logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 2.0
FORGOTTEN_MS: Final = 5000
"""Milliseconds after which an entry of ours that nobody here knows of was forgotten."""
FORGOTTEN_MOST: Final = 1000


class Recovery:
    """Takes over the jobs of workers without a heartbeat. Owned by one thread, which `run` is.

    They are run one at a time, and the next is claimed once the last is answered: innocents get
    through, one that kills its worker is found, and no other's deliveries count because of it.
    """

    def __init__(
        self,
        servers: Servers,
        shards: Sequence[ShardKeys],
        consumer: str,
        batcher: Batcher,
        status: WorkerStatus,
        digester: Digester,
        dead_letters: DeadLetters,
        max_deliveries: int,
    ) -> None:
        self._servers = servers
        self._shards = shards
        self._consumer = consumer
        self._batcher = batcher
        self._status = status
        self._digester = digester
        self._dead_letters = dead_letters
        self._max_deliveries = max_deliveries

    def run(self) -> None:
        """Look, until the worker stops."""
        failures = 0
        while not self._status.stopping.wait(LOOK_EVERY * random.uniform(0.75, 1.25)):
            error = self._look_everywhere()
            failures = 0 if error is None else failures + 1
            if failures in (1, 10):
                logger.warning("jobs of dead workers cannot be looked for: %s", error)

    def _look_everywhere(self) -> Exception | None:
        """Look through every stream that can be read. Returns why one could not."""
        failure: Exception | None = None
        lost: list[Server] = []
        for stream in streams(self._shards):
            try:
                server = self._servers.for_shard(stream.shard)
                if server in lost:
                    continue
                with self._servers.in_step():
                    self._look(stream)
            except (redis.exceptions.RedisError, OSError) as error:
                failure = error
                if is_lost(error):  # so are its other streams, those of other servers are not
                    lost.append(server)
        return failure

    def _look(self, stream: JobStream) -> None:
        """Run what a stream has to be taken over, one by one."""
        server, prefix = self._servers.for_shard(stream.shard), stream.shard.prefix
        owners: dict[str, int] = {}
        forgotten = self._forgotten(stream)
        while not self._status.stopping.is_set():
            arguments: list[Value] = [prefix, GROUP, self._consumer, LIFE_MS, *forgotten]
            found = script("reclaim")(server, [stream.key, stream.shard.steady], arguments)
            if not found:
                break
            owner, entry, deliveries, *values = found
            forgotten = [other for other in forgotten if other != entry]
            owners[owner.decode()] = owners.get(owner.decode(), 0) + 1
            fields = fields_of(values)
            if fields.keys() == {b"bytes"}:
                size = fields[b"bytes"].decode("ascii", "replace")
                error = JobFormatError(f"an entry of {size!r:.40} bytes: too long")
                self._dead_letters.refuse(stream, entry, b"", error)
                continue
            self._take_over(stream, owner.decode(), entry, int(deliveries), fields.get(b"job", b""))
        for name, count in owners.items():
            whose = "forgotten here" if name == self._consumer else f"of {name}, which is gone"
            logger.warning("took over %d jobs %s", count, whose)

    def _forgotten(self, stream: JobStream) -> list[bytes]:
        """Entries that are ours and that nobody here holds.

        The server's answer was lost, or the server was: it came back as it was some time ago.
        """
        pending = self._servers.for_shard(stream.shard).xpending_range(
            stream.key,
            GROUP,
            "-",
            "+",
            FORGOTTEN_MOST,
            consumername=self._consumer,
        )
        return [
            item["message_id"]
            for item in pending
            if item["time_since_delivered"] > FORGOTTEN_MS
            and (stream.key, item["message_id"]) not in self._status.held
        ]

    def _take_over(
        self, stream: JobStream, owner: str, entry: bytes, deliveries: int, data: bytes
    ) -> None:
        try:
            job = read_job(data, self._digester)
        except JobFormatError as error:
            self._dead_letters.refuse(stream, entry, data, error)
            return
        if deliveries > self._max_deliveries:
            self._dead_letters.give_up(stream, entry, data, job, deliveries - 1, owner)
            return
        settled = threading.Event()
        delivery = Delivery(job, entry, stream, time.monotonic(), settled)
        self._status.held.add(delivery.place)
        self._batcher.add_alone(delivery)
        while not settled.wait(0.25):
            if self._status.stopping.is_set():
                return
