"""``lmpool shards``: how a pool lies, and changing that while it is served."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lmpool.cli.options import AsJson, Pool, Url
from lmpool.cli.terminal import escape, json_text, lines, tables

if TYPE_CHECKING:
    from rich.console import Console

    from lmpool.shards import PoolShards


def shards(
    count: Annotated[
        int | None, typer.Argument(metavar="SHARDS", help="How many there are to be.")
    ] = None,
    lanes: Annotated[
        int | None, typer.Option(metavar="N", help="How many lanes each is to have.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the workers.", min=0.0)
    ] = 30.0,
    as_json: AsJson = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Show the pool's shards and lanes, or change their number while it is served.

    Workers and clients move over: nothing is lost, and only jobs that run at the change may run
    once more. Status 1 if a worker has not moved in time.
    """
    from lmpool.settings import ClientOptions
    from lmpool.shards import change, look

    options = ClientOptions(url=url, pool=pool)
    if count is None and lanes is None:
        found = look(options.url, options.pool)
        if as_json:
            print(json_text(asdict(found)))
        else:
            _show(found, tables())
        return
    found = change(options.url, options.pool, count, lanes, wait=timeout)
    if as_json:
        print(json_text(asdict(found)))
    else:
        console = lines()
        console.print(_in_words(found))
        for name in found.behind:
            console.print(
                f"[red]{escape(name)} has not moved yet[/]: it is busy or frozen, and moves as "
                "soon as it can, or runs an older lmpool: start it anew"
            )
    raise typer.Exit(0 if found.is_done else 1)


def _in_words(found: PoolShards) -> str:
    from lmpool.model_info import in_words

    moved, all_of_them = len(found.workers), len(found.workers) + len(found.behind)
    return (
        f"pool {escape(found.pool)}: {in_words(len(found.shards), found.lanes)}; {moved} of "
        f"{all_of_them} {'worker serves' if all_of_them == 1 else 'workers serve'} it so"
    )


def _show(found: PoolShards, console: Console) -> None:
    console.print(_in_words(found))
    table = Table()
    for name in ("shard", "slot", "on", "jobs", "lanes in use"):
        table.add_column(name, justify="left" if name == "on" else "right")
    for shard in found.shards:
        on = escape(shard.node) if shard.node else "-"
        if not shard.answers:
            on = f"[red]{on} does not answer[/]"
        numbers = f"{shard.number}", f"{shard.slot}"
        table.add_row(*numbers, on, f"{shard.jobs:,}", f"{shard.lanes_used}")
    console.print(table)
