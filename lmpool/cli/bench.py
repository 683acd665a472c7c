"""``lmpool bench``: a quick measurement of a pool, from where it is run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from lmpool.cli.options import AsJson, Pool, Url
from lmpool.cli.terminal import escape, tables, titled

if TYPE_CHECKING:
    from lmpool.benchmark import Measurement


def bench(
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the load lasts.", min=0.1, max=86_400)
    ] = 5.0,
    concurrency: Annotated[
        int, typer.Option(metavar="N", help="Prompts asked at a time.", min=1, max=100_000)
    ] = 256,
    length: Annotated[
        int, typer.Option(metavar="N", help="Tokens in each prompt.", min=1, max=1_000_000)
    ] = 32,
    as_json: AsJson = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Measure a pool from here: rows per second and latencies. It loads the pool."""
    from lmpool.benchmark import measure

    found = measure(url, pool, seconds=seconds, concurrency=concurrency, length=length)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        tables().print(_table(found))


def _table(found: Measurement) -> RenderableType:
    table = Table(show_header=False)
    table.add_row("one prompt at a time", _latency(found.single_ms_median, found.single_ms_p95))
    table.add_row(
        f"{found.concurrency:,} at a time",
        f"{found.rows_per_second:,.0f} rows/s, {found.megabytes_per_second:,.1f} MB/s, "
        f"{found.rows_per_batch:.1f} rows a batch",
    )
    table.add_row("", _latency(found.row_ms_median, found.row_ms_p95))
    table.add_row("from the result cache", f"{found.cached_rows_per_second:,.0f} rows/s")
    return titled(
        f"pool {found.pool}: {escape(found.model)} ({found.engine}), {found.workers} workers, "
        f"prompts of {found.prompt_tokens} tokens",
        table,
    )


def _latency(median: float, p95: float) -> str:
    return f"{median:.2f} ms median, {p95:.2f} ms for the slowest in twenty"
