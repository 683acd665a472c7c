"""Memory of a long text's scores: what a process takes at its peak beside the model."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.benchmarks.hf_workloads import LLAMA, random_llama
from tests.benchmarks.machine import Bystanders, facts, resident_bytes
from tests.benchmarks.measure import Measured, Report, Scale

NAME = "scores_memory"
LINE = "peak memory of the scores of 8,000 positions at V=128,256"

VOCAB_SIZE: Final = 128_256
MOST: Final = 256.0
"""MiB above the model and the text's keys and values."""
WANTS: Final = {"scores": 0, "with the likeliest 20 of each position": 20}
HEAD_SIZE: Final = LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
POSITION_BYTES: Final = (
    2 * 4 * LLAMA["num_hidden_layers"] * LLAMA["num_key_value_heads"] * HEAD_SIZE
)
"""Of the keys and values of one position."""
KEPT: Final = {"trunk in pieces": None, "nothing kept": 0}
"""`kv_cache_bytes`: where nothing is kept, a text is one forward pass."""


def measure(scale: Scale) -> Report:
    """Each in a process of its own; `scale.runs` does not matter."""
    watch, positions = Bystanders(), scale.of(8_000, 500)
    vocab_size = scale.of(VOCAB_SIZE, 4_000)
    report = Report(NAME, f"{positions:,} positions at V={vocab_size:,}, float32, 1 thread")
    context = multiprocessing.get_context("spawn")
    with random_llama(vocab_size=vocab_size, max_position_embeddings=positions) as folder:
        for name, kept in list(KEPT.items())[: scale.of(2, 1)]:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(folder, kept, positions, theirs))
            process.start()
            try:
                for what in WANTS:
                    above = ours.recv() / 2**20
                    goal = MOST if kept is None and not scale.quick else None
                    report.add(name, Measured(what, "MiB", (above,), at_most=goal))
                process.join(30)
            finally:
                process.kill()
    report.note("peak resident memory above that of the loaded model, less the keys and values")
    report.facts = {**facts(None, ("torch", "transformers")), **watch.report()}
    return report


def _serve(folder: str, kept: int | None, positions: int, pipe: Connection[Any, Any]) -> None:
    """Send the bytes that each of the wants takes above the model and the keys and values."""
    from lmpool.backends import Request
    from lmpool.backends.hf import HFEngine
    from lmpool.wants import Score

    options: dict[str, Any] = {} if kept is None else {"kv_cache_bytes": kept}
    engine = HFEngine(folder, device="cpu", threads=1, **options)
    rng = np.random.default_rng(0)

    def score(length: int, top: int) -> None:
        text = rng.integers(0, engine.info.vocab_size, length + 1).astype(np.uint32)
        engine.clear_cache()
        engine.submit([Request(b"text", text, None, Score(1, top))])
        while engine.in_flight():
            for outcome in engine.step():
                if outcome.error is not None:
                    raise outcome.error

    for number, top in enumerate(WANTS.values()):
        score(8, top)  # what is imported and allocated once
        before = resident_bytes(os.getpid())
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        score(positions, top)
        status = Path("/proc/self/status").read_text().splitlines()
        (peak,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:")]
        # Memory for keys and values counts once it is written: by the first text.
        states = 0 if kept is not None or number else POSITION_BYTES * positions
        pipe.send(peak - before - states)
