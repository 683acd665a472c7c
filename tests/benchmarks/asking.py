"""Ways to ask a pool for many rows, timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields
from functools import partial
from math import gcd
from typing import Any

import lmpool
from tests.benchmarks.measure import Measured
from tests.benchmarks.pool import (
    CHECKED,
    Cpu,
    Pool,
    Prompts,
    WrongRows,
    check_rows,
    must_be_computed,
)

Ask = Callable[[lmpool.PooledLM, Sequence[list[int]]], Sequence[Any]]


def in_batches(lm: lmpool.PooledLM, prompts: Sequence[list[int]]) -> Sequence[Any]:
    """One call for all prompts."""
    rows: Sequence[Any] = lm.batch_next_token_logprobs_sync(prompts)
    return rows


def gathered(lm: lmpool.PooledLM, prompts: Sequence[list[int]]) -> Sequence[Any]:
    """One call for each prompt, all awaited together."""

    rows: list[Any] = []

    async def ask() -> None:
        rows.extend(await asyncio.gather(*map(lm.next_token_logprobs, prompts)))

    # What the coroutine returned, Python 3.11's asyncio.run would write out as text, in vain.
    asyncio.run(ask())
    return rows


def timed(
    pool: Pool, ask: Ask, prompts: Prompts, per_call: int, vocab_size: int
) -> tuple[float, Cpu]:
    """Rows a second of calls with `per_call` prompts each, and processor time in us a row.

    What `timed_answers` says of its answers holds for the rows.
    """
    return timed_answers(pool, ask, prompts, per_call, partial(check_rows, vocab_size=vocab_size))


def timed_answers(
    pool: Pool,
    ask: Ask,
    prompts: Prompts,
    per_call: int,
    check: Callable[[Sequence[Any], Sequence[Sequence[int]]], None],
) -> tuple[float, Cpu]:
    """Answers a second of calls one right after another, and processor time in us an answer.

    Until all are in the caller's hands and stored: rows that lie near are there before. A sample,
    copied from each call's, is given to `check` when the time is taken. Each answer must have been
    computed for this.
    """
    queued, computed = pool.queued(), pool.computed()
    sample: list[Any] = []
    chosen: list[Sequence[int]] = []
    step = max(1, len(prompts) // CHECKED)
    while gcd(step, per_call) > 1:  # or they would be of the same places in each call
        step -= 1
    before, began = pool.cpu(), time.perf_counter()
    for i in range(0, len(prompts), per_call):
        part = prompts[i : i + per_call]
        found = ask(pool.lm, part)
        if len(found) != len(part):
            raise WrongRows(f"{len(found)} answers to {len(part)} prompts")
        for place in range(-i % step, len(part), step):
            sample.append(copy(found[place]))
            chosen.append(part[place])
    pool.until_computed(computed + len(prompts))
    took = time.perf_counter() - began
    used = pool.cpu().per_job(before, len(prompts))
    check(sample, chosen)
    must_be_computed(pool, queued, len(prompts))
    return len(prompts) / took, used


def processor(name: str, used: Sequence[Cpu], unit: str) -> list[Measured]:
    """Processor time of each process, and the pace that the busiest one allows."""
    if not used:
        return []
    figures = [
        Measured(f"{name}: {side.name}", unit, tuple(getattr(cpu, side.name) for cpu in used))
        for side in fields(Cpu)
    ]
    bound = tuple(1e6 / max(cpu.client, cpu.worker, cpu.server) for cpu in used)
    return [*figures, Measured(f"{name}: bound", f"{unit.partition('/')[2]}s/s", bound)]
