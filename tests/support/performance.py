"""The table of docs/performance.md: what was measured, of the saved reports of the benchmarks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from tests.benchmarks.measure import number
from tests.benchmarks.tables import RESULTS

_THREE: Final = ("client", "worker", "server")


@dataclass(frozen=True, slots=True)
class Line:
    """A measure: in which report, under which heading, the sum of which figures, run by run."""

    what: str
    report: str
    heading: str
    figures: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """The median, the least and the most, when it was taken, and where all of it stands."""
        chosen = [figure(self.report, self.heading, what) for what in self.figures]
        values = [sum(run) for run in zip(*(each["values"] for each in chosen), strict=True)]
        return (
            self.what,
            f"{number(statistics.median(values))} {chosen[0]['unit']}",
            f"{number(min(values))} to {number(max(values))}",
            saved(self.report)["facts"]["date"],
            f"[{self.report}](../tests/benchmarks/results/{self.report}.md)",
        )


BATCHES: Final = "pool, batch calls, default settings"
GATHERED: Final = "pool, gathered calls, batch_size=512"
PARTICLES: Final = "Particles: 32 of one 256-token prompt, 32 steps"
LARGE: Final = "Rows of 262,144 bytes, 250 a call"
SMALLER: Final = "Rows of 64,000 bytes, 32 a call"
SINGLE: Final = "64 prompts of 32 tokens, one after another"
LONG: Final = "32 particles of one 2000-token prompt, 8 steps"
LINES: Final = (
    Line("batch calls, rows of 1 KiB", "jobs", "Pace", (BATCHES,)),
    Line("the same against arq", "jobs", "Ratios", (f"{BATCHES} / the faster arq",)),
    Line(
        "the same, processor time of client, worker and server",
        "jobs",
        "Processor time",
        tuple(f"{BATCHES}: {side}" for side in _THREE),
    ),
    Line("10,000 gathered single calls", "jobs", "Pace", (GATHERED,)),
    Line(
        "the same, the client's processor time", "jobs", "Processor time", (f"{GATHERED}: client",)
    ),
    Line("one prompt, blocking", "latency", "Time", ("pool, blocking call: median",)),
    Line("one prompt, awaited", "latency", "Time", ("pool, awaited: median",)),
    Line("one prompt, awaited: p99", "latency", "Time", ("pool, awaited: p99",)),
    Line("rows of 256 KiB, batch calls", "rows", LARGE, ("pool, batch calls",)),
    Line(
        "the same against what the server can do", "rows", LARGE, ("pool, batch calls / the bound",)
    ),
    Line(
        "rows of 64 KB, 32 a call, against the same",
        "rows",
        SMALLER,
        ("pool, batch calls / the bound",),
    ),
    Line("rows of 128,256 tokens", "answers", "Pace", ("rows",)),
    Line("their likeliest 20", "answers", "Pace", ("top 20",)),
    Line("`hf`, 32 particles: the engine alone", "hf", PARTICLES, ("engine",)),
    Line("the same: a pool of one worker", "hf", PARTICLES, ("pool",)),
    Line("the same: a bare Redis, for one caller", "hf", PARTICLES, ("Redis alone",)),
    Line("the same: by hand in transformers", "hf", PARTICLES, ("by hand",)),
    Line("`hf`, particles of a 2,000-token prompt: pool / engine", "hf", LONG, ("pool / engine",)),
    Line(
        "`hf`, one prompt after another: a pool",
        "hf",
        SINGLE,
        ("pool",),
    ),
    Line("`vllm`: rows captured / nothing captured", "vllm", "Capture against", ("no capture",)),
    Line("`vllm`: rows captured / `logprobs=-1`", "vllm", "Capture against", ("logprobs=-1",)),
    Line(
        "`vllm`: a pool with two callers / `logprobs=-1`",
        "vllm",
        "Pool, two callers against",
        ("logprobs=-1",),
    ),
    Line(
        "metrics on / off, processor time of batch calls",
        "observed",
        "Ratios",
        ("batch calls: metrics / neither",),
    ),
    Line(
        "three primaries / one server, the servers' processor time",
        "cluster",
        "Ratios",
        ("three primaries, a shard each / one server, one shard: server",),
    ),
    Line("the client's memory", "memory", "Growth", ("client",)),
    Line("the worker's memory", "memory", "Growth", ("worker",)),
)

GPU_ROWS: Final = "hf: Rows"
GPU_LENGTHS: Final = "hf: Rows of prompts of 1 to 512 tokens"
GPU_SINGLE: Final = "hf: One prompt after another"
GPU_PARTICLES: Final = "hf: 32 particles, 32 steps"
GPU_LINES: Final = (
    Line("512 distinct prompts of 64 tokens: the engine", "gpu", GPU_ROWS, ("engine",)),
    Line("the same: a pool of one worker", "gpu", GPU_ROWS, ("pool",)),
    Line(
        "the same: the model's forward passes alone",
        "gpu",
        GPU_ROWS,
        ("the model's forward passes alone",),
    ),
    Line("256 prompts of 1 to 512 tokens: the engine", "gpu", GPU_LENGTHS, ("engine",)),
    Line("the same: a pool", "gpu", GPU_LENGTHS, ("pool",)),
    Line("the same: with cuDNN's attention", "gpu", GPU_LENGTHS, ("engine, cuDNN's attention",)),
    Line("the likeliest 20 of 512 prompts of 64 tokens: a pool", "gpu", "hf: Top 20", ("pool",)),
    Line(
        "texts of 512 tokens scored: a pool", "gpu", "hf: Scores of texts of 512 tokens", ("pool",)
    ),
    Line("one prompt after another: the engine", "gpu", GPU_SINGLE, ("engine",)),
    Line("the same: without CUDA graphs", "gpu", GPU_SINGLE, ("engine, enforce_eager",)),
    Line("the same: a pool", "gpu", GPU_SINGLE, ("pool",)),
    Line("the same: by hand in transformers", "gpu", GPU_SINGLE, ("by hand",)),
    Line(
        "32 particles of one 256-token prompt, 32 steps: the engine",
        "gpu",
        GPU_PARTICLES,
        ("engine",),
    ),
    Line("the same: without CUDA graphs", "gpu", GPU_PARTICLES, ("engine, enforce_eager",)),
    Line("the same: a pool", "gpu", GPU_PARTICLES, ("pool",)),
    Line("the same: by hand in transformers", "gpu", GPU_PARTICLES, ("by hand (DynamicCache)",)),
    Line("the same: a pool / by hand", "gpu", GPU_PARTICLES, ("pool / by hand (DynamicCache)",)),
    Line(
        "the GPU's idle share, the engine alone",
        "gpu",
        "hf: idle share of the GPU",
        ("engine, rows (by kernel)",),
    ),
    Line(
        "copying of rows beside a forward pass, four passes a batch",
        "gpu",
        "hf: copies of rows, by CUDA events",
        ("four passes a batch: beside a forward pass",),
    ),
)


@cache
def saved(name: str) -> dict[str, Any]:
    """A saved report."""
    (report,) = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    found: dict[str, Any] = report
    return found


def figure(report: str, heading: str, what: str, unit: str | None = None) -> dict[str, Any]:
    """A figure of a saved report. A name may be there once more, in another unit: its pace comes
    first."""
    found: dict[str, Any] = next(
        each
        for each in saved(report)["figures"][heading]
        if each["what"] == what and unit in (None, each["unit"])
    )
    return found


def measures_table() -> str:
    """Every measure of the table."""
    return _table(LINES)


def gpu_table() -> str:
    """The same of a GPU, and which."""
    report = saved("gpu")
    gpu = report["facts"]["gpu"]
    return f"{report['title']}, on one {gpu}:\n\n{_table(GPU_LINES)}"


def _table(lines: Sequence[Line]) -> str:
    rows = [("what", "median", "of all runs", "taken", "all of it"), ("---",) * 5]
    rows += [line.cells() for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
