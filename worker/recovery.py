"""Looking after the jobs of workers that died, and of this one where an answer was lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Final

import redis

from lmpool.commands import Server, Value
from lmpool.errors import JobFormatError
from lmpool.keys import GROUP, LaneKeys
from lmpool.scripts import script
from lmpool.wire import Digester
from lmpool.worker.batching import Batcher, Claimed
from lmpool.worker.dead import Cemetery
from lmpool.worker.heartbeat import Heartbeat
from lmpool.worker.intake import read_job
from lmpool.worker.state import WorkerState

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
        server: Server,
        lanes: Sequence[LaneKeys],
        consumer: str,
        batcher: Batcher,
        state: WorkerState,
        digester: Digester,
        heartbeat: Heartbeat,
        cemetery: Cemetery,
        max_deliveries: int,
    ) -> None:
        self._server = server
        self._lanes = lanes
        self._consumer = consumer
        self._batcher = batcher
        self._state = state
        self._digester = digester
        self._heartbeat = heartbeat
        self._cemetery = cemetery
        self._max_deliveries = max_deliveries

    def run(self) -> None:
        """Look, until the worker stops."""
        failures = 0
        while not self._state.stopping.wait(LOOK_EVERY * random.uniform(0.75, 1.25)):
            # Where our own heartbeat had trouble, that of others is no sign of their death.
            if not self._heartbeat.steady():
                continue
            try:
                for number in range(len(self._lanes)):
                    self._look(number)
                failures = 0
            except (redis.exceptions.RedisError, OSError) as error:
                failures += 1
                if failures in (1, 10):
                    logger.warning("jobs of dead workers cannot be looked for: %s", error)

    def _look(self, number: int) -> None:
        """Run what a lane has to be taken over, one by one."""
        lane = self._lanes[number]
        owners: dict[str, int] = {}
        forgotten = self._forgotten(number)
        while not self._state.stopping.is_set():
            arguments: list[Value] = [lane.prefix, GROUP, self._consumer, *forgotten]
            found = script("reclaim")(self._server, [lane.jobs], arguments)
            if not found:
                break
            owner, entry, deliveries, *fields = found
            forgotten = [other for other in forgotten if other != entry]
            owners[owner.decode()] = owners.get(owner.decode(), 0) + 1
            data = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"job", b"")
            self._take_over(number, owner.decode(), entry, int(deliveries), data)
        for name, count in owners.items():
            whose = "forgotten here" if name == self._consumer else f"of {name}, which is gone"
            logger.warning("took over %d jobs %s", count, whose)

    def _forgotten(self, number: int) -> list[bytes]:
        """Entries that are ours and that nobody here holds.

        The server's answer was lost, or the server was: it came back as it was some time ago.
        """
        pending = self._server.xpending_range(
            self._lanes[number].jobs,
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
            and (number, item["message_id"]) not in self._state.held
        ]

    def _take_over(
        self, number: int, owner: str, entry: bytes, deliveries: int, data: bytes
    ) -> None:
        try:
            job = read_job(data, self._digester)
        except JobFormatError as error:
            self._cemetery.refuse(number, entry, data, error)
            return
        if deliveries > self._max_deliveries:
            self._cemetery.give_up(number, entry, data, job, deliveries - 1, owner)
            return
        settled = threading.Event()
        self._state.held.add((number, entry))
        self._batcher.add_alone(Claimed(job, entry, number, time.monotonic(), settled))
        while not settled.wait(0.25):
            if self._state.stopping.is_set():
                return
