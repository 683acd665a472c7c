"""Ways to ask a pool for many rows, timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import lmpool
from tests.benchmarks.measure import Measured
from tests.benchmarks.pool import Cpu, Pool, Prompts, check_rows, must_be_computed

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

    Between the calls, untimed, a sample of the rows is compared with the right ones. Every row
    must have been computed for this.
    """
    queued, took, used = pool.queued(), 0.0, Cpu(0.0, 0.0, 0.0)
    for i in range(0, len(prompts), per_call):
        part = prompts[i : i + per_call]
        before, began = pool.cpu(), time.perf_counter()
        rows = ask(pool.lm, part)
        took += time.perf_counter() - began
        spent = pool.cpu().per_job(before, len(prompts))
        for side in fields(Cpu):
            setattr(used, side.name, getattr(used, side.name) + getattr(spent, side.name))
        check_rows(rows, part, vocab_size)
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
