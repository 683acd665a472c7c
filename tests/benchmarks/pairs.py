"""``python -m tests.benchmarks.pairs OTHER``: this checkout against another, pair by pair.

OTHER is the folder of another checkout with its own .venv, say of the commit before. Both serve the
same prompts in turn, A B B A; a figure is the processor time of client, worker and server together
for a job or row, its ratio this / other taken pair by pair, with the 95 % interval of the mean. A
pair is the medians of several turns of each side, so that one burst of the machine is no pair.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.hf_workloads import random_llama
from tests.benchmarks.measure import progress
from tests.support.server import RealServer

SCENARIOS = {
    "jobs": "batch calls, rows of 1 KiB",
    "gathered": "gathered single calls, rows of 1 KiB",
    "rows": "batch calls, rows of 256 KiB",
    "steps": "batch calls of 32, rows of 64 KB",
    "blocking": "one prompt at a time, blocking",
    "awaited": "one prompt at a time, awaited",
    "particles": "hf engine alone, 32 particles",
    "distinct": "hf engine alone, distinct prompts",
}
# Two-sided 95 % of Student's t, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
HERE = Path(__file__).resolve().parents[2]
SIDE = Path(__file__).with_name("pairs_side.py")


class Side:
    """One checkout's process for one scenario."""

    def __init__(self, checkout: Path, *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LMPOOL_")}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [checkout / ".venv/bin/python", SIDE, checkout, *arguments],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        """Wait until it is warm."""
        self._read()

    def run(self, seed: int) -> tuple[float, float]:
        """Microseconds of processor time for a prompt, and prompts a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        count, spent, took = self._read()
        return 1e6 * sum(spent) / count, count / took

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Let it end."""
        self._process.communicate(timeout=60)


@contextmanager
def sides(scenario: str, other: Path) -> Iterator[tuple[Side, Side]]:
    """This checkout's process and the other's, both warm."""
    with ExitStack() as stack:
        made = []
        for name, checkout in (("this", HERE), ("other", other)):
            if scenario in ("particles", "distinct"):
                folder = stack.enter_context(random_llama())
                made.append(Side(checkout, scenario, folder))
            else:
                server = stack.enter_context(RealServer())
                made.append(Side(checkout, scenario, server.url, str(server.pid), name))
            stack.callback(made[-1].close)
            made[-1].ready()
        yield made[0], made[1]


def mean_and_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval."""
    mean = statistics.fmean(ratios)
    if len(ratios) < 2:
        return mean, math.inf
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return mean, STUDENT.get(len(ratios) - 1, 2.2) * error


def one_pair(this: Side, other: Side, pair: int, turns: int) -> tuple[float, float]:
    """Microseconds a prompt of both sides, the medians of their turns."""
    taken: tuple[list[float], list[float]] = [], []
    for turn in range(turns):
        seed = pair * turns + turn
        order = ((taken[0], this), (taken[1], other))
        for found, side in order if seed % 2 else order[::-1]:
            found.append(side.run(seed)[0])
    return statistics.median(taken[0]), statistics.median(taken[1])


def main(given: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout, with its .venv")
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}; or all")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5, help="of each side in a pair")
    options = parser.parse_args(given)
    unknown = [name for name in options.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario {unknown[0]!r}: there are {', '.join(SCENARIOS)}")
    print("| scenario | other, us | this, us | this / other | 95 % of the mean |")
    print("|---|---|---|---|---|")
    for scenario in options.scenarios or SCENARIOS:
        cost: dict[str, list[float]] = {"this": [], "other": []}
        with sides(scenario, options.other.resolve()) as (this, other):
            for pair in range(options.pairs):
                progress(f"{scenario}: pair {pair + 1} of {options.pairs}")
                taken = one_pair(this, other, pair, options.turns)
                cost["this"].append(taken[0])
                cost["other"].append(taken[1])
        ratios = [a / b for a, b in zip(cost["this"], cost["other"], strict=True)]
        mean, half = mean_and_interval(ratios)
        print(
            f"| {SCENARIOS[scenario]} | {statistics.median(cost['other']):,.1f} "
            f"| {statistics.median(cost['this']):,.1f} | {mean:.3f} "
            f"| {mean - half:.3f} to {mean + half:.3f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
