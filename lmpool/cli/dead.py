"""``lmpool dead``: the jobs that were given up, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from lmpool.cli.options import Pool, Url
from lmpool.cli.terminal import escape, lines
from lmpool.errors import LmpoolError, PromptError

if TYPE_CHECKING:
    from lmpool.dead_letters import DeadLetter

SHOWN_TOKENS: Final = 8

dead = typer.Typer(
    no_args_is_help=True, help="Jobs that were given up: look at them, try them again, drop them."
)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="IDS", help="Entries, named as lmpool dead list shows them."),
]
Every = Annotated[bool, typer.Option("--all", help="Every entry.")]


@dead.command("list")
def list_(url: Url = None, pool: Pool = None) -> None:
    """List the jobs that were given up."""
    from lmpool import dead_letters
    from lmpool.producer import connect

    with connect(url, pool) as lm:
        letters = dead_letters.read(lm)
    console = lines()
    for letter in letters:
        console.print(
            f"[bold]{letter.name}[/]  {_when(letter)}  {letter.deliveries} deliveries, last to "
            f"{escape(letter.worker or '?')}  prompt {_prompt(letter, SHOWN_TOKENS)}"
        )
    if not letters:
        console.print("no job was given up")


@dead.command()
def show(names: Names = None, every: Every = False, url: Url = None, pool: Pool = None) -> None:
    """Show everything about entries: the whole prompt, and the reason."""
    from lmpool import dead_letters
    from lmpool.producer import connect

    with connect(url, pool) as lm:
        letters = _chosen(dead_letters.read(lm), names, every)
    console = lines()
    for letter in letters:
        console.print(
            f"[bold]{letter.name}[/]  {_when(letter)}, {letter.deliveries} deliveries\n"
            f"  reason   {escape(letter.reason)}\n"
            f"  worker   {escape(letter.worker)}"
        )
        if letter.job is not None:
            adapter = f", adapter {letter.job.adapter}" if letter.job.adapter else ""
            console.print(f"  wanted   {letter.job.want.kind}{escape(adapter)}")
        console.print(f"  prompt   {_prompt(letter)}")


@dead.command()
def retry(
    names: Names = None,
    every: Every = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for each.", min=0.001)
    ] = 60.0,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Ask for entries again: whoever asks the same meanwhile gets the row, too.

    What is answered is dropped. Status 1 if any was not.
    """
    from lmpool import dead_letters
    from lmpool.producer import connect

    console = lines()
    failed = 0
    with connect(url, pool) as lm:
        for letter in _chosen(dead_letters.read(lm), names, every):
            try:
                dead_letters.retry(lm, letter, timeout=timeout)
            except LmpoolError as error:
                failed += 1
                console.print(f"[red]{letter.name}[/]  {escape(str(error))}")
            else:
                console.print(f"[green]{letter.name}[/]  answered")
    raise typer.Exit(1 if failed else 0)


@dead.command()
def drop(names: Names = None, every: Every = False, url: Url = None, pool: Pool = None) -> None:
    """Forget entries."""
    from lmpool import dead_letters
    from lmpool.producer import connect

    with connect(url, pool) as lm:
        dropped = dead_letters.drop(lm, _chosen(dead_letters.read(lm), names, every))
    lines().print(f"{dropped} dropped")


def _chosen(
    letters: Iterable[DeadLetter], names: list[str] | None, every: bool
) -> list[DeadLetter]:
    """Those of the names that were written, or all; an error names one that there is not."""
    if bool(names) == every:
        raise PromptError("name entries, as lmpool dead list shows them, or write --all")
    if every:
        return list(letters)
    known = {letter.name: letter for letter in letters}
    for name in names or ():
        if name not in known:
            raise PromptError(f"no entry {name!r} among the dead: see lmpool dead list")
    return [known[name] for name in names or ()]


def _when(letter: DeadLetter) -> str:
    return f"{letter.given_up:%Y-%m-%d %H:%M:%S} UTC"


def _prompt(letter: DeadLetter, most: int | None = None) -> str:
    """Its token ids, the first `most` of them."""
    if letter.job is None:
        return f"no job: {len(letter.data)} bytes"
    ids = letter.job.token_ids()
    shown = ids if most is None else ids[:most]
    more = f" ... ({len(ids)})" if len(shown) < len(ids) else ""
    return " ".join(map(str, shown)) + more
