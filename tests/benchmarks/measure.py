"""Alternating runs, and what is said of them."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class NotHere(Exception):
    """A benchmark cannot be taken on this machine."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to measure: alternating runs of each side, small ones with `quick`."""

    runs: int
    quick: bool = False
    device: str = "cuda"
    """Of what is measured on a GPU alone."""

    def of(self, full: int, quick: int) -> int:
        """A size: the full one, or the quick one."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure, taken once a run. `at_least` and `at_most` are the goal for its median."""

    what: str
    unit: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.what!r} was never measured")

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def goal(self) -> str:
        """The goal in words, or nothing."""
        if self.at_least is not None:
            return f">= {number(self.at_least)}"
        return "" if self.at_most is None else f"<= {number(self.at_most)}"

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the goal; None without one."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return None if self.at_most is None else self.median <= self.at_most

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "what": self.what,
            "unit": self.unit,
            "min": min(self.values),
            "median": self.median,
            "max": max(self.values),
            "values": list(self.values),
            "goal": self.goal,
            "reached": self.reached,
        }


def ratio(
    what: str,
    above: Sequence[float],
    below: Sequence[float],
    at_least: float | None = None,
    at_most: float | None = None,
) -> Measured:
    """`above / below`, run by run: what disturbs the machine for a while disturbs both."""
    values = tuple(a / b for a, b in zip(above, below, strict=True))
    return Measured(what, "times", values, at_least, at_most)


def spread(figure: Measured, at_most: float | None = None) -> Measured:
    """How far a figure's runs lie apart, as a part of its median."""
    apart = (max(figure.values) - min(figure.values)) / figure.median
    return Measured(f"{figure.what}: spread over runs", "of the median", (apart,), at_most=at_most)


@dataclass(slots=True)
class Report:
    """What one benchmark found: figures under headings, and what to know of them."""

    name: str
    title: str
    figures: dict[str, list[Measured]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, heading: str, *figures: Measured) -> None:
        """Put figures under a heading."""
        self.figures.setdefault(heading, []).extend(figures)

    def note(self, text: str) -> None:
        """Say what a reader of the figures must know."""
        self.notes.append(text)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "facts": self.facts,
            "figures": {
                heading: [figure.as_dict() for figure in figures]
                for heading, figures in self.figures.items()
            },
            "series": self.series,
            "notes": self.notes,
        }


def alternate(sides: Mapping[str, Callable[[int], T]], runs: int) -> dict[str, list[T]]:
    """Run each side once, then each again, `runs` times over: A B A B ...

    A side is called with the number of its run, from 0.
    """
    taken: dict[str, list[T]] = {name: [] for name in sides}
    for run in range(runs):
        for name, side in sides.items():
            progress(f"  run {run + 1} of {runs}: {name}")
            gc.collect()
            taken[name].append(side(run))
    return taken


def progress(text: str) -> None:
    """Say on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)


def number(value: float) -> str:
    """A figure with three digits that count: 15,234, 12.3, 0.0451."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1 or size == 0:
        return f"{value:.2f}"
    return f"{value:.3g}"


def quantile(values: Sequence[float], part: float) -> float:
    """The value that `part` of them are at or below (the nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(part * len(ordered)) - 1))]


def slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Growth of `values` for each unit of `places`, by least squares."""
    return float(statistics.linear_regression(places, values).slope)
