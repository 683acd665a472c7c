"""The worker's sign of life, on a thread and a connection of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

import redis

from lmpool.commands import Server
from lmpool.keys import LaneKeys
from lmpool.worker.state import WorkerState

logger = logging.getLogger(__name__)

LIFE_MS: Final = 5000
EVERY: Final = LIFE_MS / 3000


class Heartbeat:
    """Renews the heartbeat at a third of its life, whatever the engine and event loop do."""

    def __init__(
        self, server: Server, lanes: Sequence[LaneKeys], consumer: str, state: WorkerState
    ) -> None:
        self._server = server
        self._lanes = lanes
        self._consumer = consumer
        self._state = state

    def beat(self) -> None:
        """Renew once."""
        value = self._state.heartbeat()
        for lane in self._lanes:
            self._server.set(lane.alive(self._consumer), value, px=LIFE_MS)

    def run(self, ended: threading.Event) -> None:
        """Renew until `ended` is set."""
        missed = False
        while not ended.wait(EVERY):
            try:
                self.beat()
                missed = False
            except (redis.exceptions.RedisError, OSError) as error:
                if not missed:
                    logger.warning("the heartbeat could not be renewed: %s", error)
                missed = True
