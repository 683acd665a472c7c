"""Whether a batch that begins is worth waiting with: whether those before it got company."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lmpool.worker.batching import Delivery

LONE_MOST: Final = 4
"""Batches in succession that waited in vain, after which the next one leaves at once."""
TRIES_AGAIN: Final = 128
"""And one in so many waits all the same, in case that others come by now."""


class Company:
    """Watches what comes to an idle worker. Owned by the intake's thread.

    A batch waits `timeout` seconds to fill; where nobody else is on the way, all that this does is
    to keep the one caller waiting. That nobody is cannot be known, but what would have been company
    is seen afterwards: jobs that came within `timeout` of the batch's first one, found while it
    was computed, or batches that follow each other faster than they could wait.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lone = 0
        """Batches in succession that no company was seen for."""
        self._came = float("-inf")
        self._sent = 0

    def is_likely(self, first: Delivery) -> bool:
        """Whether the batch that this job begins is likely to get company."""
        if first.came - self._came < self._timeout / 2:
            self._lone = 0
        self._came, self._sent = first.came, first.job.sent
        self._lone += 1
        return not self.is_missing or self._lone % TRIES_AGAIN == 0

    @property
    def is_missing(self) -> bool:
        """Whether batches have come without company for a while."""
        return self._lone > LONE_MOST

    def came(self) -> None:
        """Jobs came while the batch waited."""
        self._lone = 0

    def came_late(self, jobs: Sequence[Delivery]) -> None:
        """Jobs were found while the batch is computed: were they sent within its `timeout`?

        By what clients say, in whole milliseconds: what is put into several shards of a cluster is
        dated by several clocks.
        """
        soon = 1000 * self._timeout + 1
        if any(abs(found.job.sent - self._sent) <= soon for found in jobs):
            self._lone = 0
