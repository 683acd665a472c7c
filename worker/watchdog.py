"""Ends a worker whose engine hangs."""

from __future__ import annotations

import time
from typing import Final

from lmpool.errors import EngineBroken
from lmpool.worker.status import WorkerStatus

LOOKS: Final = 10
"""Looks in one `engine_timeout`."""


class Watchdog:
    """Fails the worker once one step of its engine takes longer than `limit` seconds."""

    def __init__(self, status: WorkerStatus, limit: float) -> None:
        self._status = status
        self._limit = limit

    def run(self) -> None:
        """Look, until the worker stops."""
        while not self._status.stopping.wait(min(1.0, self._limit / LOOKS)):
            since = self._status.step_since
            if since is not None and time.monotonic() - since > self._limit:
                self._status.fail(
                    EngineBroken(
                        f"the engine has been at one batch for more than {self._limit:g} s: raise "
                        "LMPOOL_ENGINE_TIMEOUT if batches may take that long"
                    )
                )
                return
