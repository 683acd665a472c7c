"""Reports as tables for people, and as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks.machine import command, interactive
from tests.benchmarks.measure import Measured, Report, number

RESULTS = Path(__file__).parent / "results"

COLUMNS = ("unit", "min", "median", "max", "goal", "")


def cells(figure: Measured) -> tuple[str, ...]:
    """A figure as a row of a table."""
    verdict = {None: "", True: "reached", False: "missed"}[figure.reached]
    spread = (min(figure.values), figure.median, max(figure.values))
    return (figure.what, figure.unit, *map(number, spread), figure.goal, verdict)


def show(report: Report) -> None:
    """Print a report: drawn on a terminal, as markdown elsewhere."""
    if not interactive():
        print(markdown(report))
        return
    console = Console(highlight=False)
    console.rule(f"[bold]{report.name}[/]: {report.title}")
    for heading, figures in report.figures.items():
        console.print(_drawn(heading, figures))
    for name, values in report.series.items():
        console.print(f"{name}: {' '.join(map(number, values))}", markup=False)
    for note in report.notes:
        console.print(f"- {note}", markup=False)
    facts = "; ".join(f"{name} {value}" for name, value in report.facts.items())
    console.print(facts, style="dim", markup=False)


def _drawn(heading: str, figures: Sequence[Measured]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for place, column in enumerate((heading, *COLUMNS)):
        table.add_column(column, justify="right" if 2 <= place <= 4 else "left")
    colours = {None: "", True: "green", False: "red"}
    for figure in figures:
        *values, verdict = cells(figure)
        colour = colours[figure.reached]
        table.add_row(*values, f"[{colour}]{verdict}[/]" if colour else verdict)
    return table


def markdown(report: Report, again: str | None = None) -> str:
    """A report as markdown; `again` is the command that takes it anew."""
    lines = [f"# {report.name}", "", report.title, ""]
    for heading, figures in report.figures.items():
        lines.append(_pipes((heading, *COLUMNS)))
        lines.append(_pipes(("---", "---", "--:", "--:", "--:", "---", "---")))
        lines += [_pipes(cells(figure)) for figure in figures]
        lines.append("")
    for name, values in report.series.items():
        lines.append(f"- {name}: {', '.join(map(number, values))}")
    lines += [f"- {note}" for note in report.notes]
    if report.series or report.notes:
        lines.append("")
    lines.append("; ".join(f"{name} {value}" for name, value in report.facts.items()))
    if again is not None:
        lines += ["", f"`{again}`"]
    return "\n".join(lines) + "\n"


def _pipes(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def save(report: Report, quick: bool, runs: int | None = None) -> Path:
    """Write a report to results/, as markdown and as JSON; where the markdown is."""
    RESULTS.mkdir(exist_ok=True)
    # Who else ran is this machine's affair; how much they took is not.
    facts = {name: value for name, value in report.facts.items() if name != "others"}
    kept = replace(report, facts=facts)
    asked = [*(["--quick"] if quick else []), *(["--runs", str(runs)] if runs else [])]
    again = command([report.name, *asked])
    write_json([kept], RESULTS / f"{report.name}.json")
    path = RESULTS / f"{report.name}.md"
    path.write_text(markdown(kept, again), "utf-8")
    return path


def write_json(reports: Sequence[Report], path: Path) -> None:
    """Write reports as one JSON document."""
    path.write_text(json.dumps([r.as_dict() for r in reports], indent=1) + "\n", "utf-8")
