"""``lmpool doctor``: what is wrong with a server and a pool, or between the installed engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from lmpool.cli.options import AsJson, Pool, Url
from lmpool.cli.terminal import errors, escape, fits, json_text, lines, tables, titled

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
    as_json: AsJson = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Find out what is wrong with this server and pool. Status 1 if something is."""
    console = lines()
    if engines:
        good = _engines_are_good(model, as_json, console)
    else:
        good = _pool_is_good(url, pool, as_json, console)
    raise typer.Exit(0 if good else 1)


def _pool_is_good(url: str | None, pool: str | None, as_json: bool, console: Console) -> bool:
    from lmpool.inspection import diagnose
    from lmpool.server_url import mask_url
    from lmpool.settings import ClientOptions

    options = ClientOptions(url=url, pool=pool)
    shown_url = mask_url(options.url)
    if not as_json:
        console.print(f"[bold]{escape(shown_url)}[/], pool {options.pool}")
    findings = diagnose(options.url, options.pool)
    wrong = sum(finding.level == "wrong" for finding in findings)
    notes = sum(finding.level == "note" for finding in findings)
    if as_json:
        each = [asdict(finding) for finding in findings]
        found = {"url": shown_url, "pool": options.pool, "good": not wrong, "findings": each}
        print(json_text(found))
        return not wrong
    _print_findings(findings, console)
    said = f"[bold red]{wrong} wrong[/]" if wrong else "nothing is wrong"
    console.print(f"\n{said}, {notes} to note")
    return not wrong


def _print_findings(findings: Iterable[Finding], console: Console) -> None:
    for finding in findings:
        console.print(f"{MARKS[finding.level]}  {escape(finding.what)}")
        if finding.remedy:
            console.print(f"       [dim]->[/] {escape(finding.remedy)}")


def _engines_are_good(model: str | None, as_json: bool, console: Console) -> bool:
    from lmpool.backends.load import installed_engines
    from lmpool.engine_check import check_engines
    from lmpool.settings import WorkerOptions

    names = installed_engines()
    if not names:
        said = "no engine is installed here: pip install 'lmpool[hf]'"
        if as_json:
            print(json_text({"model": None, "good": False, "engines": [], "failures": {"": said}}))
        else:
            console.print(escape(said))
        return False
    # A revision is that of the environment's model, and options are those of its engine alone.
    options = WorkerOptions()
    model = model or options.model
    if options.engine_opts and options.engine not in names and not as_json:
        console.print("[yellow]note [/]  LMPOOL_ENGINE_OPTS is left out: LMPOOL_ENGINE names none")
    # Not where a program reads: a status is for people.
    with errors().status("asking a pool of each engine") as status:
        found = check_engines(
            names,
            model,
            revision=options.revision if model == options.model else None,
            engine_opts={options.engine: options.engine_opts},
            on_start=lambda name: status.update(f"asking a pool of {name}"),
        )
    if as_json:
        print(json_text(_as_json(found, model)))
        return found.good
    for name, error in found.failures.items():
        console.print(f"{WRONG}  {name}: {escape(str(error))}")
    if found.comparisons:
        _print_comparisons(found, model, console)
    return found.good


def _print_comparisons(found: EngineCheck, model: str, console: Console) -> None:
    from lmpool.engine_check import LENGTH, MAX_TOKENS, MEASURED, PROMPTS, SAMPLED, TOLERANCE

    first = found.comparisons[0].engine
    console.print(_compared(found.comparisons, model, tables()))
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


def _as_json(found: EngineCheck, model: str) -> dict[str, Any]:
    """What was found for programs: `distance` is from the first engine, in nats."""
    return {
        "model": model,
        "good": found.good,
        "engines": [{**asdict(each), "good": each.good} for each in found.comparisons],
        "failures": {name: str(error) for name, error in found.failures.items()},
    }


def _compared(comparisons: Sequence[Comparison], model: str, console: Console) -> RenderableType:
    """A row for each engine, or some lines for each where the terminal is narrow."""
    first = comparisons[0].engine
    headings = (f"from {first}", "greedy", "drawn", "rows/s")
    table = Table()
    table.add_column("engine")
    for heading in headings:
        table.add_column(escape(heading), justify="right")
    for each in comparisons:
        table.add_row(escape(each.engine), *_cells(each))
    if fits(table, console):
        return titled(f"engines, model {escape(model)}", table)
    return Group(
        f"[italic]engines, model {escape(model)}[/]",
        *(
            f"[bold]{escape(each.engine)}[/]\n  "
            + escape(", ".join(map(" ".join, zip(headings, _cells(each), strict=True))))
            for each in comparisons
        ),
    )


def _cells(each: Comparison) -> tuple[str, ...]:
    drawn = ("same" if each.same_drawn else "its own") if each.repeats else "unsteady"
    greedy = "same" if each.same_greedy else "different"
    return f"{each.distance:.1e}", greedy, drawn, f"{each.rows_per_second:,.0f}"
