"""How far a worker's start has come, in the log and on ``/ready``: it may take minutes."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from lmpool.backends import progress

logger = logging.getLogger(__name__)

SAY_EVERY: Final = 10.0
"""Seconds after which a stage that goes on is spoken of again."""


class StartProgress:
    """The stages of a start, one after another, each with its seconds. Any thread may read."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        """Seconds that each took, as long as they have ended."""
        self.stage: str | None = None
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def begin(self) -> None:
        """A start begins; what it is at is said in the log every `SAY_EVERY` seconds."""
        self._thread = threading.Thread(target=self._say, name="lmpool-progress", daemon=True)
        self._thread.start()

    def enter(self, stage: str) -> None:
        """The stage before is over."""
        self._leave()
        self.stage, self._since = stage, time.monotonic()
        logger.debug("start: %s", stage)

    def end(self) -> None:
        """It is over, however it ended."""
        self._leave()
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def seconds(self) -> float:
        """For how long the present stage has gone on."""
        return 0.0 if self.stage is None else time.monotonic() - self._since

    def listening(self) -> progress.Listening:
        """Have engines that are loaded on this thread say their stages here."""
        return progress.Listening(self.enter)

    def _leave(self) -> None:
        if self.stage is not None:
            took = time.monotonic() - self._since
            self.stages[self.stage] = self.stages.get(self.stage, 0.0) + took
            self.stage = None

    def _say(self) -> None:
        while not self._ended.wait(SAY_EVERY):
            stage = self.stage
            if stage is not None:
                logger.info("still starting: %s, for %.0f s", stage, self.seconds())
