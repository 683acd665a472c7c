"""The Hugging Face engine behind the pool, against the same model in the caller's process."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from lmpool.backends import tiny
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Prompts, WrongRows, make_prompts
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "hf"
LINE = "the hf engine on the tiny model, against genlm-backend and hand-batched transformers"

BY_HAND_BATCH = 32
"""Prompts in a forward pass by hand: 1,024 tokens, which a CPU does best."""
TOLERANCE = 1e-3
THREADS = 1
"""Of torch on every side: threads that wait for each other suffer most from what else runs."""
WARM_UP = 2**31
"""The number of a run that no measured run has."""

Rows = npt.NDArray[np.float32]
Side = Callable[[Prompts], Rows]


def measure(scale: Scale) -> Report:
    """Alternate between the pool and the model in this process."""
    count = scale.of(512, 64)
    watch = Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        worker = stack.enter_context(
            worker_process(
                server.url,
                "hf",
                alive=False,
                engine="hf",
                model="tiny",
                engine_opts={"threads": THREADS},
            )
        )
        worker.wait_until_alive(60)
        lm = stack.enter_context(connected(server.url, "hf"))
        vocab_size = lm.info.vocab_size
        found = facts(server.url, ("torch", "transformers", "genlm-backend"))
        sides: dict[str, Side] = {
            "pool": lm.batch_next_token_logprobs_sync,
            "transformers by hand": by_hand(),
        }
        if has_genlm():
            sides["genlm-backend, defaults"] = genlm()
            sides["genlm-backend, batch_size=64"] = genlm(batch_size=64)
        rows: dict[tuple[str, int], Rows] = {}

        def timed(name: str, side: Side) -> Callable[[int], float]:
            def run(number: int) -> float:
                prompts = make_prompts(count, vocab_size, number, 1)
                began = time.perf_counter()
                rows[name, number] = side(prompts)
                return count / (time.perf_counter() - began)

            return run

        for name, side in sides.items():
            timed(name, side)(WARM_UP)
        taken = alternate({n: timed(n, side) for n, side in sides.items()}, scale.runs)
    for (name, number), answered in rows.items():
        _compare(name, answered, rows["transformers by hand", number])
    report = Report(
        NAME, f"{count} distinct prompts of 32 tokens, rows of {vocab_size} float32, one worker"
    )
    for name, values in taken.items():
        report.add("Pace", Measured(name, "rows/s", tuple(values)))
    for name, values in taken.items():
        if name != "pool":
            report.add("Ratios", ratio(f"pool / {name}", taken["pool"], values))
    report.note(
        f"by hand: forward passes of {BY_HAND_BATCH} prompts, logits of the last token only, in "
        "the caller's process"
    )
    report.note("every side answers the same prompts; their rows are compared with those by hand")
    report.note(
        f"every side computes in float32 with {THREADS} thread of torch; the pool's client and "
        "server have the rest of the machine"
    )
    if not has_genlm():
        report.note("genlm-backend is not installed here: left out")
    report.facts = {**found, **watch.report()}
    return report


def has_genlm() -> bool:
    """Whether genlm-backend is installed."""
    try:
        return importlib.util.find_spec("genlm.backend") is not None
    except ModuleNotFoundError:
        return False


def by_hand() -> Side:
    """What one would write without a library: batches of equal length, no cache."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)

    model = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32).eval()

    def rows(prompts: Sequence[Sequence[int]]) -> Rows:
        parts = []
        with torch.inference_mode():
            for i in range(0, len(prompts), BY_HAND_BATCH):
                ids = torch.tensor(prompts[i : i + BY_HAND_BATCH])
                logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
                parts.append(torch.log_softmax(logits, dim=-1).numpy())
        return np.concatenate(parts)

    return rows


def genlm(**options: Any) -> Side:
    """genlm-backend's model in this process."""
    import torch
    from genlm.backend.llm import AsyncTransformer

    model = AsyncTransformer.from_name(tiny.path(), hf_opts={"dtype": torch.float32}, **options)

    def rows(prompts: Sequence[Sequence[int]]) -> Rows:
        found = asyncio.run(model.batch_next_token_logprobs(prompts))
        model.clear_cache()
        values: Rows = found.numpy()
        return values

    return rows


def _compare(name: str, rows: Rows, right: Rows) -> None:
    worst = float(np.abs(rows - right).max())
    if rows.shape != right.shape or not worst < TOLERANCE:
        raise WrongRows(f"{name}: rows differ by {worst} from those by hand")
