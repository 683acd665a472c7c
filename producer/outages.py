"""Shards that are away while others are served: what waits for each, and for how long already."""

from __future__ import annotations

import time
from typing import Final

from lmpool.keys import ShardKeys
from lmpool.producer.flights import Flight
from lmpool.wants import Digest

LOOK_EVERY: Final = 0.05
"""Seconds between two looks whether one is back."""


class Outage:
    """One shard that is away."""

    __slots__ = ("claims", "error", "since", "withdrawn")

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.claims: list[Flight] = []
        """Flights that could not be claimed."""
        self.withdrawn: list[tuple[int, Digest]] = []
        """What it could not be told that nobody waits for."""
        self.error: Exception | None = None
        """What was met there last."""

    def note(self, _: ShardKeys, error: Exception) -> None:
        """It was asked, and is away still."""
        self.error = error


class Outages:
    """Those of one client, by shard: after a move its number is another's. Owned by the sender's
    thread."""

    def __init__(self) -> None:
        self._away: dict[ShardKeys, Outage] = {}
        self._next = 0.0

    def __bool__(self) -> bool:
        return bool(self._away)

    def of(self, shard: ShardKeys) -> Outage:
        """The outage of a shard, which begins now if there is none."""
        found = self._away.get(shard)
        if found is None:
            found = self._away[shard] = Outage()
        return found

    def due_in(self) -> float | None:
        """Seconds until it is time to look; None while nothing is away."""
        return max(0.0, self._next - time.monotonic()) if self._away else None

    def looked(self) -> list[tuple[ShardKeys, Outage]]:
        """All of them, which are looked at now."""
        self._next = time.monotonic() + LOOK_EVERY
        return list(self._away.items())

    def end(self, shard: ShardKeys) -> Outage | None:
        """A shard is back, or nobody waits for it any longer."""
        return self._away.pop(shard, None)
