"""``lmpool bench``: a quick measurement of a pool, from where it is run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from lmpool.checks import counted
from lmpool.cli.options import AsJson, Pool, Url
from lmpool.cli.terminal import escape, fits, json_text, tables

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
        print(json_text(asdict(found)))
    else:
        console = tables()
        console.print(_shown(found, console))


def _shown(found: Measurement, console: Console) -> RenderableType:
    """The figures as a table, or as lines where the terminal is narrow."""
    pace = (
        f"{found.rows_per_second:,.0f} rows/s, {found.megabytes_per_second:,.1f} MB/s, "
        f"{found.rows_per_batch:.1f} rows a batch"
    )
    figures = (
        ("one prompt at a time", [_latency(found.single_ms_median, found.single_ms_p95)]),
        (
            f"{found.concurrency:,} at a time",
            [pace, _latency(found.row_ms_median, found.row_ms_p95)],
        ),
        ("from the result cache", [f"{found.cached_rows_per_second:,.0f} rows/s"]),
    )
    title = (
        f"[italic]pool {found.pool}: {escape(found.model)} ({escape(found.engine)}), "
        f"{counted(found.workers, 'worker')}, prompts of {counted(found.prompt_tokens, 'token')}[/]"
    )
    table = Table(show_header=False)
    for name, lines in figures:
        table.add_row(name, "\n".join(lines))
    if fits(table, console):
        return Group(title, table)
    return Group(title, *("\n  ".join([f"[bold]{name}[/]", *lines]) for name, lines in figures))


def _latency(median: float, p95: float) -> str:
    return f"{median:.2f} ms median, {p95:.2f} ms for the slowest in twenty"
