"""Lanes with homes: who meets whom, and what homes cost where they are of no use.

Engines sleep, so that many workers fit on few cores; what caches save is counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import lmpool
from lmpool.affinity import own_lanes
from tests.benchmarks.affinity_kept import CALLERS, SETTLED, TOY, Groups, computed
from tests.benchmarks.affinity_kept import PREFIX as KEPT_PREFIX
from tests.benchmarks.hf_workloads import random_llama
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, ratio
from tests.benchmarks.pool import check_rows, make_prompts
from tests.support.clients import connected
from tests.support.pools import read_batches
from tests.support.server import RealServer
from tests.support.workers import WorkerProcess

NAME = "affinity"
LINE = "lanes with homes: prompts that meet their home, work that is stolen, unequal workers"

VOCAB_SIZE = 256
LANES = 64
PREFIX = 512


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers with engines that sleep, each with a log."""

    lm: lmpool.PooledLM
    logs: dict[str, Path]
    """By a worker's name in the pool."""

    def names(self) -> list[str]:
        """The workers, in the order in which they were started."""
        return [*self.logs]

    def jobs(self, since: float) -> dict[str, list[int]]:
        """The tokens of each batch that each worker began since then, in their order."""
        return {
            name: [batch.tokens for batch in read_batches(log) if batch.start >= since]
            for name, log in self.logs.items()
        }

    def prompts_each(self, since: float) -> list[int]:
        """How many prompts each has had since then."""
        return [
            sum(batch.size for batch in read_batches(log) if batch.start >= since)
            for log in self.logs.values()
        ]


@contextmanager
def pool_of(
    server: RealServer,
    name: str,
    delays: Sequence[float],
    lanes: int,
    batch_size: int,
    settled: float,
) -> Iterator[Pool]:
    """A pool of a worker for each delay, seconds that a batch of its takes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        workers = []
        for number, delay in enumerate(delays):
            log = folder / f"{number}"
            engine = {"vocab_size": VOCAB_SIZE, "delay": delay, "log": str(log)}
            settings: dict[str, Any] = {"engine_opts": engine, "log_level": "warning"}
            worker = WorkerProcess(server.url, name, lanes=lanes, batch_size=batch_size, **settings)
            stack.callback(worker.close)
            workers.append((worker, log))
        logs = {worker.wait_until_alive()["id"]: log for worker, log in workers}
        time.sleep(settled)
        yield Pool(stack.enter_context(connected(server.url, name, cache_bytes=0)), logs)


def with_prefix(number: int, own: int, shared: int = PREFIX) -> list[int]:
    """A prompt of a group: its first tokens are the group's, and its length tells which."""
    head = np.random.default_rng(number).integers(0, VOCAB_SIZE, shared + number).tolist()
    return [*head, own % VOCAB_SIZE, own // VOCAB_SIZE % VOCAB_SIZE]


def met_home(server: RealServer, run: int, prompts: int, settled: float) -> float:
    """A prompt each 50 ms of 16 groups, four workers: the share that met its home."""
    with pool_of(server, f"low-{run}", [0.005] * 4, LANES, 8, settled) as pool:
        names, place = pool.names(), pool.lm.info.placement()
        homes = {lane: name for name in names for lane in own_lanes(name, names, 0, LANES)}
        began, expected = time.monotonic(), Counter[tuple[str, int]]()
        asked: list[threading.Thread] = []
        for number in range(prompts):
            prompt = with_prefix(number % 16, number)
            lane = place.of(np.array(prompt, "<u4").tobytes(), None)[1]
            expected[homes[lane], len(prompt)] += 1
            asked.append(threading.Thread(target=pool.lm.next_token_logprobs_sync, args=(prompt,)))
            asked[-1].start()
            time.sleep(0.05)
        for thread in asked:
            thread.join()
        met = Counter[tuple[str, int]](
            (name, tokens) for name, found in pool.jobs(began).items() for tokens in found
        )
    return (met & expected).total() / prompts


def pace(pool: Pool, prompts: list[list[int]]) -> float:
    """Rows a second of one call."""
    began = time.perf_counter()
    rows = pool.lm.batch_next_token_logprobs_sync(prompts)
    took = time.perf_counter() - began
    check_rows(rows, prompts, VOCAB_SIZE)
    return len(prompts) / took


def measure(scale: Scale) -> Report:
    """Take all of it."""
    few, many = scale.of(200, 40), scale.of(2_400, 240)
    settled = 0.0 if scale.quick else SETTLED
    watch = Bystanders()
    report = Report(NAME, f"mock engines that sleep, {LANES} lanes, prefixes of {PREFIX} tokens")
    with RealServer() as server:
        found = facts(server.url)
        met = [met_home(server, run, few, settled) for run in range(scale.runs)]
        groups = Groups.of(scale)
        best = [groups.best(groups.prompts(run)) for run in range(scale.runs)]
        with random_llama(**TOY) as folder:
            homes = computed(server, folder, groups, LANES, scale.runs, settled)
            anyone = computed(server, folder, groups, 1, scale.runs, settled)
        paces: dict[str, list[float]] = {}
        for lanes in (LANES, 1):
            with pool_of(server, f"four-{lanes}", [0.1] * 4, lanes, 16, settled) as pool:
                for run in range(scale.runs):
                    distinct = make_prompts(many, VOCAB_SIZE, run, lanes)
                    paces.setdefault(f"distinct, {lanes}", []).append(pace(pool, distinct))
                    salt = run * many
                    one = [with_prefix(5, salt + n) for n in range(many)]
                    paces.setdefault(f"one prefix, {lanes}", []).append(pace(pool, one))
        for workers in (1, 8):
            with pool_of(server, f"of-{workers}", [0.1] * workers, LANES, 8, settled) as pool:
                for run in range(scale.runs):
                    prompts = make_prompts(workers * scale.of(240, 80), VOCAB_SIZE, run, workers)
                    paces.setdefault(f"{workers} workers", []).append(pace(pool, prompts))
        shares = []
        with pool_of(server, "unequal", [0.02, 0.04], LANES, 8, settled) as pool:
            for run in range(scale.runs):
                began = time.monotonic()
                pace(pool, make_prompts(scale.of(2_000, 400), VOCAB_SIZE, run, 77))
                fast, slow = pool.prompts_each(began)
                shares.append(fast / (fast + slow))
    report.add(
        "Homes",
        Measured("low load: share that met its home", "", tuple(met), at_least=0.95),
        ratio(
            "tokens computed by hf workers, one lane / homes",
            [tokens for tokens, _ in anyone],
            [tokens for tokens, _ in homes],
            at_least=1.7,
        ),
        ratio(
            "tokens computed, who knows the best assignment / homes",
            best,
            [tokens for tokens, _ in homes],
            at_least=0.9,
        ),
    )
    report.add(
        "Pace",
        ratio(
            "prompts that share nothing, homes / one lane: rows/s",
            paces[f"distinct, {LANES}"], paces["distinct, 1"], at_least=0.97,
        ),
        ratio(
            "all prompts share one prefix, homes / one lane: rows/s",
            paces[f"one prefix, {LANES}"], paces["one prefix, 1"], at_least=0.95,
        ),
        ratio("8 workers / 1: rows/s", paces["8 workers"], paces["1 workers"], at_least=7.2),
        Measured("work of one of double speed beside another: share", "", tuple(shares)),
    )  # fmt: skip
    report.note(
        f"met its home: {few} prompts of 16 groups, one each 50 ms, four workers; tokens computed: "
        f"counted by {groups.workers} workers with the Hugging Face engine and a toy Llama, each "
        f"of which keeps {groups.kept:,} positions, a third of {groups.count} prefixes of "
        f"{KEPT_PREFIX} tokens; {groups.each} prompts of each in random order, from empty caches, "
        f"{CALLERS} at a time; {sum(stolen for _, stolen in homes)} of "
        f"{groups.count * groups.each * scale.runs} were stolen"
    )
    report.note("a share of 0.6 to 0.72 is fair for a worker of double speed")
    report.facts = {**found, **watch.report()}
    return report
