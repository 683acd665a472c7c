"""Small jobs a second, beside arq's no-op jobs on the same server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tests.benchmarks.arq_peer import arq_peer
from tests.benchmarks.asking import Ask, gathered, in_batches, processor, timed
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Cpu, Pool, make_prompts, serving
from tests.support.server import RealServer

NAME = "jobs"
LINE = "jobs a second with rows of 1 KiB, against arq running no-op jobs"

VOCAB_SIZE = 256
PER_CALL = 5_000
LARGE_BATCH = 512

Sample = tuple[float, Cpu]


def measure(scale: Scale) -> Report:
    """Alternate between the pool and arq."""
    jobs, arq_jobs = scale.of(20_000, 2_000), scale.of(3_000, 400)
    watch = Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        large = stack.enter_context(serving(server, "large", VOCAB_SIZE, batch_size=LARGE_BATCH))
        plain = stack.enter_context(serving(server, "plain", VOCAB_SIZE))
        pickle = stack.enter_context(arq_peer(server, "pickle"))
        msgpack = stack.enter_context(arq_peer(server, "msgpack", by_msgpack=True))
        found = facts(server.url)

        def ours(pool: Pool, ask: Ask, salt: int) -> Callable[[int], Sample]:
            return lambda run: timed(
                pool, ask, make_prompts(jobs, VOCAB_SIZE, run, salt), PER_CALL, VOCAB_SIZE
            )

        taken = alternate(
            {
                f"pool, batch calls, batch_size={LARGE_BATCH}": ours(large, in_batches, 1),
                "arq": lambda run: pickle.throughput(arq_jobs),
                "pool, batch calls, default settings": ours(plain, in_batches, 2),
                "arq, msgpack": lambda run: msgpack.throughput(arq_jobs),
                f"pool, gathered calls, batch_size={LARGE_BATCH}": ours(large, gathered, 3),
            },
            scale.runs,
        )
    report = Report(NAME, f"Rows of {VOCAB_SIZE} float32, prompts of 32 tokens, one worker")
    pace = {name: tuple(sample[0] for sample in samples) for name, samples in taken.items()}
    first, *_, last = pace
    for name, values in pace.items():
        goal = 20_000.0 if name == last else None
        report.add("Pace", Measured(name, "jobs/s", values, at_least=goal))
    faster = tuple(map(max, zip(pace["arq"], pace["arq, msgpack"], strict=True)))
    for name, values in pace.items():
        if name.startswith("pool"):
            goal = 18.0 if name == first else None
            report.add("Ratios", ratio(f"{name} / the faster arq", values, faster, at_least=goal))
    totals = {name: tuple(cpu.total for _, cpu in samples) for name, samples in taken.items()}
    cheaper = tuple(map(min, zip(totals["arq"], totals["arq, msgpack"], strict=True)))
    for name, values in totals.items():
        if name.startswith("pool"):
            what = f"the cheaper arq / {name}: processor time of all three"
            report.add("Ratios", ratio(what, cheaper, values))
    report.add(
        "Goals",
        Measured(f"{first}: all three", "us/job", totals[first], at_most=30.0),
        Measured(
            f"{last}: client", "us/job", tuple(cpu.client for _, cpu in taken[last]), at_most=24.0
        ),
    )
    for name, samples in taken.items():
        report.add("Processor time", *processor(name, [cpu for _, cpu in samples], "us/job"))
    report.note(
        f"pool: from the first call to the last of {jobs:,} rows in the caller's hands and stored, "
        f"{PER_CALL:,} distinct prompts a call, a sample of the rows compared with the right ones"
    )
    report.note(
        f"arq: from the first enqueue to the last written result of {arq_jobs:,} no-op jobs, "
        "max_jobs=100, polls 5 ms apart, logging off; its results are not read"
    )
    report.note(
        "client, worker and server are a process each; the workers of the other sides idle or are "
        "frozen meanwhile"
    )
    report.note(
        "bound: jobs a second if each process had a core of its own and the busiest never waited"
    )
    report.facts = {**found, **watch.report()}
    return report
