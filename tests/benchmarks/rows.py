"""Rows a second, against what the server itself does with values as large."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from tests.benchmarks.asking import Ask, gathered, in_batches, processor, timed
from tests.benchmarks.bound import alternating, beside
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Cpu, Pool, forget_results, make_prompts, serving
from tests.support.server import RealServer

NAME = "rows"
LINE = "rows of 256 KiB and of 64 KB a second, against the server's own SET and GET"

RESULT_TTL = 3.0
"""Seconds; the rows of a run must fit into the server's memory."""
BUSY = ", beside a busy process for each core"
FAR = ", as for a client elsewhere"
WARM_UP = 2**31
"""The number of the run before the first: each is taken by a side that has just made another."""

Sample = tuple[float, Cpu | None]


@dataclass(frozen=True)
class Size:
    """Rows of one size, and how they are asked for."""

    name: str
    vocab_size: int
    counts: tuple[int, int]
    """Rows of a run, full and quick."""
    per_call: int
    at_least: float
    """Of the bound."""
    ways: tuple[Ask, ...]
    beside_busy: bool = False
    """Whether it is measured once more, beside processes that keep every core busy."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's numbers."""
        return 4 * self.vocab_size


SIZES: Final = (
    Size("large", 65_536, (1_500, 250), 250, 0.85, (in_batches, gathered)),
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
    report.note(
        "every side makes another run just before each, and what a run left on the server is "
        "deleted after it: memory that the machine gives anew takes it longer than a row's copying"
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


def _measure_one(
    report: Report, server: RealServer, pool: Pool, size: Size, scale: Scale, beside_what: str = ""
) -> None:
    count = scale.of(*size.counts)

    def ours(ask: Ask, salt: int) -> Callable[[int], Sample]:
        def measured(run: int) -> Sample:
            prompts = make_prompts(count, size.vocab_size, run, salt)
            sample = timed(pool, ask, prompts, size.per_call, size.vocab_size)
            forget_results(server)
            return sample

        return measured

    def bare(loop: Callable[[RealServer, list[bytes], int, int], float]) -> Callable[[int], Sample]:
        def measured(run: int) -> Sample:
            keys = [b"bench:%d" % number for number in range(count)]
            pace = loop(server, keys, size.row_bytes, round(RESULT_TTL * 1000))
            with server.client() as client:
                client.delete(*keys)
            return pace, None

        return measured

    def again(side: Callable[[int], Sample]) -> Callable[[int], Sample]:
        def measured(run: int) -> Sample:
            side(WARM_UP + run)
            return side(run)

        return measured

    names = {in_batches: "pool, batch calls", gathered: "pool, gathered calls"}
    sides: dict[str, Callable[[int], Sample]] = {
        names[ask]: ours(ask, salt)
        for salt, ask in enumerate(size.ways, 10 if beside_what else 1)  # never asked before
    }
    sides["server, SET and GET in turn"] = bare(alternating)
    sides["server, SET beside GET"] = bare(beside)
    taken = alternate({name: again(side) for name, side in sides.items()}, scale.runs)
    heading = f"Rows of {size.row_bytes:,} bytes, {size.per_call} a call{beside_what}"
    pace = {name: tuple(sample[0] for sample in samples) for name, samples in taken.items()}
    for name, values in pace.items():
        megabytes = tuple(value * size.row_bytes / 1e6 for value in values)
        report.add(heading, Measured(name, "rows/s", values), Measured(name, "MB/s", megabytes))
    bounds = [values for name, values in pace.items() if name.startswith("server")]
    faster = tuple(map(max, zip(*bounds, strict=True)))
    for name, samples in taken.items():
        used = [cpu for _, cpu in samples if cpu]
        if used:
            goal = None if beside_what else size.at_least
            against = ratio(f"{name} / the bound", pace[name], faster, at_least=goal)
            report.add(heading, against, *processor(name, used, "us/row"))
