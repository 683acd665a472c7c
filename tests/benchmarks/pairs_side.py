"""One side of `tests.benchmarks.pairs`: a client and a worker of the checkout it runs in.

Run by path with another checkout's Python, it may use only what every release has: the client's
public methods, the worker's settings, and the hf engine's interface. It reads orders and writes
answers, a line of JSON each.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

VOCAB = {
    "jobs": 256, "gathered": 256, "rows": 65_536, "steps": 16_000, "blocking": 256, "awaited": 256,
}  # fmt: skip
COUNT = {
    "jobs": 40_000, "gathered": 30_000, "rows": 2_000, "steps": 6_400, "blocking": 3_000,
    "awaited": 3_000,
}  # fmt: skip
PER_CALL = {
    "jobs": 5_000, "gathered": 5_000, "rows": 250, "steps": 32, "blocking": 1, "awaited": 1,
}  # fmt: skip


class PoolSide:
    """A pool of one worker with the mock engine, measured with its client and its server."""

    def __init__(self, scenario: str, url: str, server_pid: int, name: str) -> None:
        import lmpool

        self.scenario = scenario
        settings = {
            "LMPOOL_URL": url,
            "LMPOOL_POOL": name,
            "LMPOOL_ENGINE": "mock",
            "LMPOOL_ENGINE_OPTS": json.dumps({"vocab_size": VOCAB[scenario]}),
            "LMPOOL_LOG_LEVEL": "warning",
            "LMPOOL_RESULT_TTL": "3" if scenario in ("rows", "steps") else "600",
            "LMPOOL_BATCH_SIZE": "512" if scenario in ("jobs", "gathered") else "64",
        }
        arq = [sys.executable, "-m", "arq", "lmpool.worker.WorkerSettings"]
        self.worker = subprocess.Popen(arq, env={**os.environ, **settings}, stderr=sys.stderr)
        self.lm: Any = lmpool.connect(url, name, framework="numpy", cache_bytes=0)
        self.lm.wait_for_workers_sync(60)
        self.processes = [psutil.Process(p) for p in (os.getpid(), self.worker.pid, server_pid)]

    def run(self, seed: int, count: int | None = None) -> tuple[int, list[float], float]:
        """How many prompts, processor seconds of client, worker and server, and wall seconds."""
        count = COUNT[self.scenario] if count is None else count
        rng = np.random.default_rng((seed, len(self.scenario)))
        prompts = rng.integers(0, VOCAB[self.scenario], (count, 32)).tolist()
        stored = self._computed()
        before, began = self._spent(), time.perf_counter()
        step = PER_CALL[self.scenario]
        if self.scenario == "awaited":
            asyncio.run(self._one_by_one(prompts))
        for i in range(0, count, step) if self.scenario != "awaited" else ():
            part = prompts[i : i + step]
            if self.scenario == "gathered":
                asyncio.run(self._gather(part))
            elif self.scenario == "blocking":
                self.lm.next_token_logprobs_sync(part[0])
            else:
                self.lm.batch_next_token_logprobs_sync(part)
        while self._computed() < stored + count:  # what lies near, callers have before
            if time.perf_counter() - began > 300.0:
                raise RuntimeError(f"{self._computed() - stored} of {count} rows were stored")
            time.sleep(0.02)  # a look takes processor time, which is what is measured
        took = time.perf_counter() - began
        return count, [b - a for a, b in zip(before, self._spent(), strict=True)], took

    async def _gather(self, prompts: list[list[int]]) -> None:
        await asyncio.gather(*map(self.lm.next_token_logprobs, prompts))

    async def _one_by_one(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            await self.lm.next_token_logprobs(prompt)

    def _computed(self) -> int:
        found: int = self.lm.pool_statistics_sync()["computed"]
        return found

    def _spent(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self.processes]

    def close(self) -> None:
        """End client and worker."""
        self.lm.close()
        self.worker.terminate()
        self.worker.wait(30)


class EngineSide:
    """The hf engine in this process."""

    def __init__(self, scenario: str, folder: str) -> None:
        import torch

        from lmpool.backends import Request
        from lmpool.backends.hf import HFEngine

        torch.set_num_threads(1)
        self.make: Callable[..., Any] = Request
        self.scenario = scenario
        self.engine = HFEngine(folder, device="cpu", threads=1)

    def run(self, seed: int, count: int | None = None) -> tuple[int, list[float], float]:
        """How many prompts, processor seconds of this process, and wall seconds."""
        rng = np.random.default_rng(seed)
        batches = self._particles(rng) if self.scenario == "particles" else self._distinct(rng)
        if count is not None:
            batches = batches[:1]
        self.engine.clear_cache()
        before, began = time.process_time(), time.perf_counter()
        for batch in batches:
            self.engine.submit(
                [self.make(b"%d" % n, np.array(p, np.uint32)) for n, p in enumerate(batch)]
            )
            while self.engine.in_flight():
                for outcome in self.engine.step():
                    outcome.logprobs()
        spent, took = time.process_time() - before, time.perf_counter() - began
        return sum(map(len, batches)), [spent], took

    @staticmethod
    def _particles(rng: np.random.Generator) -> list[list[list[int]]]:
        shared = rng.integers(0, 16_000, 256).tolist()
        drawn = rng.integers(0, 16_000, (32, 32)).tolist()
        return [[shared + own[: step + 1] for own in drawn] for step in range(32)]

    @staticmethod
    def _distinct(rng: np.random.Generator) -> list[list[list[int]]]:
        prompts: list[list[int]] = rng.integers(0, 16_000, (256, 32)).tolist()
        return [prompts]

    def close(self) -> None:
        """Free the model."""
        self.engine.close()


def main() -> None:
    """Serve: first what to measure, then one seed a line."""
    checkout, scenario, *rest = sys.argv[1:]
    # By path: this file's own folder must not lend the other checkout's modules.
    sys.path[0] = str(Path(checkout).resolve())
    os.environ["PYTHONPATH"] = sys.path[0]
    side: PoolSide | EngineSide
    if scenario in VOCAB:
        url, pid, name = rest
        side = PoolSide(scenario, url, int(pid), name)
    else:
        side = EngineSide(scenario, rest[0])
    import lmpool

    assert Path(lmpool.__file__).is_relative_to(sys.path[0]), lmpool.__file__
    side.run(2**20, 64)  # everything is imported, connected and allocated once
    side.run(2**21)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(side.run(int(line))), flush=True)
    side.close()


if __name__ == "__main__":
    main()
