"""What runs on a GPU: one process, started by arq, that serves a pool with one engine.

``arq lmpool.worker.WorkerSettings``; ``lmpool worker`` starts one for each GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmpool.worker.arq_settings import WorkerSettings

__all__ = ["WorkerSettings"]


def __getattr__(name: str) -> Any:
    if name != "WorkerSettings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Read when it is asked for: importing the package must not need settings or an engine.
    from lmpool.errors import LmpoolError
    from lmpool.exit_status import EXIT_REFUSED
    from lmpool.garbage import uncollected
    from lmpool.stderr import say

    try:
        with uncollected():
            from lmpool.worker.arq_settings import WorkerSettings
    except LmpoolError as error:
        say(f"lmpool worker: {error}")
        raise SystemExit(EXIT_REFUSED) from None
    return WorkerSettings
