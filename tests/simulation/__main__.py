"""``python -m tests.simulation``: pools of 10 to 1,000 workers as a table and a drawing.

Takes about six minutes. The drawing is one of the documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Final

from lmpool.affinity import lanes_in_use
from tests.simulation.drawing import Panel, draw
from tests.simulation.pool import Load, Outcome, Pool, moved

DRAWING: Final = Path(__file__).parents[2] / "docs" / "images" / "lanes.svg"
UTILIZATIONS: Final = (0.1, 0.3, 0.6, 0.9)
DRAWN: Final = ((10, 1024), (100, 1024), (1000, 1024), (1000, 16_384))
"""Workers, and the most lanes that there may be."""
POOLS: Final = (*DRAWN[:2], (256, 512), (256, 1024), (256, 4096), *DRAWN[2:])
"""Those of the table."""
SEEDS: Final = 3
"""Draws of prompts of which the mean is told: which of them share a worker is chance."""


def outcomes(workers: int, lanes: int, utilization: float) -> list[Outcome]:
    """One pool under one load, with homes."""
    load = load_of(workers, lanes, utilization, affinity=True)
    return [Pool(replace(load, seed=seed)).run() for seed in range(SEEDS)]


def load_of(workers: int, lanes: int, utilization: float, *, affinity: bool) -> Load:
    """What is asked: eight groups of prompts for each worker, which keeps 16 prefixes."""
    jobs = min(300 * workers, 20_000)
    groups = 8 * workers
    return Load(workers, utilization, jobs, groups, kept=16, affinity=affinity, most_lanes=lanes)


@cache
def one_lane(workers: int, utilization: float) -> float:
    """Tokens computed a job, where all workers read one lane."""
    return Pool(load_of(workers, 1, utilization, affinity=False)).run().tokens_each


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
        all_stolen, all_tokens = [], []
        for u in UTILIZATIONS:
            found = outcomes(workers, lanes, u)
            all_stolen.append(fmean(mine.stolen_share for mine in found))
            all_tokens.append(fmean(mine.tokens_each for mine in found))
            print(
                f"| {name} | {u} | {all_stolen[-1]:.3f} "
                f"| {fmean(mine.imbalance for mine in found):.2f} "
                f"| {all_tokens[-1]:.0f} | {one_lane(workers, u):.0f} "
                f"| {shares[0]:.2f}, {shares[1]:.2f} of a share |",
                flush=True,
            )
        if (workers, lanes) in DRAWN:
            stolen[name], tokens[name] = all_stolen, all_tokens
    tokens["one lane for all, 100 workers"] = [one_lane(100, u) for u in UTILIZATIONS]
    panels = [
        Panel("Jobs taken by others than their home", "share", UTILIZATIONS, stolen, 0.6),
        Panel("Tokens computed for a prompt of 520", "tokens", UTILIZATIONS, tokens, 540),
    ]
    DRAWING.write_text(draw(panels), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
