"""``python -m tests.simulation``: pools of 10, 100 and 1,000 workers as a table and a drawing.

Takes about two minutes. The drawing is one of the documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lmpool.affinity import lanes_in_use
from tests.simulation.drawing import Panel, draw
from tests.simulation.pool import Load, Outcome, Pool, moved

DRAWING: Final = Path(__file__).parents[2] / "docs" / "images" / "lanes.svg"
UTILIZATIONS: Final = (0.1, 0.3, 0.6, 0.9)
POOLS: Final = ((10, 1024), (100, 1024), (1000, 1024), (1000, 16_384))
"""Workers, and the most lanes that there may be."""


def outcome(workers: int, lanes: int, utilization: float, affinity: bool) -> Outcome:
    """One pool under one load: eight groups of prompts for each worker, which keeps 16 prefixes."""
    jobs = min(300 * workers, 20_000)
    groups = 8 * workers
    load = Load(workers, utilization, jobs, groups, kept=16, affinity=affinity, most_lanes=lanes)
    return Pool(load).run()


def name_of(workers: int, lanes: int) -> str:
    """A pool, as the legend has it."""
    return f"{workers:,} workers, {lanes_in_use(workers, lanes):,} lanes"


def main() -> int:
    """Simulate, print, draw."""
    stolen: dict[str, Sequence[float]] = {}
    tokens: dict[str, Sequence[float]] = {}
    print("| pool | load | stolen | busiest / mean | tokens a job | one lane | joins, deaths |")
    print("|---|---|---|---|---|---|---|")
    for workers, lanes in POOLS:
        name, used = name_of(workers, lanes), lanes_in_use(workers, lanes)
        shares = [moved(workers, used, join=join) * workers for join in (True, False)]
        found = [outcome(workers, lanes, u, True) for u in UTILIZATIONS]
        for u, mine in zip(UTILIZATIONS, found, strict=True):
            other = outcome(workers, lanes, u, False)
            print(
                f"| {name} | {u} | {mine.stolen_share:.3f} | {mine.imbalance:.2f} "
                f"| {mine.tokens_each:.0f} | {other.tokens_each:.0f} "
                f"| {shares[0]:.2f}, {shares[1]:.2f} of a share |",
                flush=True,
            )
        stolen[name] = [mine.stolen_share for mine in found]
        tokens[name] = [mine.tokens_each for mine in found]
    tokens["one lane for all, 100 workers"] = [
        outcome(100, 1, u, False).tokens_each for u in UTILIZATIONS
    ]
    panels = [
        Panel("Jobs taken by others than their home", "share", UTILIZATIONS, stolen, 0.6),
        Panel("Tokens computed for a prompt of 520", "tokens", UTILIZATIONS, tokens, 540),
    ]
    DRAWING.write_text(draw(panels), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
