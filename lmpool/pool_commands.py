"""``lmpool logprobs``, ``ping`` and ``stats``."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lmpool.bars import bar_lines, likeliest
from lmpool.commands import Server
from lmpool.errors import PromptError
from lmpool.producer import PooledLM, connect
from lmpool.producer.statistics import PoolStatistics
from lmpool.prompt_text import encoder, read_vocabulary
from lmpool.server import explained, greet, open_server
from lmpool.settings import mask_url

PINGS = 25


def show_logprobs(
    text: str,
    *,
    k: int,
    adapter: str | None,
    timeout: float,
    url: str | None,
    pool: str | None,
) -> None:
    """Print the likeliest next tokens of `text`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError("the prompt is no text in UTF-8") from None
    console = Console(highlight=False, soft_wrap=True)
    with connect(url, pool, framework="numpy") as lm:
        vocabulary = read_vocabulary(lm)
        ids = encoder(lm, vocabulary)(text)
        row = lm.next_token_logprobs_sync(ids, adapter, timeout=timeout)
    found, probabilities = likeliest(row, k)
    plural = "token" if len(ids) == 1 else "tokens"
    console.print(f"[dim]{escape(lm.info.model)}, {len(ids)} {plural}[/]")
    for line in bar_lines(
        vocabulary.tokens, found, probabilities, ascii_only=not speaks_unicode(console)
    ):
        console.print(escape(line))


def speaks_unicode(console: Console) -> bool:
    """Whether the terminal, or the file, takes more than ASCII."""
    return console.encoding.lower().replace("-", "").startswith("utf")


def measure_latency(server: Server, pings: int = PINGS) -> list[float]:
    """Seconds that each of some PINGs took, in order of size."""
    took = []
    for _ in range(pings):
        started = time.perf_counter()
        server.ping()
        took.append(time.perf_counter() - started)
    return sorted(took)


def show_ping(*, url: str | None, pool: str | None) -> int:
    """Print who answers; 0 if a worker is alive, else 1."""
    console = Console(highlight=False, soft_wrap=True)
    with connect(url, pool) as lm:
        server = open_server(lm.url)
        try:
            version = greet(server, lm.url)
            with explained(lm.url):
                took = measure_latency(server)
        finally:
            server.close()
            server.connection_pool.disconnect()
        alive = lm.pool_statistics_sync()["workers"]
        info = lm.info
    console.print(
        f"[bold]server[/]   {escape(mask_url(lm.url))}, {version}, "
        f"{1000 * statistics.median(took):.2f} ms (from {1000 * took[0]:.2f} to "
        f"{1000 * took[-1]:.2f} in {len(took)} pings)"
    )
    console.print(
        f"[bold]pool[/]     {lm.pool}: {escape(info.model)} ({info.engine}, {info.dtype}), "
        f"{info.vocab_size:,} tokens, prompts up to {info.max_prompt_tokens:,}, rows as "
        f"{info.encoding}"
    )
    color = "green" if alive else "red"
    line = f"[bold]workers[/]  [{color}]{len(alive)} alive[/]"
    if alive:
        line += ": " + escape(", ".join(worker["id"] for worker in alive))
    console.print(line)
    return 0 if alive else 1


def show_stats(*, as_json: bool, every: float | None, url: str | None, pool: str | None) -> None:
    """Print the pool's statistics, again each `every` seconds if that is given."""
    console = Console(highlight=False)
    with connect(url, pool) as lm:
        found = lm.pool_statistics_sync()
        if as_json:
            print(json.dumps(found), flush=True)
            while every is not None:
                time.sleep(every)
                print(json.dumps(lm.pool_statistics_sync()), flush=True)
        elif every is None or not console.is_terminal:
            console.print(_statistics(lm, found, None))
            while every is not None:
                found = _after(lm, every, found, console)
        else:
            with Live(_statistics(lm, found, None), console=console, auto_refresh=False) as live:
                while True:
                    before, since = found, time.monotonic()
                    time.sleep(every)
                    found = lm.pool_statistics_sync()
                    rate = (found["computed"] - before["computed"]) / (time.monotonic() - since)
                    live.update(_statistics(lm, found, rate), refresh=True)


def _after(lm: PooledLM, every: float, before: PoolStatistics, console: Console) -> PoolStatistics:
    since = time.monotonic()
    time.sleep(every)
    found = lm.pool_statistics_sync()
    rate = (found["computed"] - before["computed"]) / (time.monotonic() - since)
    console.print(_statistics(lm, found, rate))
    return found


def _statistics(lm: PooledLM, found: PoolStatistics, rate: float | None) -> RenderableType:
    batches, rows = found["batches"], found["computed"]
    counters = Table(title=f"pool {lm.pool}: {escape(lm.info.model)}", title_justify="left")
    numbers: list[tuple[str, Any]] = [
        ("computed", f"{rows:,}"),
        ("batches", f"{batches:,}"),
        ("a batch", f"{rows / batches:.1f}" if batches else "-"),
        ("failed", f"{found['failed']:,}"),
        ("expired", f"{found['expired']:,}"),
        ("backlog", f"{found['backlog']:,}"),
    ]
    if rate is not None:
        numbers.append(("rows/s", f"{rate:,.0f}"))
    for name, _ in numbers:
        counters.add_column(name, justify="right")
    counters.add_row(*(value for _, value in numbers))
    if not found["workers"]:
        return Group(counters, "[red]no worker is alive[/]: start one with lmpool worker")
    workers = Table()
    for name in ("worker", "host", "pid", "engine", "gpu", "rows/s"):
        workers.add_column(name, justify="right" if name in ("pid", "rows/s") else "left")
    for worker in found["workers"]:
        workers.add_row(
            escape(worker["id"]),
            escape(worker["host"]),
            str(worker["pid"]),
            escape(worker["engine"]),
            escape(worker["gpu"]) or "-",
            f"{worker['rows_per_second']:,.0f}",
        )
    return Group(counters, workers)
