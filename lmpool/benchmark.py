"""A quick measurement of a pool, as one client sees it from where it is run.

::

    from lmpool import benchmark

    print(benchmark.measure(pool="llama", seconds=5).rows_per_second)
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from lmpool.checks import as_integer, as_number, quoted
from lmpool.errors import SettingsError
from lmpool.model_info import ModelInfo
from lmpool.producer import NumpyRows, PooledLM, connect
from lmpool.producer.statistics import PoolStatistics

MOST_SINGLES: Final = 200
"""Prompts asked one at a time, at most."""
CACHED_SECONDS: Final = 1.0
COUNTED_WITHIN: Final = 1.0
"""Seconds that what a client has is given to be counted."""

__all__ = ["Measurement", "measure"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Rows per second and latencies (milliseconds) of one pool, as one client sees them."""

    pool: str
    model: str
    engine: str
    workers: int
    prompt_tokens: int
    """Tokens in each prompt."""
    single_ms_median: float
    """How long a prompt takes that is asked alone."""
    single_ms_p95: float
    concurrency: int
    """Prompts asked at a time under load."""
    rows: int
    rows_per_second: float
    megabytes_per_second: float
    """What rows took on the wire to this client."""
    row_ms_median: float
    """How long a prompt takes under load."""
    row_ms_p95: float
    rows_per_batch: float
    """Rows in a batch of the pool's, other clients' among them."""
    cached_rows_per_second: float
    """Rows out of the pool's result cache."""


class _Prompts:
    """Random prompts that nobody has asked before."""

    def __init__(self, info: ModelInfo, length: int) -> None:
        self._random = np.random.default_rng()
        self._vocab_size = info.vocab_size
        self._length = length

    def __call__(self) -> list[int]:
        return self._random.integers(self._vocab_size, size=self._length).tolist()  # type: ignore[no-any-return]


def measure(
    url: str | None = None,
    pool: str | None = None,
    *,
    seconds: float = 5.0,
    concurrency: int = 256,
    length: int = 32,
) -> Measurement:
    """Load a pool for `seconds` with random prompts of `length` tokens, `concurrency` at a time.

    Blocks, and runs an event loop of its own. Raises what asking raises (see `lmpool.errors`).
    """
    _check(seconds, concurrency, length)
    with (
        connect(url, pool, framework="numpy") as lm,
        # Rows that the first has asked for come to the second from the pool.
        connect(url, pool, framework="numpy", cache_bytes=0) as again,
    ):
        info = lm.info
        prompts = _Prompts(info, length)
        lm.next_token_logprobs_sync(prompts(), timeout=60.0)
        others = lm.pool_statistics_sync()["computed"] - lm.statistics()["queued"]
        single = _one_at_a_time(lm, prompts, seconds / 3)
        before = when_counted(lm, others + lm.statistics()["queued"])
        load = asyncio.run(_load(lm, prompts, seconds, concurrency))
        after = when_counted(lm, others + lm.statistics()["queued"])
        cached = _cached(again, load.prompts[-concurrency:])
    rate = len(load.took) / load.seconds
    batches = after["batches"] - before["batches"]
    row_bytes = info.vocab_size * (4 if info.encoding == "f32" else 2)
    return Measurement(
        pool=lm.pool,
        model=info.model,
        engine=info.engine,
        workers=len(after["workers"]),
        prompt_tokens=length,
        single_ms_median=_ms(single, 50),
        single_ms_p95=_ms(single, 95),
        concurrency=concurrency,
        rows=len(load.took),
        rows_per_second=round(rate, 1),
        megabytes_per_second=round(rate * row_bytes / 1e6, 2),
        row_ms_median=_ms(load.took, 50),
        row_ms_p95=_ms(load.took, 95),
        rows_per_batch=round((after["computed"] - before["computed"]) / max(1, batches), 1),
        cached_rows_per_second=round(cached, 1),
    )


def when_counted(lm: PooledLM[NumpyRows], computed: int) -> PoolStatistics:
    """The pool's figures once so many answers are counted, or `COUNTED_WITHIN` seconds later: a
    client has large rows before they are stored and counted."""
    until = time.monotonic() + COUNTED_WITHIN
    while True:
        found = lm.pool_statistics_sync()
        if found["computed"] >= computed or time.monotonic() > until:
            return found
        time.sleep(0.01)


def _check(seconds: object, concurrency: object, length: object) -> None:
    lasts = as_number(seconds)
    if lasts is None or not 0 < lasts <= 86_400:
        raise SettingsError(f"seconds={quoted(seconds)}: write a number above 0, at most 86400")
    for name, given in (("concurrency", concurrency), ("length", length)):
        number = as_integer(given)
        if number is None or not 0 < number <= 1_000_000:
            raise SettingsError(f"{name}={quoted(given)}: write an integer from 1 to 1000000")


def _one_at_a_time(lm: PooledLM[NumpyRows], prompts: _Prompts, seconds: float) -> list[float]:
    took: list[float] = []
    end = time.perf_counter() + seconds
    while len(took) < MOST_SINGLES and (not took or time.perf_counter() < end):
        prompt = prompts()
        started = time.perf_counter()
        lm.next_token_logprobs_sync(prompt)
        took.append(time.perf_counter() - started)
    return took


@dataclass(frozen=True, slots=True)
class _Load:
    """What was asked, the seconds that each prompt took, and those of all together."""

    prompts: list[list[int]]
    took: list[float]
    seconds: float


async def _load(
    lm: PooledLM[NumpyRows], prompts: _Prompts, seconds: float, concurrency: int
) -> _Load:
    """Keep `concurrency` prompts on their way."""
    asked: list[list[int]] = []
    took: list[float] = []
    began = time.perf_counter()

    async def one() -> None:
        while not took or time.perf_counter() < began + seconds:
            prompt = prompts()
            started = time.perf_counter()
            await lm.next_token_logprobs(prompt)
            took.append(time.perf_counter() - started)
            asked.append(prompt)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one())
    except ExceptionGroup as group_of_all:
        # The pool was busy or went away, for all alike: one says it.
        raise group_of_all.exceptions[0] from None
    return _Load(asked, took, time.perf_counter() - began)


def _cached(lm: PooledLM[NumpyRows], prompts: list[list[int]]) -> float:
    """Rows per second out of the result cache."""
    rows, took, started = 0, 0.0, time.perf_counter()
    while took < CACHED_SECONDS:
        lm.batch_next_token_logprobs_sync(prompts)
        rows += len(prompts)
        took = time.perf_counter() - started
    return rows / took


def _ms(took: list[float], percentile: float) -> float:
    return round(1000 * float(np.percentile(took, percentile)), 3)
