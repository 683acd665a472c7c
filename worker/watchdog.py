"""Ends a worker whose engine hangs."""

from __future__ import annotations

from functools import wraps
from typing import Any, Final, cast

from lmpool.backends.engine import Engine
from lmpool.errors import EngineBroken
from lmpool.worker.status import WorkerStatus

LOOKS: Final = 10
"""Looks in one `engine_timeout`."""


class Watchdog:
    """Fails the worker once its engine is at one step, or one call, for more than `limit` s."""

    def __init__(self, status: WorkerStatus, limit: float) -> None:
        self._status = status
        self._limit = limit

    def run(self) -> None:
        """Look, until the worker stops."""
        every = min(1.0, self._limit / LOOKS)
        known, seconds = None, 0.0
        while not self._status.stopping.wait(every):
            since = self._status.step_since
            # No clock is read: a process that was frozen meanwhile does not hang.
            seconds = seconds + every if since is not None and since == known else 0.0
            known = since
            if seconds > self._limit:
                self._status.fail(
                    EngineBroken(
                        "the engine has been at one batch, or one call, for more than "
                        f"{self._limit:g} s: raise LMPOOL_ENGINE_TIMEOUT if they may take that long"
                    )
                )
                return


def watched(engine: Engine, status: WorkerStatus) -> Engine:
    """The engine for whoever calls it between its steps: each call is looked at as a step is.

    What else they do there, such as waiting for the server, is not.
    """
    return cast(Engine, _Watched(engine, status))


class _Watched:
    def __init__(self, engine: Engine, status: WorkerStatus) -> None:
        self._engine = engine
        self._status = status

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if not callable(found):
            return found

        @wraps(found)
        def call(*arguments: Any, **named: Any) -> Any:
            with self._status.step():
                return found(*arguments, **named)

        return call
