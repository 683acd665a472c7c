"""Waiting, while a worker starts, for a server that restarts, loads, fails over or is full."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

import redis.exceptions

from lmpool.errors import LmpoolError, ServerUnreachable
from lmpool.server import is_full, is_lost, why_not_now

logger = logging.getLogger(__name__)

T = TypeVar("T")

SERVER_WAIT: Final = 60.0
"""Seconds for which a worker that starts waits for a server that is away, not ready or full."""
PAUSE: Final = 0.25


def patiently(step: Callable[[], T], stopped: Callable[[float], bool | None]) -> T:
    """What `step` returns, done again for `SERVER_WAIT` while the server is away or not ready.

    `stopped` waits for so many seconds, or until the worker is told to stop: `LmpoolError` then.
    Raises what the step raised last, and at once what no waiting helps against.
    """
    deadline = time.monotonic() + SERVER_WAIT
    told = False
    while True:
        try:
            return step()
        except (ServerUnreachable, redis.exceptions.RedisError) as error:
            passes = isinstance(error, ServerUnreachable) or is_lost(error) or is_full(error)
            if not passes or time.monotonic() >= deadline:
                raise
            if not told:
                why = why_not_now(error)
                logger.warning("waiting for the server, %g s at most: %s", SERVER_WAIT, why)
            told = True
        if stopped(PAUSE):
            raise LmpoolError("told to stop while waiting for the server")
