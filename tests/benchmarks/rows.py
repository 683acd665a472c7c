"""Rows a second, against what the server itself does with values as large."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from typing import Final

from tests.benchmarks.asking import Ask, gathered, in_batches, processor, timed
from tests.benchmarks.bound import alternating, beside
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio, spread
from tests.benchmarks.pool import Cpu, Pool, forget_results, make_prompts, serving
from tests.support.server import RealServer

NAME = "rows"
LINE = "rows of 256 KiB and of 64 KB a second, against the server's own SET and GET"

RESULT_TTL = 3.0
"""Seconds; the rows of a run must fit into the server's memory."""
BUSY = ", beside a busy process for each core"
FAR = ", as for a client elsewhere"
WARM_UP = 2**31
"""The number of the turn before the first: each is taken by a side that has just made another."""

Sample = tuple[float, Cpu | None]


@dataclass(frozen=True)
class Size:
    """Rows of one size, and how they are asked for."""

    name: str
    vocab_size: int
    counts: tuple[int, int]
    """Rows of a turn, full and quick."""
    per_call: int
    at_least: float
    """Of the bound."""
    ways: tuple[Ask, ...]
    turns: int = 1
    """That each side takes in a run, in turn with the others, where rows come near."""
    apart: float | None = None
    """The most by which runs may differ, as a part of their median."""
    beside_busy: bool = False
    """Whether it is measured once more, beside processes that keep every core busy."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's numbers."""
        return 4 * self.vocab_size


SIZES: Final = (
    Size("large", 65_536, (1_500, 250), 250, 0.85, (in_batches, gathered), turns=7, apart=0.15),
    # What the particles of one step ask.
    Size("particles", 16_000, (3_200, 320), 32, 0.65, (in_batches,), beside_busy=True),
)


def measure(scale: Scale) -> Report:
    """Alternate between the pool and the bare server."""
    watch = Bystanders()
    report = Report(NAME, "Rows of float32, prompts of 32 tokens, one worker")
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        found = facts(server.url)
        for size in SIZES:
            with serving(server, size.name, size.vocab_size, result_ttl=RESULT_TTL) as pool:
                _measure_one(report, server, pool, size, scale)
                if size.beside_busy:
                    with busy_cores():
                        _measure_one(report, server, pool, size, scale, BUSY)
            far = {"near_bytes": 0, "result_ttl": RESULT_TTL}
            with serving(server, f"{size.name}-far", size.vocab_size, **far) as pool:
                _measure_one(report, server, pool, size, scale, FAR)
    report.note(
        "pool: distinct prompts, a call right after another, until every row is in the caller's "
        "hands (batch calls: in one array) and stored, default settings but for result_ttl"
    )
    report.note(
        "the pool's rows come through shared memory, beside being stored; as for a client "
        "elsewhere: through the server alone (near_bytes=0)"
    )
    if not scale.quick:
        report.note(
            f"a run of {SIZES[0].row_bytes:,} bytes: {SIZES[0].turns} turns of each side, one after"
            " another's, of which the median counts, of processor time the mean: a virtual machine "
            "that gets memory from its host for what sockets hold takes up to twice as long over "
            "some; else, and as for a client elsewhere, one turn"
        )
    report.note(
        "every side makes another just before each, and what a turn left on the server is deleted "
        "after it: memory that the machine gives anew takes it longer than a row's copying"
    )
    report.note(
        "server: bare sockets that parse nothing, copy nothing and sleep whenever they wait; each "
        "value is SET once with the same time to live, and one is GET for it; the faster of both "
        "ways is the bound"
    )
    report.facts = {**found, **watch.report()}
    return report


@contextmanager
def busy_cores() -> Iterator[None]:
    """A process for each core that does nothing but compute."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        yield


def mean(used: Sequence[Cpu | None]) -> Cpu | None:
    """Processor time of turns that took as many rows each; None of who is not measured."""
    there = [cpu for cpu in used if cpu is not None]
    if not there:
        return None
    return Cpu(*(statistics.mean(side) for side in zip(*map(astuple, there), strict=True)))


def _measure_one(
    report: Report, server: RealServer, pool: Pool, size: Size, scale: Scale, beside_what: str = ""
) -> None:
    count = scale.of(*size.counts)
    turns = 1 if beside_what else scale.of(size.turns, 1)

    def ours(ask: Ask, salt: int) -> Callable[[int], Sample]:
        def measured(turn: int) -> Sample:
            prompts = make_prompts(count, size.vocab_size, turn, salt)
            sample = timed(pool, ask, prompts, size.per_call, size.vocab_size)
            forget_results(server)
            return sample

        return measured

    def bare(loop: Callable[[RealServer, list[bytes], int, int], float]) -> Callable[[int], Sample]:
        def measured(_: int) -> Sample:
            keys = [b"bench:%d" % number for number in range(count)]
            pace = loop(server, keys, size.row_bytes, round(RESULT_TTL * 1000))
            with server.client() as client:
                client.delete(*keys)
            return pace, None

        return measured

    def again(side: Callable[[int], Sample]) -> Callable[[int], Sample]:
        def measured(turn: int) -> Sample:
            side(WARM_UP + turn)
            return side(turn)

        return measured

    def by_run(samples: Sequence[Sample]) -> Sequence[Sample]:
        runs = [samples[i : i + turns] for i in range(0, len(samples), turns)]
        return [
            (statistics.median(pace for pace, _ in run), mean([cpu for _, cpu in run]))
            for run in runs
        ]

    names = {in_batches: "pool, batch calls", gathered: "pool, gathered calls"}
    sides: dict[str, Callable[[int], Sample]] = {
        names[ask]: ours(ask, salt)
        for salt, ask in enumerate(size.ways, 10 if beside_what else 1)  # never asked before
    }
    sides["server, SET and GET in turn"] = bare(alternating)
    sides["server, SET beside GET"] = bare(beside)
    turned = alternate({name: again(side) for name, side in sides.items()}, turns * scale.runs)
    taken = {name: by_run(samples) for name, samples in turned.items()}
    heading = f"Rows of {size.row_bytes:,} bytes, {size.per_call} a call{beside_what}"
    pace = {name: tuple(sample[0] for sample in samples) for name, samples in taken.items()}
    for name, values in pace.items():
        megabytes = tuple(value * size.row_bytes / 1e6 for value in values)
        report.add(heading, Measured(name, "rows/s", values), Measured(name, "MB/s", megabytes))
    bounds = [samples for name, samples in turned.items() if name.startswith("server")]
    quicker = [(max(pace for pace, _ in turn), None) for turn in zip(*bounds, strict=True)]
    faster = [pace for pace, _ in by_run(quicker)]
    for name, samples in taken.items():
        used = [cpu for _, cpu in samples if cpu]
        if used:
            goal = None if beside_what else size.at_least
            against = ratio(f"{name} / the bound", pace[name], faster, at_least=goal)
            report.add(heading, against)
            if goal is not None and size.apart is not None:
                report.add(heading, spread(against, size.apart if scale.runs > 2 else None))
            report.add(heading, *processor(name, used, "us/row"))
