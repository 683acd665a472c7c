"""``lmpool bench``: a quick measurement of a pool, from where it is run."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmpool.model_info import ModelInfo
from lmpool.producer import NumpyRows, PooledLM, connect

MOST_SINGLES = 200
CACHED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Rows per second and latencies (milliseconds) of one pool, as one client sees them."""

    pool: str
    model: str
    engine: str
    workers: int
    prompt_tokens: int
    single_ms_median: float
    single_ms_p95: float
    concurrency: int
    rows: int
    rows_per_second: float
    megabytes_per_second: float
    row_ms_median: float
    row_ms_p95: float
    rows_per_batch: float
    cached_rows_per_second: float


class _Prompts:
    """Random prompts that nobody has asked before."""

    def __init__(self, info: ModelInfo, length: int) -> None:
        self._random = np.random.default_rng()
        self._vocab_size = info.vocab_size
        self._length = length

    def __call__(self) -> list[int]:
        return self._random.integers(self._vocab_size, size=self._length).tolist()  # type: ignore[no-any-return]


def measure(
    lm: PooledLM[NumpyRows],
    again: PooledLM[NumpyRows],
    *,
    seconds: float,
    concurrency: int,
    length: int,
) -> Measurement:
    """Measure `lm`'s pool. `again` is a client without a local cache, for rows already computed."""
    info = lm.info
    prompts = _Prompts(info, length)
    lm.next_token_logprobs_sync(prompts(), timeout=60.0)
    single = _one_at_a_time(lm, prompts, seconds / 3)
    before = lm.pool_statistics_sync()
    asked: list[list[int]] = []
    started = time.perf_counter()
    took = asyncio.run(_many(lm, prompts, seconds, concurrency, asked))
    elapsed = time.perf_counter() - started
    after = lm.pool_statistics_sync()
    batches = after["batches"] - before["batches"]
    width = info.vocab_size * (4 if info.encoding == "f32" else 2)
    return Measurement(
        pool=lm.pool,
        model=info.model,
        engine=info.engine,
        workers=len(after["workers"]),
        prompt_tokens=length,
        single_ms_median=_ms(single, 50),
        single_ms_p95=_ms(single, 95),
        concurrency=concurrency,
        rows=len(took),
        rows_per_second=round(len(took) / elapsed, 1),
        megabytes_per_second=round(len(took) * width / elapsed / 1e6, 2),
        row_ms_median=_ms(took, 50),
        row_ms_p95=_ms(took, 95),
        rows_per_batch=round((after["computed"] - before["computed"]) / max(1, batches), 1),
        cached_rows_per_second=round(_cached(again, asked[-concurrency:]), 1),
    )


def _one_at_a_time(lm: PooledLM[NumpyRows], prompts: _Prompts, seconds: float) -> list[float]:
    took: list[float] = []
    end = time.perf_counter() + seconds
    while len(took) < MOST_SINGLES and (not took or time.perf_counter() < end):
        prompt = prompts()
        started = time.perf_counter()
        lm.next_token_logprobs_sync(prompt)
        took.append(time.perf_counter() - started)
    return took


async def _many(
    lm: PooledLM[NumpyRows],
    prompts: _Prompts,
    seconds: float,
    concurrency: int,
    asked: list[list[int]],
) -> list[float]:
    """Keep `concurrency` prompts on their way; the seconds that each took."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < end:
            prompt = prompts()
            started = time.perf_counter()
            await lm.next_token_logprobs(prompt)
            took.append(time.perf_counter() - started)
            asked.append(prompt)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one())
    return took


def _cached(lm: PooledLM[NumpyRows], prompts: list[list[int]]) -> float:
    """Rows per second out of the result cache."""
    rows, started = 0, time.perf_counter()
    while time.perf_counter() - started < CACHED_SECONDS:
        lm.batch_next_token_logprobs_sync(prompts)
        rows += len(prompts)
    return rows / (time.perf_counter() - started)


def _ms(took: list[float], percentile: float) -> float:
    return round(1000 * float(np.percentile(took, percentile)), 3)


def run_bench(
    *,
    seconds: float,
    concurrency: int,
    length: int,
    as_json: bool,
    url: str | None,
    pool: str | None,
) -> None:
    """Measure and print."""
    with (
        connect(url, pool, framework="numpy") as lm,
        connect(url, pool, framework="numpy", cache_bytes=0) as again,
    ):
        found = measure(lm, again, seconds=seconds, concurrency=concurrency, length=length)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    table = Table(
        title=f"pool {found.pool}: {escape(found.model)} ({found.engine}), "
        f"{found.workers} workers, prompts of {length} tokens",
        title_justify="left",
        show_header=False,
    )
    table.add_row("one prompt at a time", _latency(found.single_ms_median, found.single_ms_p95))
    table.add_row(
        f"{concurrency:,} at a time",
        f"{found.rows_per_second:,.0f} rows/s, {found.megabytes_per_second:,.1f} MB/s, "
        f"{found.rows_per_batch:.1f} rows a batch",
    )
    table.add_row("", _latency(found.row_ms_median, found.row_ms_p95))
    table.add_row("from the result cache", f"{found.cached_rows_per_second:,.0f} rows/s")
    Console(highlight=False).print(table)


def _latency(median: float, p95: float) -> str:
    return f"{median:.2f} ms median, {p95:.2f} ms for the slowest in twenty"
