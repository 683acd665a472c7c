"""Several pipelines that ask the same: each prompt is computed once."""

from __future__ import annotations

from contextlib import ExitStack

from tests.benchmarks.client_process import Order, client_processes, together, wall_seconds
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "dedup"
LINE = "four client processes that ask the same prompts, against one alone"

VOCAB_SIZE = 1_024
CLIENTS = 4
SECONDS_PER_TOKEN = 2e-5
"""Of the simulated model: 1,560 prompts of 32 tokens a second."""


def measure(scale: Scale) -> Report:
    """Alternate between one client, several with the same prompts, and several with others."""
    count = scale.of(2_000, 400)
    watch = Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        stack.enter_context(
            worker_process(
                server.url,
                "dedup",
                engine_opts={"vocab_size": VOCAB_SIZE, "delay_per_token": SECONDS_PER_TOKEN},
                log_level="warning",
            )
        )
        clients = stack.enter_context(client_processes(CLIENTS, server.url, "dedup", VOCAB_SIZE))
        found = facts(server.url)

        def ask(seeds: list[tuple[int, ...]]) -> tuple[float, int]:
            orders = [Order(count, count, seed) for seed in seeds]
            answers = together(clients[: len(seeds)], orders)
            return wall_seconds(answers), sum(a.statistics["queued"] for a in answers)

        one, same, other = "one client", f"{CLIENTS} clients, same", f"{CLIENTS} clients, different"
        taken = alternate(
            {
                one: lambda run: ask([(run, 1)]),
                same: lambda run: ask([(run, 2)] * CLIENTS),
                other: lambda run: ask([(run, 3, client) for client in range(CLIENTS)]),
            },
            scale.runs,
        )
    report = Report(
        NAME,
        f"{count:,} prompts a client, rows of {VOCAB_SIZE} float32, a mock model that takes "
        f"{SECONDS_PER_TOKEN * 1e6:g} us a token, one worker",
    )
    seconds = {name: tuple(sample[0] for sample in samples) for name, samples in taken.items()}
    computed = {name: tuple(float(s[1]) for s in samples) for name, samples in taken.items()}
    for name in taken:
        report.add("Time", Measured(name, "s", seconds[name]))
    for name in taken:
        report.add("Computed", Measured(name, "rows", computed[name]))
    asked = (float(count * CLIENTS),) * scale.runs
    report.add(
        "Ratios",
        ratio(f"{same}: computed / asked", computed[same], asked, at_most=1 / CLIENTS),
        ratio(f"{same} / {one}, time", seconds[same], seconds[one], at_most=1.25),
        ratio(f"{same} / {other}, time", seconds[same], seconds[other]),
    )
    report.note(
        "each client asks all its prompts in one call, all at the same time; time is from the "
        "first one's begin to the last one's end, with checking rows left in"
    )
    report.facts = {**found, **watch.report()}
    return report
