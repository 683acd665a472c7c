"""Looking after the jobs of workers that died, and of this one where an answer was lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import redis.exceptions

from lmpool.commands import Server, Value, fields_of
from lmpool.errors import JobFormatError
from lmpool.keys import GROUP, JobStream, ShardKeys
from lmpool.liveness import LIFE_MS
from lmpool.reasons import Reasons
from lmpool.scripts import script
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.wants import Digester
from lmpool.worker.batching import Batcher, Delivery
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.homes import Homes
from lmpool.worker.reading import read_job
from lmpool.worker.status import WorkerStatus

logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 2.0
FORGOTTEN_MS: Final = 5000
"""Milliseconds after which an entry of ours that nobody here knows of was forgotten: since it was
delivered, by the server's clock, or since it was first seen so, as that may have been set back."""
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
        homes: Homes | None = None,
        ended: threading.Event | None = None,
    ) -> None:
        self._servers = servers
        self._shards = shards
        self._homes = Homes(shards, consumer) if homes is None else homes
        self._consumer = consumer
        self._batcher = batcher
        self._status = status
        self._ended = status.stopping if ended is None else ended
        self._digester = digester
        self._dead_letters = dead_letters
        self._max_deliveries = max_deliveries
        self._unknown: dict[str, dict[bytes, float]] = {}
        """Entries that are ours and that nobody here knows of, by stream: since when, on the
        monotonic clock."""

    def run(self) -> None:
        """Look, until the worker stops or has moved to other shards: until `ended` is set."""
        reasons = Reasons()
        while not self._ended.wait(LOOK_EVERY * random.uniform(0.75, 1.25)):
            error = self._look_everywhere()
            if error is None:
                reasons.clear()
            elif reasons.is_new(error):
                logger.warning("jobs of dead workers cannot be looked for: %s", error)

    def _look_everywhere(self) -> Exception | None:
        """Look through every shard that can be read. Returns why one could not."""
        failures: list[Exception] = []
        lost: list[Server] = []

        def look(shard: ShardKeys, server: Server) -> None:
            if server in lost:
                return
            try:
                self._look(shard)
            except (redis.exceptions.RedisError, OSError) as error:
                if is_lost(error) and not self._servers.fails_apart:
                    lost.append(server)  # so are its other shards, those of other servers are not
                raise

        def note(shard: ShardKeys, error: Exception) -> None:
            failures.append(error)

        for shard in self._shards:
            try:
                with self._servers.in_step():
                    self._servers.apart([shard], partial(look, shard), note)
            except (redis.exceptions.RedisError, OSError) as error:
                failures.append(error)
        return failures[0] if failures else None

    def _look(self, shard: ShardKeys) -> None:
        """Run what a shard has to be taken over, one by one: a lane's home looks after it.

        What this worker itself forgot may lie in lanes that were its own before, or where it was a
        thief: the home of today sees that the owner lives.
        """
        server = self._servers.for_shard(shard)
        owners: dict[str, int] = {}
        own = self._homes.own(shard)
        mine = {stream.key for stream in own}
        streams = [
            *own,
            *(s for s in shard.streams if s.key not in mine and s.key in self._status.visited),
        ]
        keys = [stream.key for stream in streams]
        forgotten = self._forgotten(server, keys)
        calls = shard.calls
        while not self._ended.is_set():
            arguments: list[Value] = [shard.prefix, GROUP, self._consumer, LIFE_MS]
            for key in keys:
                arguments += (len(forgotten[key]), *forgotten[key])
            arguments += [0] * len(calls)
            found = script("reclaim")(server, [shard.steady, *keys, *calls], arguments)
            if not found:
                break
            place, name, entry, deliveries, *values = found
            owner = name.decode("utf-8", "replace")  # anybody may be a consumer
            stream = streams[place]
            if entry in forgotten[stream.key]:
                forgotten[stream.key].remove(entry)
            owners[owner] = owners.get(owner, 0) + 1
            fields = fields_of(values)
            if fields.keys() == {b"bytes"}:
                size = fields[b"bytes"].decode("ascii", "replace")
                error = JobFormatError(f"an entry of {size!r:.40} bytes: too long")
                self._dead_letters.refuse(stream, entry, b"", error)
                continue
            self._take_over(stream, owner, entry, int(deliveries), fields.get(b"job", b""))
        for name, count in owners.items():
            whose = "forgotten here" if name == self._consumer else f"of {name}, which is gone"
            logger.warning("took over %d jobs %s", count, whose)

    def _forgotten(self, server: Server, keys: Sequence[str]) -> dict[str, list[bytes]]:
        """Entries that are ours and that nobody here holds, by stream.

        The server's answer was lost, or the server was: it came back as it was some time ago.
        """
        with server.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.xpending_range(
                    key, GROUP, "-", "+", FORGOTTEN_MOST, consumername=self._consumer
                )
            answers = pipeline.execute(raise_on_error=False)
        found: dict[str, list[bytes]] = {}
        now = time.monotonic()
        for key, pending in zip(keys, answers, strict=True):
            if isinstance(pending, Exception) and is_lost(pending):
                raise pending
            ages = {
                item["message_id"]: item["time_since_delivered"]
                for item in (() if isinstance(pending, Exception) else pending)
                if (key, item["message_id"]) not in self._status.held
            }
            before = self._unknown.get(key, {})
            since = self._unknown[key] = {entry: before.get(entry, now) for entry in ages}
            found[key] = [
                entry
                for entry, age in ages.items()
                if max(age, 1000 * (now - since[entry])) > FORGOTTEN_MS
            ]
        return found

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
            if self._ended.is_set():
                return
