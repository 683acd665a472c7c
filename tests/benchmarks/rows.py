"""Large rows a second, against what the server itself does with values as large."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tests.benchmarks.asking import Ask, gathered, in_batches, processor, timed
from tests.benchmarks.bound import alternating, beside
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Cpu, make_prompts, serving
from tests.support.server import RealServer

NAME = "rows"
LINE = "rows of 256 KiB a second, against the server's own SET and GET"

VOCAB_SIZE = 65_536
ROW_BYTES = 4 * VOCAB_SIZE
PER_CALL = 250
RESULT_TTL = 3.0
"""Seconds; the rows of a few runs must fit into the server's memory."""

Sample = tuple[float, Cpu | None]


def measure(scale: Scale) -> Report:
    """Alternate between the pool and the bare server."""
    count = scale.of(1_500, 250)
    watch = Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        pool = stack.enter_context(serving(server, "rows", VOCAB_SIZE, result_ttl=RESULT_TTL))
        found = facts(server.url)

        def ours(ask: Ask, salt: int) -> Callable[[int], Sample]:
            return lambda run: timed(
                pool, ask, make_prompts(count, VOCAB_SIZE, run, salt), PER_CALL, VOCAB_SIZE
            )

        def bare(loop: Callable[[RealServer, list[bytes], int, int], float]) -> Sample:
            keys = [b"bench:%d" % number for number in range(count)]
            pace = loop(server, keys, ROW_BYTES, round(RESULT_TTL * 1000))
            _forget(server, keys)
            return pace, None

        taken = alternate(
            {
                "pool, batch calls": ours(in_batches, 1),
                "server, SET and GET in turn": lambda run: bare(alternating),
                "pool, gathered calls": ours(gathered, 2),
                "server, SET beside GET": lambda run: bare(beside),
            },
            scale.runs,
        )
    report = Report(NAME, f"Rows of {VOCAB_SIZE} float32, prompts of 32 tokens, one worker")
    pace = {name: tuple(sample[0] for sample in samples) for name, samples in taken.items()}
    for name, values in pace.items():
        megabytes = tuple(value * ROW_BYTES / 1e6 for value in values)
        report.add("Pace", Measured(name, "rows/s", values), Measured(name, "MB/s", megabytes))
    bounds = [values for name, values in pace.items() if name.startswith("server")]
    faster = tuple(map(max, zip(*bounds, strict=True)))
    for name, values in pace.items():
        if name.startswith("pool"):
            report.add("Ratios", ratio(f"{name} / the bound", values, faster, at_least=0.5))
    for name, samples in taken.items():
        report.add("Processor time", *processor(name, [cpu for _, cpu in samples if cpu], "us/row"))
    report.note(
        f"pool: {count:,} distinct prompts, {PER_CALL} a call, until every row is in the caller's "
        "hands (batch calls: copied into one array), default settings but for result_ttl"
    )
    report.note(
        "server: bare sockets that parse nothing and copy nothing; each value is SET once with "
        "the same time to live, and one is GET for it; the faster of both ways is the bound"
    )
    report.facts = {**found, **watch.report()}
    return report


def _forget(server: RealServer, keys: list[bytes]) -> None:
    with server.client() as client:
        client.delete(*keys)
