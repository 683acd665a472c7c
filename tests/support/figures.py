"""What README, docs/comparison.md and docs/engines.md say was measured, of the saved reports."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Final

from tests.benchmarks.measure import number
from tests.support.performance import (
    BATCHES,
    GATHERED,
    GPU_PARTICLES,
    GPU_SINGLE,
    LARGE,
    PARTICLES,
    SINGLE,
    SMALLER,
    figure,
    saved,
)

FULL: Final = "pool, batch calls, batch_size=512"
DISTINCT: Final = "512 distinct prompts of 32 tokens"


def values_of(report: str, heading: str, what: str, unit: str | None = None) -> Sequence[float]:
    """A figure of a saved report, run by run."""
    found: Sequence[float] = figure(report, heading, what, unit)["values"]
    return found


def median(report: str, heading: str, what: str, unit: str | None = None) -> str:
    """The same in one number."""
    return number(statistics.median(values_of(report, heading, what, unit)))


def machine(report: str) -> str:
    """What a report was measured on."""
    cpu, _, cores = saved(report)["facts"]["cpu"].rpartition(", ")
    return f"{cores} of an {cpu}"


def _arq() -> str:
    """The faster of the two, whose results are the same."""
    sides = ("arq", "arq, msgpack")
    return number(max(statistics.median(values_of("jobs", "Pace", side)) for side in sides))


def _runs(report: str, heading: str, what: str) -> int:
    return len(values_of(report, heading, what))


def _table(*rows: tuple[str, str, str]) -> str:
    lines = [("", "figure", "beside it"), *rows]
    head, *body = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines]
    return "\n".join([head, "|---|---|---|", *body])


_ROWS: Final = partial(median, "rows", LARGE)
_SMALLER: Final = partial(median, "rows", SMALLER)
_TIME: Final = partial(median, "latency", "Time")
_SOCKETS: Final = "of bare sockets that SET and GET as many bytes"


def _one_prompt(awaited: bool) -> tuple[str, str, str]:
    found = f"{_TIME('pool, blocking call: median')} ms median, "
    found += f"{_TIME('pool, blocking call: p99')} ms p99"
    if awaited:
        found += (
            f" (awaited: {_TIME('pool, awaited: median')} and {_TIME('pool, awaited: p99')} ms)"
        )
    return "one prompt at a time, from call to row", found, f"{_TIME('PING: median')} ms for PING"


def readme_figures() -> str:
    """The few of README.md."""
    bench = "`make bench ARGS='jobs rows latency'`"
    rows = f"{_ROWS('pool, batch calls')} rows/s, {_ROWS('pool, batch calls', 'MB/s')} MB/s"
    table = _table(
        (
            "small rows, 32-token prompts",
            f"{median('jobs', 'Pace', FULL)} jobs/s",
            f"arq running no-op jobs: {_arq()}/s",
        ),
        ("rows of 256 KiB", rows, f"{_ROWS('pool, batch calls / the bound')} {_SOCKETS}"),
        _one_prompt(awaited=False),
        (
            "SIGKILL of one of two workers under load (`make chaos`)",
            "no prompt lost, no row wrong",
            "the longest wait: 4.9 s",
        ),
    )
    head = f"On {machine('jobs')}, one worker with the mock engine, medians ({bench}):"
    return f"{head}\n\n{table}\n\n{_on_a_gpu()}"


def _on_a_gpu() -> str:
    gpu = saved("gpu")["facts"]["gpu"].split(",")[0]
    particles, single = partial(median, "gpu", GPU_PARTICLES), partial(median, "gpu", GPU_SINGLE)
    return _wrapped(
        f"With the `hf` engine, {_model('gpu')}, on one {gpu} (`make bench ARGS=gpu`): 32 "
        "particles of one prompt get "
        f"{particles('pool')} rows a second through the pool, beside "
        f"{particles('by hand (DynamicCache)')} of a `DynamicCache` by hand in the process that "
        f"asks; the engine alone gives {particles('engine')}, and without its CUDA graphs "
        f"{particles('engine, enforce_eager')}. One prompt after another: {single('pool')} through "
        f"the pool, {single('by hand')} by hand."
    )


def _model(report: str) -> str:
    """The model and its rows, of a title that goes on with the prompts."""
    title = saved(report)["title"]
    model, rows, _ = f"{title[0].lower()}{title[1:]}".rsplit(", ", 2)
    return f"{model} and {rows}"


def comparison_figures() -> str:
    """Those of rows in docs/comparison.md."""
    pace, times = partial(median, "jobs", "Pace"), partial(median, "jobs", "Ratios")
    dedup = partial(median, "dedup")
    facts = saved("jobs")["facts"]
    versions = f"{facts['server'].split(',')[0]}, redis-py {facts['redis']}"
    head = (
        f"Measured on {machine('jobs')} ({versions}, one worker process with the mock engine, one\n"
        f"client process; medians of {_runs('jobs', 'Pace', FULL)} runs, with the peer in the "
        "same run):"
    )
    usual = f"default settings: {pace(BATCHES)}"
    ratio = times(f"{FULL} / the faster arq")
    large = f"{_ROWS('pool, batch calls')} rows/s, {_ROWS('pool, batch calls', 'MB/s')} MB/s"
    lone = f"one call a prompt: {_ROWS('pool, gathered calls')} rows/s"
    bounds = [_ROWS(f"pool, {calls} calls / the bound") for calls in ("batch", "gathered")]
    smaller = f"{_SMALLER('pool, batch calls')} rows/s, "
    smaller += f"{_SMALLER('pool, batch calls', 'MB/s')} MB/s"
    computed = f"{dedup('Computed', '4 clients, same')} rows computed"
    table = _table(
        (
            "small rows (256 floats), 32-token prompts",
            f"{pace(FULL)} jobs/s ({usual})",
            f"arq running no-op jobs: {_arq()}/s, so {ratio} times",
        ),
        (
            "the same, one call a prompt under `asyncio.gather`",
            f"{pace(GATHERED)} jobs/s",
            f"{times(f'{GATHERED} / the faster arq')} times arq",
        ),
        ("rows of 256 KiB", f"{large} ({lone})", f"{bounds[0]} ({bounds[1]}) {_SOCKETS}"),
        (
            "rows of 64 KB, 32 a call",
            smaller,
            f"{_SMALLER('pool, batch calls / the bound')} of the same",
        ),
        _one_prompt(awaited=True),
        (
            "four processes asking the same 2,000 prompts",
            f"{computed}, {dedup('Time', '4 clients, same')} s",
            f"one process alone: {dedup('Time', 'one client')} s",
        ),
        (
            "1,000,000 distinct prompts",
            f"client {_grown('client')}, worker {_grown('worker')} MiB per 100,000",
            "",
        ),
    )
    return f"{head}\n\n{table}"


def _grown(side: str) -> str:
    return f"{statistics.median(values_of('memory', 'Growth', side)):+.2f}"


def engine_figures() -> str:
    """Those of the hf engine in docs/engines.md."""

    def times(heading: str, over: str, under: str) -> str:
        return median("hf", heading, f"{over} / {under}")

    genlm, prepared, hand = "genlm-backend", "genlm-backend after cache_kv", "by hand"
    flex = [
        statistics.median(values_of("masks", heading, "flex / mask"))
        for heading in saved("masks")["figures"]
    ]
    at_end = median("hf_memory", "Resident memory", "at the end")
    bench = "`make bench ARGS='hf --save'`"
    said = (
        "The same Llama (random weights, V=16,000), prompts and one thread on every side "
        f"({bench}, medians of {_runs('hf', PARTICLES, 'engine')} runs): 32 particles of one "
        f"prompt take {times(PARTICLES, 'engine', genlm)} times the pace of genlm-backend's "
        f"`AsyncTransformer`, {times(PARTICLES, 'engine', prepared)} times that after its "
        "`cache_kv`, "
        f"{times(PARTICLES, 'engine', hand)} times that of a `DynamicCache` by hand, and "
        f"{times(PARTICLES, 'pool', genlm)} times through the pool. 512 distinct prompts: "
        f"{times(DISTINCT, 'engine', genlm)} times genlm-backend, "
        f"{times(DISTINCT, 'engine', hand)} of batches by hand. One prompt after another: "
        f"{times(SINGLE, 'engine', genlm)} times genlm-backend. Over 100,000 distinct prompts the "
        f"engine stays at {at_end} MiB. On a CPU its attention with a mask is {min(flex):.1f} to "
        f"{max(flex):.1f} times as fast as flex attention, which there compiles a kernel for each "
        "shape (`make bench ARGS=masks`)."
    )
    return _wrapped(said)


def _wrapped(said: str) -> str:
    return textwrap.fill(said, 110, break_long_words=False, break_on_hyphens=False)
