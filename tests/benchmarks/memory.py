"""Memory of client, worker and server over many distinct prompts."""

from __future__ import annotations

from contextlib import ExitStack

from tests.benchmarks.client_process import Order, client_processes
from tests.benchmarks.machine import Bystanders, facts, resident_bytes
from tests.benchmarks.measure import Measured, Report, Scale, progress, slope
from tests.support.server import RealServer
from tests.support.workers import worker_process

NAME = "memory"
LINE = "resident memory of client, worker and server over 1,000,000 distinct prompts"

VOCAB_SIZE = 256
CACHE_BYTES = 16 << 20
RESULT_TTL = 5.0
MOST_GROWTH = 4.0
"""MiB for each 100,000 prompts, once everything is warm."""


def measure(scale: Scale) -> Report:
    """One long run; `scale.runs` does not matter."""
    step = scale.of(100_000, 2_000)
    # The client's cache is full after about 13,000 rows; what is warm must stay so.
    samples, warm = scale.of(10, 5), 2
    watch = Bystanders()
    series: dict[str, list[float]] = {"client": [], "worker": [], "server": []}
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        worker = stack.enter_context(
            worker_process(
                server.url,
                "memory",
                engine_opts={"vocab_size": VOCAB_SIZE},
                batch_size=512,
                result_ttl=RESULT_TTL,
                log_level="warning",
            )
        )
        (client,) = stack.enter_context(
            client_processes(1, server.url, "memory", VOCAB_SIZE, cache_bytes=CACHE_BYTES)
        )
        found = facts(server.url)
        pids = {"client": client.pid, "worker": worker.pid, "server": server.pid}
        for number in range(samples + 1):
            if number:
                client.start(Order(step, step // 10, (number,), alternately=True))
                client.answer()
            progress(f"  {number * step:,} of {samples * step:,} prompts")
            for name, pid in pids.items():
                series[name].append(resident_bytes(pid) / 2**20)
    report = Report(
        NAME,
        f"Rows of {VOCAB_SIZE} float32, {samples * step:,} distinct prompts, "
        f"client's cache {CACHE_BYTES >> 20} MiB, result_ttl={RESULT_TTL:g} s",
    )
    prompts = [number * step / 100_000 for number in range(samples + 1)]
    for name, values in series.items():
        report.add(
            "Resident memory",
            Measured(f"{name}: after {warm * step:,}", "MiB", (values[warm],)),
            Measured(f"{name}: at the end", "MiB", (values[-1],)),
        )
        if name != "server" and not scale.quick:
            grown = slope(prompts[warm:], values[warm:])
            report.add("Growth", Measured(name, "MiB/100k prompts", (grown,), at_most=MOST_GROWTH))
    report.series = {f"{name}, MiB each {step:,} prompts": v for name, v in series.items()}
    report.note(
        f"batch calls and gathered calls in turn, {step // 10:,} prompts each; growth by least "
        f"squares over the samples from {warm * step:,} prompts on"
    )
    report.note("the server holds the rows of the last result_ttl seconds: it follows the pace")
    report.facts = {**found, **watch.report()}
    return report
