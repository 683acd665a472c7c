"""What ``lmpool top`` shows of a look at a pool."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.styled import Styled

from lmpool.checks import counted
from lmpool.cli.bars import bar
from lmpool.cli.lanes import lane_lines
from lmpool.cli.pool import executions, in_time, workers_table
from lmpool.cli.terminal import escape, grid, speaks_unicode
from lmpool.server_url import worker_command

if TYPE_CHECKING:
    from lmpool.cli.top_look import Look
    from lmpool.pool_view import PoolView
    from lmpool.producer.statistics import JobFailure

FAILURES_SHOWN: Final = 5
BAR: Final = 10


def shown(look: Look, console: Console) -> RenderableType:
    """A look as lines of any width; figures of before the server was gone are dim."""
    view = look.view
    if look.error is None:
        return "looking ..." if view is None else _body(view, look.rates, console)
    gone = int(max(0.0, time.time() - look.gone_at))
    said = (
        f"[bold red]no answer since {_clock(look.gone_at)}[/], for {in_time(gone)}: it goes on as "
        f"soon as there is one\n{escape(str(look.error))}"
    )
    if view is None:
        return Group(f"[bold]pool {look.pool}[/]", said)
    return Group(
        said,
        f"\nas it was at {_clock(view.read_at)}:",
        Styled(_body(view, look.rates, console), "dim"),
    )


def _body(view: PoolView, rates: dict[str, float] | None, console: Console) -> RenderableType:
    lines = grid("bold")
    if view.nodes_away:
        away = ", ".join(address or "the nodes of some slots" for address in view.nodes_away)
        lines.add_row("[red]away[/]", f"{escape(away)}: the figures are of the others")
    lines.add_row("pool", f"{view.pool}, {_clock(view.read_at)}")
    lines.add_row("server", f"{escape(view.url)}, {escape(view.server)}, {_memory(view, console)}")
    if view.model is None:
        return Group(
            lines,
            f"[red]nobody serves a pool {view.pool}[/] on this server: start a worker with "
            f"{escape(worker_command(view.url, view.pool))}, or name another pool with --pool",
        )
    model, did = view.model, view.statistics
    lines.add_row(
        "model",
        f"{escape(model['model'])}, {escape(model['engine'])}, {escape(model['dtype'])}, "
        f"{model['vocab_size']:,} tokens",
    )
    if view.nodes:
        lines.add_row("shards", _shards(view))
    lines.add_row("answers", _answers(view, rates))
    lines.add_row("batches", _batches(view, rates))
    lines.add_row("backlog", _backlog(view))
    for name, said in lane_lines(did, model["shards"], _pace(rates, "stolen_jobs")).items():
        lines.add_row(name, said)
    evicted = f"{did['evicted']:,} evicted" + _pace(rates, "evicted")
    lines.add_row(
        "results",
        f"{_bytes(did['held_bytes'])} held, oldest {in_time(did['oldest_seconds'])}, {evicted}",
    )
    lines.add_row("given up", _given_up(view, rates))
    if view.adapters:
        lines.add_row("adapters", escape(", ".join(view.adapters)))
    parts: list[RenderableType] = [lines, ""]
    if view.workers:
        parts += [workers_table(view.workers, console), *executions(view.workers)]
    else:
        jobs = did["backlog"]
        waiting = f", and {counted(jobs, 'job')} wait{'s' if jobs == 1 else ''}" if jobs else ""
        parts.append(
            f"[red]no worker is alive[/]{waiting}: start one with "
            f"{escape(worker_command(view.url, view.pool))}"
        )
    return Group(*parts, *_failures(view))


def _shards(view: PoolView) -> str:
    """Where the shards of a cluster lie, how many jobs are there, and who does not answer."""
    nodes = []
    for node in view.nodes:
        here = ", ".join(map(str, node["shards"])) or "none"
        state = counted(node["jobs"], "job") if node["answers"] else "[red]does not answer[/]"
        nodes.append(f"{escape(node['address'] or 'nowhere')}: {here} ({state})")
    return "\n".join(nodes)


def _answers(view: PoolView, rates: dict[str, float] | None) -> str:
    """How many a second by all workers, what there have been, and of which kinds."""
    did = view.statistics
    # Before there are two looks the workers' own word, over their last ten seconds.
    own = sum(worker["rows_per_second"] for worker in view.workers)
    pace = own if rates is None else rates["computed"]
    text = f"{pace:,.0f}/s, {did['computed']:,} computed"
    if did["answers"].keys() <= {"row"}:
        return text
    kinds = (f"{kind} {n:,}{_pace(rates, f'answers_{kind}')}" for kind, n in did["answers"].items())
    return f"{text}: {', '.join(kinds)}"


def _batches(view: PoolView, rates: dict[str, float] | None) -> str:
    did = view.statistics
    jobs: float = did["computed"]
    batches: float = did["batches"]
    if rates is not None and rates["batches"]:
        jobs, batches = rates["computed"], rates["batches"]
    mean = f", {jobs / batches:.1f} answers each" if batches else ""
    return f"{did['batches']:,}{_pace(rates, 'batches')}{mean}"


def _backlog(view: PoolView) -> str:
    each = []
    for priority, queue in view.queues.items():
        text = f"{priority} {queue['jobs']:,}"
        if queue["jobs"]:
            text += (
                f" ({queue['pending']:,} with workers, oldest {in_time(queue['oldest_seconds'])})"
            )
        each.append(text)
    return ", ".join(each)


def _given_up(view: PoolView, rates: dict[str, float] | None) -> str:
    did = view.statistics
    text = f"{did['failed']:,} failed{_pace(rates, 'failed')}, {did['expired']:,} expired"
    if view.dead_letters is None:
        return f"{text}, dead letters: not for this user of the server"
    letters = counted(view.dead_letters, "dead letter")
    if not view.dead_letters:
        return f"{text}, {letters}"
    return f"{text}, [yellow]{letters}[/]: see lmpool dead list"


def _pace(rates: dict[str, float] | None, name: str) -> str:
    """How many a second, where it is known and there are some."""
    pace = 0.0 if rates is None else rates.get(name, 0.0)
    return f" ({pace:,.3g}/s)" if 0 < pace < 100 else f" ({pace:,.0f}/s)" if pace else ""


def _memory(view: PoolView, console: Console) -> str:
    used, most = view.memory_bytes, view.memory_max_bytes
    if not most or any(node["answers"] and not node["memory_max_bytes"] for node in view.nodes):
        return f"{_bytes(used)} in use, no maxmemory"
    part = used / most
    filled = bar(part, BAR, ascii_only=not speaks_unicode(console))
    return f"{_bytes(used)} of {_bytes(most)} {filled} {100 * part:.0f} %"


def _failures(view: PoolView) -> list[RenderableType]:
    """The latest of all living workers, the newest first."""
    found: list[tuple[JobFailure, str]] = [
        (failure, worker["id"]) for worker in view.workers for failure in worker["failures"]
    ]
    if not found:
        return []
    found.sort(key=lambda each: each[0]["at"], reverse=True)
    lines = grid()
    for failure, worker in found[:FAILURES_SHOWN]:
        jobs = f" ({failure['jobs']:,} jobs)" if failure["jobs"] > 1 else ""
        ago = in_time(max(0.0, view.read_at - failure["at"]))
        lines.add_row(f"{ago} ago", f"{escape(failure['reason'])}{jobs}, {escape(worker)}")
    return ["\n[bold]latest failures[/]", lines]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _bytes(count: int) -> str:
    from lmpool.diagnosis import in_bytes

    return in_bytes(count)
