"""How values are spread, as a histogram of Prometheus has it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence


class Spread:
    """Counts values by buckets. One thread adds, any thread reads.

    Prometheus' own histograms take a lock for each value; here a batch's values cost a few hundred
    nanoseconds each, in plain numbers.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """How many were at most each bound, and above the one before; the last, above all."""
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_all(self, values: Sequence[float]) -> None:
        """Count some."""
        bounds, counts = self.bounds, self.counts
        for value, number in Counter(values).items():  # those of a batch are few different ones
            counts[bisect_left(bounds, value)] += number
        self.total += sum(values)

    def cumulated(self) -> list[tuple[str, float]]:
        """How many were at most each bound, the last one being all: ``le`` and its number."""
        found: list[tuple[str, float]] = []
        passed = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            passed += count
            found.append((bound, float(passed)))
        return found
