"""``lmpool logprobs``, ``ping`` and ``stats``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from lmpool.checks import counted
from lmpool.cli.lanes import at_home, lane_lines, stolen, stolen_now
from lmpool.cli.options import Adapter, AsJson, Every, Lora, Pool, Url
from lmpool.cli.terminal import escape, fits, grid, json_text, lines, speaks_unicode, tables, titled
from lmpool.server_url import worker_command

if TYPE_CHECKING:
    from lmpool.producer import PooledLM
    from lmpool.producer.statistics import PoolStatistics, WorkerStatistics
    from lmpool.wants import TopLogprobs


def logprobs(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    k: Annotated[int, typer.Option("-k", metavar="N", help="How many tokens to show.", min=1)] = 10,
    adapter: Adapter = None,
    lora: Lora = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait.", min=0.001)
    ] = 60.0,
    as_json: AsJson = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Show the likeliest next tokens of a prompt, as bars."""
    import numpy as np

    from lmpool.cli.bars import bar_lines
    from lmpool.producer import connect
    from lmpool.prompt_text import encoder, read_vocabulary

    console = lines()
    with connect(url, pool, framework="numpy") as lm:
        vocabulary = read_vocabulary(lm)
        ids = encoder(lm, vocabulary)(text)
        most = min(k, lm.info.vocab_size)
        top = lm.sync.top_logprobs(ids, most, adapter or lora, timeout=timeout)
    if as_json:
        print(json_text(_as_json(top, vocabulary.tokens)))
        return
    console.print(f"[dim]{escape(lm.info.model)}, {counted(len(ids), 'token')}[/]")
    for line in bar_lines(
        vocabulary.tokens,
        top.token_ids,
        np.exp(top.logprobs),
        ascii_only=not speaks_unicode(console),
    ):
        console.print(escape(line))


def _as_json(top: TopLogprobs, tokens: Sequence[bytes]) -> dict[str, object]:
    """The likeliest tokens for programs."""
    from lmpool.prompt_text import decode

    ids, each = top.token_ids.tolist(), top.logprobs.tolist()
    return {
        "tokens": [
            {"id": i, "token": decode(tokens, [i]), "logprob": logprob}
            for i, logprob in zip(ids, each, strict=True)
        ],
        "rest": float(top.rest),
    }


def ping(as_json: AsJson = False, url: Url = None, pool: Pool = None) -> None:
    """Ask whether server and pool answer, and how fast. Status 1 if no worker is alive."""
    from lmpool import inspection

    found = inspection.ping(url, pool)
    if as_json:
        print(json_text({**asdict(found), "latency": found.latency}))
        raise typer.Exit(0 if found.workers else 1)
    console = lines()
    model, fastest, slowest = found.model, found.latencies[0], found.latencies[-1]
    console.print(
        f"[bold]server[/]   {escape(found.url)}, {found.server}, "
        f"{1000 * found.latency:.2f} ms (from {1000 * fastest:.2f} to {1000 * slowest:.2f} "
        f"in {len(found.latencies)} pings)"
    )
    for address, took in found.nodes.items():
        said = "[red]does not answer[/]" if took is None else f"{1000 * took:.2f} ms"
        console.print(f"[bold]node[/]     {escape(address)} {said}")
    console.print(
        f"[bold]pool[/]     {found.pool}: {escape(model.model)} ({model.engine}, {model.dtype}), "
        f"{model.vocab_size:,} tokens, prompts up to {model.max_prompt_tokens:,}, rows as "
        f"{model.encoding}"
    )
    color = "green" if found.workers else "red"
    line = f"[bold]workers[/]  [{color}]{len(found.workers)} alive[/]"
    if found.workers:
        line += ": " + escape(", ".join(worker["id"] for worker in found.workers))
    console.print(line)
    raise typer.Exit(0 if found.workers else 1)


def stats(
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    every: Every = 2.0,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Show what the pool has done, its backlog and its workers."""
    from lmpool.producer import connect

    console = tables()
    with connect(url, pool) as lm:
        looks = _looks(lm, every if watch else None)
        if as_json:
            for found, _ in looks:
                print(json_text(found), flush=True)
        elif watch and console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for found, rate in looks:
                    live.update(_shown(lm, found, rate, console), refresh=True)
        else:
            for found, rate in looks:
                console.print(_shown(lm, found, rate, console))


def _looks(lm: PooledLM, every: float | None) -> Iterator[tuple[PoolStatistics, float | None]]:
    """The pool's statistics, again each `every` seconds, with the rows a second since the last."""
    found, looked = lm.pool_statistics_sync(), time.monotonic()
    yield found, None
    while every is not None:
        time.sleep(every)
        before, since = found["computed"], looked
        found, looked = lm.pool_statistics_sync(), time.monotonic()
        yield found, (found["computed"] - before) / (looked - since)


def _shown(
    lm: PooledLM, found: PoolStatistics, rate: float | None, console: Console
) -> RenderableType:
    counters = counters_table(f"pool {lm.pool}: {escape(lm.info.model)}", found, rate, console)
    parts: list[RenderableType] = [counters]
    if away := found["shards_away"]:
        numbers = ", ".join(map(str, away))
        parts.append(
            f"[red]shards {numbers} of {lm.info.shards} do not answer[/]: the figures are of the "
            "others (lmpool doctor says which nodes)"
        )
    if of_lanes := lane_lines(found, lm.info.shards):
        named = grid()
        for name, said in of_lanes.items():
            named.add_row(name, said)
        parts.append(named)
    if not found["workers"]:
        command = escape(worker_command(lm.url, lm.pool))
        return Group(*parts, f"[red]no worker is alive[/]: start one with {command}")
    return Group(*parts, workers_table(found["workers"], console), *executions(found["workers"]))


def counters_table(
    title: str, found: PoolStatistics, rate: float | None, console: Console
) -> RenderableType:
    """What the pool has done and holds: one row, or one line each where the terminal is narrow."""
    from lmpool.diagnosis import in_bytes

    batches, rows = found["batches"], found["computed"]
    numbers = {
        "computed": f"{rows:,}",
        "batches": f"{batches:,}",
        "a batch": f"{rows / batches:.1f}" if batches else "-",
        "failed": f"{found['failed']:,}",
        "expired": f"{found['expired']:,}",
        "backlog": f"{found['backlog']:,}",
        "held": in_bytes(found["held_bytes"]),
        "oldest": in_time(found["oldest_seconds"]),
        "evicted": f"{found['evicted']:,}",
    }
    if rate is not None:
        numbers["rows/s"] = f"{rate:,.0f}"
    table = Table()
    for name in numbers:
        table.add_column(name, justify="right")
    table.add_row(*numbers.values())
    if not fits(table, console):
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, number in numbers.items():
            table.add_row(name, number)
    kinds = found["answers"]
    if kinds.keys() <= {"row"}:
        return titled(title, table)
    each = ", ".join(f"{kind} {number:,}" for kind, number in kinds.items())
    return Group(titled(title, table), f"answers: {each}")


def in_time(seconds: float | None) -> str:
    """Seconds, or minutes and seconds: ``7.5 s``, ``9 min 5 s``."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def workers_table(workers: list[WorkerStatistics], console: Console) -> RenderableType:
    """Who serves the pool: a row each, or some lines each where the terminal is narrow."""
    table, homes = Table(), at_home(workers)
    for name in ("worker", "host", "pid", "engine", "gpu", "rows/s"):
        table.add_column(name, justify="right" if name in ("pid", "rows/s") else "left")
    for name in ("lanes", "stolen") if homes else ():
        table.add_column(name, justify="right")
    for worker in workers:
        table.add_row(
            escape(worker["id"]),
            escape(worker["host"]),
            str(worker["pid"]),
            escape(worker["engine"]),
            escape(worker["gpu"]) or "-",
            f"{worker['rows_per_second']:,.0f}",
            *((f"{worker['lanes']:,}", stolen(worker) + stolen_now(worker)) if homes else ()),
        )
    if fits(table, console):
        return table
    return "\n".join(
        f"[bold]{escape(worker['id'])}[/]\n"
        f"  {escape(worker['host'])}, pid {worker['pid']}, {escape(worker['engine'])}, "
        f"gpu {escape(worker['gpu']) or '-'}, {worker['rows_per_second']:,.0f} rows/s"
        + (
            f", home of {counted(worker['lanes'], 'lane')}, {stolen(worker)} stolen"
            f"{stolen_now(worker)}"
            if homes
            else ""
        )
        for worker in workers
    )


def executions(workers: list[WorkerStatistics]) -> list[str]:
    """How workers compute prompts: a line for each way, and whose it is where there are several."""
    ways: dict[str, list[str]] = {}
    for worker in workers:
        if worker["execution"] is not None:
            ways.setdefault(worker["execution"], []).append(worker["id"])
    everyone = len(next(iter(ways.values()), ())) == len(workers)
    return [
        escape(f"computed: {way}" + ("" if everyone else f" ({', '.join(ids)})"))
        for way, ids in ways.items()
    ]
