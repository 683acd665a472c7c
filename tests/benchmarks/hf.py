"""The Hugging Face engine, alone and behind a pool, against the model in the caller's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from tests.benchmarks.hf_bound import by_redis_alone
from tests.benchmarks.hf_peers import Side, by_hand, engine, genlm, has_genlm
from tests.benchmarks.hf_workloads import VOCAB_SIZE, Rows, Workload, random_llama, workloads
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import WrongRows, forget_results
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "hf"
LINE = "the hf engine, alone and pooled, against genlm-backend and hand-batched transformers"

ENGINE, POOL, HAND, BOUND = "engine", "pool", "by hand", "Redis alone"
GENLM, PREPARED = "genlm-backend", "genlm-backend after cache_kv"

TITLES = {
    "particles": "Particles: {count} of one 256-token prompt, {steps} steps",
    "resampled": "The same, resampled at each step",
    "long": "{count} particles of one {shared}-token prompt, {steps} steps",
    "distinct": "{count} distinct prompts of 32 tokens",
    "single": "{steps} prompts of 32 tokens, one after another",
}
GOALS: dict[str, dict[tuple[str, str], float]] = {
    "particles": {
        (ENGINE, GENLM): 40.0,
        (ENGINE, PREPARED): 6.0,
        (ENGINE, HAND): 0.8,
        (POOL, GENLM): 70.0,
        (POOL, HAND): 0.78,
        (POOL, ENGINE): 0.72,
    },
    "distinct": {(ENGINE, GENLM): 2.5, (ENGINE, HAND): 0.9},
    "single": {(ENGINE, GENLM): 5.0, (POOL, ENGINE): 0.85},
}
TOLERANCE = 1e-3
THREADS = 1
"""Of torch on every side: threads that wait for each other suffer most from what else runs."""
WARM_UP = 2**31
"""The number of a run that no measured run has."""


def measure(scale: Scale) -> Report:
    """Alternate between the sides, workload by workload."""
    import torch

    torch.set_num_threads(THREADS)
    watch = Bystanders()
    with ExitStack() as stack:
        folder = stack.enter_context(random_llama())
        server = stack.enter_context(RealServer())
        found = facts(server.url, ("torch", "transformers", "genlm-backend"))
        sides = {
            HAND: by_hand(folder),
            ENGINE: engine(folder, THREADS),
            POOL: _pool(stack, server, folder),
            BOUND: stack.enter_context(by_redis_alone(server.url, folder, THREADS)),
        }
        if has_genlm():
            sides[GENLM] = genlm(folder, prepared=False)
            sides[PREPARED] = genlm(folder, prepared=True)
        report = Report(
            NAME, f"A Llama of random weights, rows of {VOCAB_SIZE} float32, {THREADS} thread"
        )
        for name in TITLES:
            _measure_one(report, name, sides, scale, partial(forget_results, server))
    report.note("by hand: for particles one DynamicCache with a row for each, else batches of 32")
    report.note(
        "rows/s of processor time: what one thread gives that it need not share, without waits"
    )
    report.note(
        "pool: Redis, one worker process, and a client in this one, which keeps no rows; what a "
        "run left on the server is deleted"
    )
    report.note(
        "Redis alone: the engine in a process that reads prompts off a list, stores rows and says "
        "so on another list, for one caller and with no promise of a pool's: what any could reach"
    )
    report.note(
        "every side but genlm-backend's runs the like of each workload just before it: memory "
        "that the machine gives anew, as to who was idle, takes longer than a row's copying"
    )
    report.note(
        "every side starts each workload with empty caches and answers the same prompts, the pool "
        "prompts that it was never asked; cache_kv is part of the time; all rows are compared"
    )
    if has_genlm():
        report.note(
            "genlm-backend without cache_kv is left out where particles are resampled, which takes "
            "it as long as without, and of the longest prompt, of which it would hold the logits "
            "of every position of every particle: 4 GB a step"
        )
    else:
        report.note("genlm-backend is not installed here: left out")
    report.facts = {**found, **watch.report()}
    return report


def _measure_one(
    report: Report, name: str, sides: dict[str, Side], scale: Scale, forget: Callable[[], None]
) -> None:
    here = {
        side: run
        for side, run in sides.items()
        if not (side == PREPARED and name in ("distinct", "single"))
        and not (side == GENLM and name in ("resampled", "long"))
    }
    rows: dict[tuple[str, int], Rows] = {}

    def timed(side: str) -> Callable[[int], tuple[float, float]]:
        def run(number: int) -> tuple[float, float]:
            if side not in (GENLM, PREPARED):  # which would take many minutes
                here[side](workloads(scale, WARM_UP + number)[name])
                forget()
            work = workloads(scale, number)[name]
            began, spent = time.perf_counter(), time.process_time()
            rows[side, number] = here[side](work)
            seconds, spent = time.perf_counter() - began, time.process_time() - spent
            forget()
            if side != HAND:
                _compare(side, work, rows.pop((side, number)), rows[HAND, number])
            return work.rows / seconds, work.rows / spent

        return run

    small = Scale(1, quick=True)
    for side, run in here.items():
        run(workloads(small, WARM_UP + list(here).index(side))[name])
    both = alternate({side: timed(side) for side in here}, scale.runs)
    taken = {side: [pace for pace, _ in pairs] for side, pairs in both.items()}
    work = workloads(scale, 0)[name]
    heading = TITLES[name].format(
        count=len(work.batches[0]), steps=len(work.batches), shared=len(work.shared)
    )
    for side, values in taken.items():
        report.add(heading, Measured(side, "rows/s", tuple(values)))
    for side, found in both.items():
        if side not in (POOL, BOUND):
            spent = tuple(value for _, value in found)
            report.add(heading, Measured(side, "rows/s of processor time", spent))
    goals = GOALS.get(name, {})
    pairs = [(over, under) for over in (ENGINE, POOL) for under in (GENLM, PREPARED, HAND)]
    pairs += [(POOL, ENGINE), (POOL, BOUND), (BOUND, ENGINE)]
    for over, under in pairs:
        if under in taken:
            goal = None if scale.quick else goals.get((over, under))
            report.add(heading, ratio(f"{over} / {under}", taken[over], taken[under], goal))


def _pool(stack: ExitStack, server: RealServer, folder: str) -> Side:
    worker = stack.enter_context(
        worker_process(
            server.url,
            "hf",
            alive=False,
            engine="hf",
            model=folder,
            engine_opts={"device": "cpu", "threads": THREADS},
        )
    )
    worker.wait_until_alive()
    lm = stack.enter_context(connected(server.url, "hf", cache_bytes=0))

    def run(work: Workload) -> Rows:
        return np.concatenate([lm.batch_next_token_logprobs_sync(batch) for batch in work.batches])

    return run


def _compare(side: str, work: Workload, rows: Rows, right: Rows) -> None:
    worst = float(np.abs(rows - right).max())
    if rows.shape != right.shape or not worst < TOLERANCE:
        raise WrongRows(f"{side}, {work.name}: rows differ by {worst} from those by hand")
