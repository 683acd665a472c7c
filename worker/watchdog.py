"""Ends a worker whose engine hangs."""

from __future__ import annotations

import time
from typing import Final

from lmpool.errors import EngineBroken
from lmpool.worker.state import WorkerState

LOOKS: Final = 10
"""Looks in one `engine_timeout`."""


class Watchdog:
    """Fails the worker once one step of its engine takes longer than `limit` seconds."""

    def __init__(self, state: WorkerState, limit: float) -> None:
        self._state = state
        self._limit = limit

    def run(self) -> None:
        """Look, until the worker stops."""
        while not self._state.stopping.wait(min(1.0, self._limit / LOOKS)):
            since = self._state.step_since
            if since is not None and time.monotonic() - since > self._limit:
                self._state.fail(
                    EngineBroken(
                        f"the engine has been at one batch for more than {self._limit:g} s: raise "
                        "LMPOOL_ENGINE_TIMEOUT if batches may take that long"
                    )
                )
                return
