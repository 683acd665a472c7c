"""Continuations piece by piece: how long the next token takes, and what all of it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

import lmpool
from lmpool.wants import Generate
from tests.benchmarks.asking import processor
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, quantile, ratio
from tests.benchmarks.pool import Cpu, Pool, WrongRows, make_prompts, must_be_computed, serving
from tests.support.server import RealServer
from tests.support.streams import continuation, tokens_of

NAME = "streams"
LINE = "milliseconds from one streamed token to the next, and processor time a token"

VOCAB_SIZE: Final = 256
DELAY: Final = 0.005
"""Seconds that an engine takes for a token which is not at once done with it."""
TOGETHER: Final = 32
NEXT_MOST: Final = 1.5


class Sample(NamedTuple):
    """One run: seconds between pieces, the seconds and tokens of all of it, processor time."""

    gaps: list[float]
    took: float
    tokens: int
    cpu: Cpu


def measure(scale: Scale) -> Report:
    """Alternate between one reader, many, and who takes the whole."""
    watch = Bystanders()
    count = scale.of(1_000, 100)
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        pool = stack.enter_context(serving(server, "streams", VOCAB_SIZE))
        opts = {"vocab_size": VOCAB_SIZE, "delay": DELAY}
        slow = stack.enter_context(serving(server, "slow", VOCAB_SIZE, engine_opts=opts))
        found = facts(server.url)
        sides = {
            "alone": partial(_alone, pool, count, 1),
            "alone, 5 ms a token": partial(_alone, slow, scale.of(400, 50), 2),
            f"{TOGETHER} at once": partial(_together, pool, scale.of(200, 20)),
            "the whole": partial(_whole, pool, count),
        }
        taken = alternate(sides, scale.runs)
    return _report(taken, count, {**found, **watch.report()})


def _report(taken: dict[str, list[Sample]], count: int, found: dict[str, object]) -> Report:
    report = Report(NAME, f"The mock engine, a vocabulary of {VOCAB_SIZE}, one worker")
    for name, samples in taken.items():
        each = tuple(1e3 * sample.took / sample.tokens for sample in samples)
        goal = NEXT_MOST if name == "alone" else None
        report.add("Time", Measured(f"{name}: a token", "ms", each, at_most=goal))
        for part, of in (("median", 0.5), ("p99", 0.99)):
            if samples[0].gaps:
                gaps = tuple(1e3 * quantile(sample.gaps, of) for sample in samples)
                most = NEXT_MOST if (name, part) == ("alone", "median") else None
                report.add("Time", Measured(f"{name}: to the next, {part}", "ms", gaps, None, most))
    late = tuple(1e3 * (quantile(s.gaps, 0.5) - DELAY) for s in taken["alone, 5 ms a token"])
    report.add("Time", Measured("5 ms a token: to the next, less these", "ms", late))
    for name, samples in taken.items():
        used = [sample.cpu for sample in samples]
        report.add("Processor time", *processor(name, used, "us/token"))
    cost = {name: tuple(s.cpu.total for s in samples) for name, samples in taken.items()}
    more = ratio("alone / the whole", cost["alone"], cost["the whole"])
    report.add("Ratios of processor time, all three processes", more)
    report.note(f"{count} tokens of a prompt of 32; one reader in an event loop, awaiting each")
    report.note(
        "an engine that draws a token in microseconds is far ahead of who tells them: pieces come "
        "in bursts, so that the mean says more than the median; a model's take milliseconds"
    )
    report.facts = found
    return report


def _alone(pool: Pool, count: int, salt: int, run: int) -> Sample:
    return _read(pool, count, [run, salt], 1)


def _together(pool: Pool, count: int, run: int) -> Sample:
    return _read(pool, count, [run, 3], TOGETHER)


def _read(pool: Pool, count: int, salt: Sequence[int], readers: int) -> Sample:
    """Read so many streams of `count` tokens at once. They are checked, untimed."""
    prompts = make_prompts(readers, VOCAB_SIZE, *salt)
    gaps: list[float] = []

    async def read(prompt: list[int]) -> list[lmpool.Piece]:
        pieces, last = [], 0.0
        async for piece in pool.lm.stream(prompt, count, seed=1, eos_token_ids=[]):
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
            pieces.append(piece)
        return pieces

    async def read_all() -> list[list[lmpool.Piece]]:
        return await asyncio.gather(*map(read, prompts))

    queued, before, began = pool.queued(), pool.cpu(), time.perf_counter()
    found = asyncio.run(read_all())
    took = time.perf_counter() - began
    spent = pool.cpu().per_job(before, readers * count)
    must_be_computed(pool, queued, readers)
    if tokens_of(found[0]) != continuation(prompts[0], count, 1):
        raise WrongRows("the pieces are not the continuation")
    return Sample(gaps, took, readers * count, spent)


def _whole(pool: Pool, count: int, run: int) -> Sample:
    (prompt,) = make_prompts(1, VOCAB_SIZE, run, 4)
    before, began = pool.cpu(), time.perf_counter()
    found = pool.lm.sync.ask(prompt, Generate(count, (), seed=1))
    took = time.perf_counter() - began
    spent = pool.cpu().per_job(before, count)
    if found.token_ids.tolist() != continuation(prompt, count, 1):
        raise WrongRows("the tokens are not the continuation")
    return Sample([], took, count, spent)
