"""One prompt at a time: how long each takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import redis

from tests.benchmarks.arq_peer import arq_peer
from tests.benchmarks.bare_peer import BarePeer, bare_peer
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, quantile, ratio
from tests.benchmarks.pool import Pool, Prompts, check_rows, make_prompts, must_be_computed, serving
from tests.support.server import RealServer

NAME = "latency"
LINE = "milliseconds of one prompt alone, beside PING, bare sockets and an awaited no-op job of arq"

VOCAB_SIZE = 256
BLOCKING = "pool, blocking call"
BARE = "bare sockets"
TRICKLES = {200.0: (600, 60), 20.0: (200, 20)}
"""Prompts a second that come one by one, and how many of a run, full and quick."""


def measure(scale: Scale) -> Report:
    """Alternate between the pool, bare round trips, a job through bare sockets, and arq."""
    count, arq_jobs = scale.of(1_000, 200), scale.of(200, 50)
    spent: dict[str, list[float]] = {BLOCKING: [], BARE: []}
    watch = Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        pool = stack.enter_context(serving(server, "one", VOCAB_SIZE))
        peer = stack.enter_context(arq_peer(server, "one", poll_delay=0.001))
        bare = stack.enter_context(bare_peer(server, VOCAB_SIZE))
        connection = stack.enter_context(server.client())
        found = facts(server.url)
        taken = alternate(
            {
                "pool, awaited": lambda run: _awaited(pool, count, run),
                "PING": lambda run: _pings(connection, [0.0] * count),
                **{
                    f"PING, {rate:g} a second": lambda run, rate=rate, counts=counts: _pings(
                        connection, _pauses(rate, scale.of(*counts), run)
                    )
                    for rate, counts in TRICKLES.items()
                },
                BLOCKING: lambda run: _blocking(pool, count, run, spent[BLOCKING]),
                BARE: lambda run: _bare(bare, count, run, spent[BARE]),
                **{
                    f"pool, {rate:g} a second": partial(_trickling, pool, rate, scale.of(*counts))
                    for rate, counts in TRICKLES.items()
                },
                "arq": lambda run: peer.latencies(arq_jobs),
            },
            scale.runs,
        )
    report = Report(NAME, f"Rows of {VOCAB_SIZE} float32, one prompt in flight, default settings")
    parts: dict[str, Callable[[list[float]], float]] = {
        "median": lambda seconds: quantile(seconds, 0.5),
        "p90": lambda seconds: quantile(seconds, 0.9),
        "p99": lambda seconds: quantile(seconds, 0.99),
    }
    found_of: dict[tuple[str, str], tuple[float, ...]] = {}
    for name, samples in taken.items():
        for part, of in parts.items():
            values = tuple(of(seconds) * 1000 for seconds in samples)
            found_of[name, part] = values
            goal = 0.55 if name in ("pool, awaited", BLOCKING) and part == "median" else None
            report.add("Time", Measured(f"{name}: {part}", "ms", values, at_most=goal))
    for other in ("PING", "arq"):
        report.add(
            "Ratios",
            ratio(
                f"median: pool, awaited / {other}",
                found_of["pool, awaited", "median"],
                found_of[other, "median"],
            ),
        )
    report.add(
        "Ratios",
        ratio(
            f"median: {BLOCKING} / {BARE}",
            found_of[BLOCKING, "median"],
            found_of[BARE, "median"],
        ),
    )
    for rate in TRICKLES:
        report.add(
            "Ratios",
            ratio(
                f"p99: pool, {rate:g} a second / alone",
                found_of[f"pool, {rate:g} a second", "p99"],
                found_of[BLOCKING, "p99"],
                at_most=1.5,
            ),
            ratio(
                f"median: PING, {rate:g} a second / alone",
                found_of[f"PING, {rate:g} a second", "median"],
                found_of["PING", "median"],
            ),
        )
    report.add(
        "Processor time",
        Measured(BLOCKING, "us/prompt", tuple(spent[BLOCKING]), at_most=500.0),
        Measured(BARE, "us/prompt", tuple(spent[BARE])),
        ratio(f"{BLOCKING} / {BARE}", spent[BLOCKING], spent[BARE]),
    )
    report.note(f"{count} distinct prompts a run; min, median and max are over the runs")
    report.note(
        "a second: one after another, behind pauses of an exponential distribution; what PING "
        "takes longer behind them is the machine's doing, which idles"
    )
    report.note(
        "bare sockets: the same round trips by hand, claimed, joined, acknowledged and told, with "
        "one thread on each side and none of a pool's other promises"
    )
    report.note(
        "arq: enqueued and awaited, with a worker that polls 1 ms apart and a result that is "
        "polled for 0.5 ms apart (by default both are 500 ms)"
    )
    report.facts = {**found, **watch.report()}
    return report


def _awaited(pool: Pool, count: int, run: int) -> list[float]:
    prompts = make_prompts(count, VOCAB_SIZE, run, 1)
    queued = pool.queued()
    taken, rows = [], []

    async def ask() -> None:
        for prompt in prompts:
            began = time.perf_counter()
            row = await pool.lm.next_token_logprobs(prompt)
            taken.append(time.perf_counter() - began)
            rows.append(row)

    asyncio.run(ask())
    check_rows(rows, prompts, VOCAB_SIZE)
    must_be_computed(pool, queued, count)
    return taken


def _blocking(pool: Pool, count: int, run: int, spent: list[float]) -> list[float]:
    before = pool.cpu()
    taken = _one_by_one(pool, make_prompts(count, VOCAB_SIZE, run, 2), lambda: 0.0)
    spent.append(pool.cpu().per_job(before, count).total)
    return taken


def _bare(bare: BarePeer, count: int, run: int, spent: list[float]) -> list[float]:
    prompts = make_prompts(count, VOCAB_SIZE, run, 4)
    before = bare.cpu()
    taken, rows = _each(bare.row, prompts, lambda: 0.0)
    spent.append(bare.cpu().per_job(before, count).total)
    check_rows(rows, prompts, VOCAB_SIZE)
    return taken


def _pauses(rate: float, count: int, run: int) -> list[float]:
    pauses: list[float] = (
        np.random.default_rng((run, round(rate))).exponential(1 / rate, count).tolist()
    )
    return pauses


def _trickling(pool: Pool, rate: float, count: int, run: int) -> list[float]:
    pauses = _pauses(rate, count, run)
    prompts = make_prompts(count, VOCAB_SIZE, run, 3, round(rate))
    return _one_by_one(pool, prompts, iter(pauses).__next__)


def _one_by_one(pool: Pool, prompts: Prompts, pause: Callable[[], float]) -> list[float]:
    queued = pool.queued()
    taken, rows = _each(pool.lm.next_token_logprobs_sync, prompts, pause)
    check_rows(rows, prompts, VOCAB_SIZE)
    must_be_computed(pool, queued, len(prompts))
    return taken


def _each(
    ask: Callable[[list[int]], Any], prompts: Prompts, pause: Callable[[], float]
) -> tuple[list[float], list[Any]]:
    taken, rows = [], []
    for prompt in prompts:
        if seconds := pause():
            time.sleep(seconds)
        began = time.perf_counter()
        row = ask(prompt)
        taken.append(time.perf_counter() - began)
        rows.append(row)
    return taken, rows


def _pings(connection: redis.Redis, pauses: Sequence[float]) -> list[float]:
    taken = []
    for pause in pauses:
        if pause:
            time.sleep(pause)
        began = time.perf_counter()
        connection.ping()
        taken.append(time.perf_counter() - began)
    return taken
