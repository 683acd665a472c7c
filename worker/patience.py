"""Waiting, while a worker starts, for a server that restarts, loads, fails over or is full."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

import redis.exceptions

from lmpool.errors import LmpoolError, ServerUnreachable
from lmpool.reasons import Reasons
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
    reasons = Reasons()
    while True:
        try:
            return step()
        except (ServerUnreachable, redis.exceptions.RedisError) as error:
            passes = isinstance(error, ServerUnreachable) or is_lost(error) or is_full(error)
            left = deadline - time.monotonic()
            if not passes or left <= 0:
                raise
            if reasons.is_new(error):
                why = why_not_now(error)
                logger.warning("waiting for the server, %.0f s at most: %s", left, why)
        if stopped(PAUSE):
            raise LmpoolError("told to stop while waiting for the server")
