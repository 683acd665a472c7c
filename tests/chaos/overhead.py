"""``python -m tests.chaos.overhead``: what recovery costs while nothing happens.

One server, two pools whose workers differ in one thing: whether they look after dead workers' jobs,
their own engine and what they hold. Runs alternate; the ratio is taken pair by pair.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import lmpool
from tests.support.clients import connected
from tests.support.faults import Faults
from tests.support.server import RealServer
from tests.support.workers import worker_process

RUNS = 11
PROMPTS = 20_000
PER_CALL = 5_000


def pace(lm: lmpool.PooledLM, run: int) -> float:
    """Rows a second of so many prompts, none of them asked before."""
    prompts = [[run % 256, i % 256, i >> 8, 1, 2, 3, 4, 5] for i in range(PROMPTS)]
    began = time.perf_counter()
    for i in range(0, PROMPTS, PER_CALL):
        lm.batch_next_token_logprobs_sync(prompts[i : i + PER_CALL])
    return PROMPTS / (time.perf_counter() - began)


def main() -> None:
    """Print the pace of both and the ratio."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmpool-overhead-"))
        server = stack.enter_context(RealServer())
        faults = Faults(Path(folder))
        clients = {}
        for name, unguarded in (("on", False), ("off", True)):
            settings = {"batch_size": 512, **faults.settings(unguarded=unguarded)}
            stack.enter_context(worker_process(server.url, name, **settings))
            clients[name] = stack.enter_context(connected(server.url, name, cache_bytes=0))
            pace(clients[name], 255)  # warm
        found: dict[str, list[float]] = {"on": [], "off": []}
        for run in range(RUNS):
            for name in ("on", "off") if run % 2 else ("off", "on"):
                found[name].append(pace(clients[name], run))
    ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
    print(f"recovery on   {statistics.median(found['on']):,.0f} rows/s (median of {RUNS})")
    print(f"recovery off  {statistics.median(found['off']):,.0f} rows/s")
    low, high = min(ratios), max(ratios)
    middle = statistics.median(ratios)
    print(f"on / off      {middle:.3f} (from {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
