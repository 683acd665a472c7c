"""``python -m tests.chaos.overhead``: what recovery costs while nothing happens.

One server, two pools whose workers differ in one thing: whether they look after dead workers' jobs,
their own engine and what they hold. Runs alternate; the ratio is taken pair by pair.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

import lmpool
from tests.support.clients import connected
from tests.support.faults import Faults
from tests.support.server import RealServer
from tests.support.workers import worker_process

RUNS = 11
PROMPTS = 20_000
PER_CALL = 5_000


def work(lm: lmpool.PooledLM, processes: Sequence[psutil.Process], run: int) -> tuple[float, float]:
    """Rows a second, and microseconds of processor time for each, of prompts never asked before."""
    prompts = [[run % 256, i % 256, i >> 8, 1, 2, 3, 4, 5] for i in range(PROMPTS)]
    spent, began = processor_time(processes), time.perf_counter()
    for i in range(0, PROMPTS, PER_CALL):
        lm.batch_next_token_logprobs_sync(prompts[i : i + PER_CALL])
    took = time.perf_counter() - began
    return PROMPTS / took, 1e6 * (processor_time(processes) - spent) / PROMPTS


def processor_time(processes: Sequence[psutil.Process]) -> float:
    """Seconds that these have spent."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    """Print pace and processor time of both, and the ratios."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmpool-overhead-"))
        server = stack.enter_context(RealServer())
        faults = Faults(Path(folder))
        pools = {}
        for name, unguarded in (("on", False), ("off", True)):
            settings = {"batch_size": 512, **faults.settings(unguarded=unguarded)}
            worker = stack.enter_context(worker_process(server.url, name, **settings))
            lm = stack.enter_context(connected(server.url, name, cache_bytes=0))
            processes = [psutil.Process(pid) for pid in (os.getpid(), server.pid, worker.pid)]
            pools[name] = (lm, processes)
            work(lm, processes, 255)  # warm
        found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
        for run in range(RUNS):
            for name in ("on", "off") if run % 2 else ("off", "on"):
                found[name].append(work(*pools[name], run))
    for place, what in enumerate(("rows/s", "us of processor time a row, of all three")):
        on, off = ([sample[place] for sample in found[name]] for name in ("on", "off"))
        ratios = [a / b for a, b in zip(on, off, strict=True)]
        print(
            f"{what}: recovery on {statistics.median(on):,.1f}, off {statistics.median(off):,.1f}, "
            f"on / off {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"medians of {RUNS}"
        )


if __name__ == "__main__":
    main()
