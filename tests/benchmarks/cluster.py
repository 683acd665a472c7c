"""What a cluster costs: three primaries with a shard each, beside one server with one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from tests.benchmarks.asking import in_batches, processor, timed
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Cpu, Pool, make_prompts, serving
from tests.support.cluster import Cluster
from tests.support.server import RealServer

NAME = "cluster"
LINE = "processor time a job on three primaries against one server, and of 64 lanes against one"

VOCAB_SIZE = 256
PER_CALL = 5_000
BATCH = 512
ONE, THREE, LANES = "one server, one shard", "three primaries, a shard each", "one server, 64 lanes"
MOST = {"client": 1.2, "worker": 1.25, "server": 1.2}

Sample = tuple[float, Cpu]


def measure(scale: Scale) -> Report:
    """Alternate between the pools, each with a worker of its own."""
    jobs = scale.of(20_000, 2_000)
    watch = Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer(tcp=True))
        cluster = stack.enter_context(Cluster(3))
        found = facts(server.url)

        def pool(where: RealServer | Cluster, name: str, **settings: Any) -> Pool:
            settings = {"batch_size": BATCH, **settings}
            return stack.enter_context(serving(where, name, VOCAB_SIZE, **settings))

        pools = {
            ONE: pool(server, "one", shards=1, lanes=1),
            THREE: pool(cluster, "three", shards=3, lanes=1),
            LANES: pool(server, "lanes", shards=1, lanes=64),
        }

        def asked(salt: int, pool: Pool) -> Callable[[int], Sample]:
            def ask(run: int) -> Sample:
                prompts = make_prompts(jobs, VOCAB_SIZE, run, salt)
                return timed(pool, in_batches, prompts, PER_CALL, VOCAB_SIZE)

            return ask

        sides = {name: asked(salt, pool) for salt, (name, pool) in enumerate(pools.items())}
        taken = alternate(sides, scale.runs)
    report = Report(
        NAME, f"Rows of {VOCAB_SIZE} float32, prompts of 32 tokens, batches of {BATCH}, one worker"
    )
    used = {name: [cpu for _, cpu in samples] for name, samples in taken.items()}
    for side in fields(Cpu):
        spent = {
            name: tuple(getattr(cpu, side.name) for cpu in samples)
            for name, samples in used.items()
        }
        what = f"{THREE} / {ONE}: {side.name}"
        report.add("Ratios", ratio(what, spent[THREE], spent[ONE], at_most=MOST[side.name]))
        most = 1.05 if side.name == "server" else None
        what = f"{LANES} / one lane: {side.name}"
        report.add("Ratios", ratio(what, spent[LANES], spent[ONE], at_most=most))
    for name, cpus in used.items():
        report.add("Processor time", *processor(name, cpus, "us/job"))
    for name, samples in taken.items():
        report.add("Pace", Measured(name, "jobs/s", tuple(pace for pace, _ in samples)))
    report.note("server: of the three primaries together, which have no replicas")
    report.note(
        "every row was computed for this, and a sample of them compared with the right ones"
    )
    report.facts = {**found, **watch.report()}
    return report
