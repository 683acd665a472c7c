"""Memory of the Hugging Face engine over many distinct prompts, and how full its slots are."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from lmpool.backends import Request
from tests.benchmarks.hf_workloads import VOCAB_SIZE, random_llama
from tests.benchmarks.machine import Bystanders, facts, resident_bytes
from tests.benchmarks.measure import Measured, Report, Scale, progress, slope

NAME = "hf_memory"
LINE = "resident memory of the hf engine over 100,000 distinct prompts, and its KV bound"

KV_CACHE_BYTES = 16 << 20
LENGTH = 8
BATCH = 100
MOST_GROWTH = 4.0
"""MiB for each 100,000 prompts, once everything is warm."""


def measure(scale: Scale) -> Report:
    """One long run in a process of its own; `scale.runs` does not matter."""
    step, samples, warm = scale.of(10_000, 500), scale.of(10, 5), 2
    watch = Bystanders()
    resident: list[float] = []
    with random_llama() as folder:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(folder, theirs))
        process.start()
        try:
            for number in range(samples + 1):
                ours.send(step if number else BATCH)
                kept: dict[str, int] = ours.recv()
                assert process.pid is not None
                resident.append(resident_bytes(process.pid) / 2**20)
                progress(f"  {number * step:,} of {samples * step:,} prompts")
            ours.send(0)
            process.join(30)
        finally:
            process.kill()
    report = Report(
        NAME,
        f"{samples * step:,} distinct prompts of {LENGTH} tokens, {BATCH} a batch, rows of "
        f"{VOCAB_SIZE} float32, kv_cache_bytes={KV_CACHE_BYTES}",
    )
    report.add(
        "Resident memory",
        Measured(f"after {warm * step:,}", "MiB", (resident[warm],)),
        Measured("at the end", "MiB", (resident[-1],)),
    )
    if not scale.quick:
        prompts = [number * step / 100_000 for number in range(samples + 1)]
        grown = slope(prompts[warm:], resident[warm:])
        report.add("Growth", Measured("engine", "MiB/100k prompts", (grown,), at_most=MOST_GROWTH))
    report.add(
        "Keys and values",
        Measured("arena", "bytes", (kept["bytes"],), at_most=KV_CACHE_BYTES),
        Measured("positions held, at most", "slots", (kept["held"],), at_most=kept["slots"]),
        Measured("positions evicted", "slots", (kept["evicted"],)),
    )
    report.series = {f"MiB each {step:,} prompts": resident}
    report.note("growth by least squares over the samples after the second")
    report.facts = {**facts(None, ("torch", "transformers")), **watch.report()}
    return report


def _serve(folder: str, pipe: Connection[Any, Any]) -> None:
    from lmpool.backends.hf import HFEngine

    engine = HFEngine(folder, device="cpu", threads=1, kv_cache_bytes=KV_CACHE_BYTES)
    rng = np.random.default_rng(0)
    most = 0
    while count := pipe.recv():
        for _ in range(count // BATCH):
            prompts = rng.integers(0, VOCAB_SIZE, (BATCH, LENGTH)).astype(np.uint32)
            engine.submit([Request(bytes([i]), prompt) for i, prompt in enumerate(prompts)])
            while engine.in_flight():
                assert all(outcome.error is None for outcome in engine.step())
            statistics = engine.statistics()
            assert statistics is not None
            most = max(most, statistics.held)
        pipe.send(
            {
                "bytes": engine.kv_cache_bytes(),
                "held": most,
                "slots": statistics.slots,
                "evicted": statistics.evicted,
            }
        )
