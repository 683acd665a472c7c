"""A server that is full, against one with room for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tests.benchmarks.asking import in_batches, processor, timed
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Cpu, Pool, WrongRows, make_prompts, serving
from tests.support.server import RealServer

NAME = "full"
LINE = "distinct rows of 256 KiB through a server of 400 MB, against one with room for all"

PER_CALL = 250

Sample = tuple[float, Cpu]


def measure(scale: Scale) -> Report:
    """Alternate between both servers, each with a worker and a client of its own."""
    vocab_size = scale.of(65_536, 8_192)
    count = scale.of(20_000, 2_000)
    memory = scale.of(400, 24)
    watch = Bystanders()
    pools: dict[str, Pool] = {}
    with ExitStack() as stack:
        for name, options in (
            ("room for all", {}),
            (f"{memory} MB", {"maxmemory": f"{memory}mb", "maxmemory_policy": "noeviction"}),
        ):
            server = stack.enter_context(RealServer(**options))
            pools[name] = stack.enter_context(serving(server, "full", vocab_size))
        found = facts(pools["room for all"].server.url)
        taken = alternate(
            {name: _asked(pool, count, vocab_size) for name, pool in pools.items()}, scale.runs
        )
        small, roomy = f"{memory} MB", "room for all"
        held, evicted = _held(pools[small]), _evicted(pools[small])
    report = Report(
        NAME, f"{count:,} distinct rows of {vocab_size} float32 a run, prompts of 32 tokens"
    )
    pace = {name: tuple(sample[0] for sample in samples) for name, samples in taken.items()}
    for name, values in pace.items():
        report.add("Pace", Measured(name, "rows/s", values))
    report.add("Ratios", ratio(f"{small} / {roomy}", pace[small], pace[roomy], at_least=0.9))
    for name, samples in taken.items():
        report.add("Processor time", *processor(name, [cpu for _, cpu in samples], "us/row"))
    report.add("Held at the end", Measured(small, "MB", (held / 1e6,), at_most=float(memory)))
    report.note(f"the full server's pool dropped {evicted:,} results before their time was up")
    report.note(
        "no call failed, no result was gone before it was read, every row was computed once: "
        "otherwise there would be no figures"
    )
    report.facts = {**found, **watch.report()}
    return report


def _asked(pool: Pool, count: int, vocab_size: int) -> Callable[[int], Sample]:
    def ask(run: int) -> Sample:
        before = pool.computed()
        prompts = make_prompts(count, vocab_size, run, 7)
        sample = timed(pool, in_batches, prompts, PER_CALL, vocab_size)
        computed, statistics = pool.computed() - before, pool.lm.statistics()
        if computed != count or statistics["resubmitted"] or statistics["failed"]:
            raise WrongRows(f"{computed} rows were computed for {count}: {statistics}")
        with pool.server.client() as admin:
            refused = admin.info("errorstats").get("errorstat_OOM")  # type: ignore[union-attr]
            if refused:
                raise WrongRows(f"the server refused for want of memory: {refused}")
            # Where there is room for all, the next run's rows need it again.
            if not admin.info("memory")["maxmemory"]:  # type: ignore[index]
                _forget_results(pool)
        return sample

    return ask


def _forget_results(pool: Pool) -> None:
    with pool.server.client() as admin:
        for shard in pool.lm.shards:
            keys = list(admin.scan_iter(f"{shard.prefix}:result:*", count=1000))
            for i in range(0, len(keys), 1000):
                admin.unlink(*keys[i : i + 1000])
            admin.delete(shard.account)


def _held(pool: Pool) -> int:
    return pool.lm.pool_statistics_sync()["held_bytes"]


def _evicted(pool: Pool) -> int:
    return pool.lm.pool_statistics_sync()["evicted"]
