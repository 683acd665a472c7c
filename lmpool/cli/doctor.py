"""``lmpool doctor``: what is wrong with a server and a pool, or between the installed engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from lmpool.cli.options import Pool, Url
from lmpool.cli.terminal import escape, lines, titled

if TYPE_CHECKING:
    from lmpool.diagnosis import Finding
    from lmpool.engine_check import Comparison, EngineCheck

WRONG: Final = "[bold red]wrong[/]"
MARKS: Final = {"ok": "[green]ok   [/]", "note": "[yellow]note [/]", "wrong": WRONG}


def doctor(
    engines: Annotated[
        bool, typer.Option("--engines", help="Compare the engines that are installed here instead.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="With --engines: tiny, a folder, or a hub id.",
            envvar="LMPOOL_MODEL",
            show_envvar=True,
            show_default="tiny",
        ),
    ] = None,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Find out what is wrong with this server and pool. Status 1 if something is."""
    console = lines()
    good = _engines_are_good(model, console) if engines else _pool_is_good(url, pool, console)
    raise typer.Exit(0 if good else 1)


def _pool_is_good(url: str | None, pool: str | None, console: Console) -> bool:
    from lmpool.inspection import diagnose
    from lmpool.settings import ClientOptions, mask_url

    options = ClientOptions(url=url, pool=pool)
    console.print(f"[bold]{escape(mask_url(options.url))}[/], pool {options.pool}")
    findings = diagnose(options.url, options.pool)
    _print_findings(findings, console)
    wrong = sum(finding.level == "wrong" for finding in findings)
    notes = sum(finding.level == "note" for finding in findings)
    found = f"[bold red]{wrong} wrong[/]" if wrong else "nothing is wrong"
    console.print(f"\n{found}, {notes} to note")
    return not wrong


def _print_findings(findings: Iterable[Finding], console: Console) -> None:
    for finding in findings:
        console.print(f"{MARKS[finding.level]}  {escape(finding.what)}")
        if finding.remedy:
            console.print(f"       [dim]->[/] {escape(finding.remedy)}")


def _engines_are_good(model: str | None, console: Console) -> bool:
    from lmpool.backends.load import installed_engines
    from lmpool.engine_check import check_engines
    from lmpool.settings import WorkerOptions

    names = installed_engines()
    if not names:
        console.print("no engine is installed here: pip install 'lmpool\\[hf]'")
        return False
    # A revision is that of the environment's model, and options are those of its engine alone.
    options = WorkerOptions()
    model = model or options.model
    if options.engine_opts and options.engine not in names:
        console.print("[yellow]note [/]  LMPOOL_ENGINE_OPTS is left out: LMPOOL_ENGINE names none")
    with console.status("asking a pool of each engine") as status:
        found = check_engines(
            names,
            model,
            revision=options.revision if model == options.model else None,
            engine_opts={options.engine: options.engine_opts},
            on_start=lambda name: status.update(f"asking a pool of {name}"),
        )
    for name, error in found.failures.items():
        console.print(f"{WRONG}  {name}: {escape(str(error))}")
    if found.comparisons:
        _print_comparisons(found, model, console)
    return found.good


def _print_comparisons(found: EngineCheck, model: str, console: Console) -> None:
    from lmpool.engine_check import LENGTH, MAX_TOKENS, MEASURED, PROMPTS, SAMPLED, TOLERANCE

    first = found.comparisons[0].engine
    console.print(_table(found.comparisons, model))
    console.print(
        f"{PROMPTS} prompts in float32, {SAMPLED} continuations of {MAX_TOKENS} tokens at "
        f"temperature 0 and 1; rows a second of one worker, {MEASURED} prompts of {LENGTH} tokens."
    )
    if found.different:
        console.print(
            f"{WRONG}  {', '.join(found.different)}: not the same tokens and rows within "
            f"{TOLERANCE:g} as {first}"
        )
    elif len(found.comparisons) > 1:
        console.print(f"the same tokens, and rows within {TOLERANCE:g}")
        own = [each.engine for each in found.comparisons if not each.same_drawn]
        if own:
            console.print(f"{', '.join(own)}: draws with a sampler of its own, the same each time")
    else:
        console.print(f"{first} alone is installed here: nothing to compare it with")


def _table(comparisons: Sequence[Comparison], model: str) -> RenderableType:
    table = Table()
    table.add_column("engine", overflow="fold")
    for heading in (f"from {comparisons[0].engine}", "greedy", "drawn", "rows/s"):
        table.add_column(heading, justify="right")
    for each in comparisons:
        table.add_row(
            each.engine,
            f"{each.distance:.1e}",
            "same" if each.same_greedy else "different",
            ("same" if each.same_drawn else "its own") if each.repeats else "unsteady",
            f"{each.rows_per_second:,.0f}",
        )
    return titled(f"engines, model {escape(model)}", table)
