"""``lmpool dead``: the jobs that were given up, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lmpool.cli.options import AsJson, Pool, Url
from lmpool.cli.terminal import escape, json_text, lines
from lmpool.errors import LmpoolError, PromptError

if TYPE_CHECKING:
    from lmpool.dead_letters import DeadLetter

SHOWN_TOKENS: Final = 8
NONE: Final = "no job was given up"

dead = typer.Typer(
    no_args_is_help=True, help="Jobs that were given up: look at them, try them again, drop them."
)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="IDS", help="Entries, named as lmpool dead list shows them."),
]
Every = Annotated[bool, typer.Option("--all", help="Every entry.")]


@dead.command("list")
def list_(as_json: AsJson = False, url: Url = None, pool: Pool = None) -> None:
    """List the jobs that were given up."""
    from lmpool import dead_letters
    from lmpool.producer import connect

    with connect(url, pool) as lm:
        letters = dead_letters.read(lm)
    if as_json:
        print(json_text([_as_json(letter) for letter in letters]))
        return
    console = lines()
    for letter in letters:
        console.print(
            f"[bold]{letter.name}[/]  {_when(letter)}  {letter.deliveries} deliveries, last to "
            f"{escape(letter.worker or '?')}  prompt {_prompt(letter, SHOWN_TOKENS)}"
        )
    if not letters:
        console.print(NONE)


@dead.command()
def show(
    names: Names = None,
    every: Every = False,
    as_json: AsJson = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Show everything about entries: the whole prompt, and the reason."""
    from lmpool import dead_letters
    from lmpool.producer import connect

    _check_chosen(names, every)
    with connect(url, pool) as lm:
        letters = _chosen(dead_letters.read(lm), names, every)
    if as_json:
        print(json_text([{**_as_json(letter), "token_ids": _ids(letter)} for letter in letters]))
        return
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
    if not letters:
        console.print(NONE)


@dead.command()
def retry(
    names: Names = None,
    every: Every = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for each.", min=0.001)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each.")] = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Ask for entries again: whoever asks the same meanwhile gets the row, too.

    What is answered is dropped. Status 1 if any was not.
    """
    from lmpool import dead_letters
    from lmpool.producer import connect

    _check_chosen(names, every)
    console = lines()
    failed = 0
    with connect(url, pool) as lm:
        letters = _chosen(dead_letters.read(lm), names, every)
        if not letters and not as_json:
            console.print(NONE)
        for letter in letters:
            said, color = "answered", "green"
            try:
                dead_letters.retry(lm, letter, timeout=timeout)
            except LmpoolError as error:
                failed += 1
                said, color = str(error), "red"
            if as_json:
                good = color == "green"
                error_text = None if good else said
                found = {"name": letter.name, "answered": good, "error": error_text}
                print(json_text(found), flush=True)
            else:
                console.print(f"[{color}]{letter.name}[/]  {escape(said)}")
    raise typer.Exit(1 if failed else 0)


@dead.command()
def drop(
    names: Names = None,
    every: Every = False,
    as_json: AsJson = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Forget entries."""
    from lmpool import dead_letters
    from lmpool.producer import connect

    _check_chosen(names, every)
    with connect(url, pool) as lm:
        dropped = dead_letters.drop(lm, _chosen(dead_letters.read(lm), names, every))
    if as_json:
        print(json_text({"dropped": dropped}))
    else:
        lines().print(f"{dropped} dropped")


def _check_chosen(names: list[str] | None, every: bool) -> None:
    if bool(names) == every:
        raise PromptError("name entries, as lmpool dead list shows them, or write --all")


def _chosen(
    letters: Iterable[DeadLetter], names: list[str] | None, every: bool
) -> list[DeadLetter]:
    """Those of the names that were written, or all; an error names one that there is not."""
    if every:
        return list(letters)
    known = {letter.name: letter for letter in letters}
    for name in names or ():
        if name not in known:
            raise PromptError(f"no entry {name!r} among the dead: see lmpool dead list")
    return [known[name] for name in names or ()]


def _when(letter: DeadLetter) -> str:
    return f"{letter.given_up:%Y-%m-%d %H:%M:%S} UTC"


def _as_json(letter: DeadLetter) -> dict[str, Any]:
    """An entry for programs; what only a job has is null of what is none."""
    job = letter.job
    return {
        "name": letter.name,
        "given_up": letter.given_up.isoformat(),
        "reason": letter.reason,
        "deliveries": letter.deliveries,
        "worker": letter.worker,
        "wanted": None if job is None else job.want.kind,
        "adapter": None if job is None else job.adapter,
        "prompt_tokens": None if job is None else job.token_ids().size,
        "bytes": len(letter.data),
    }


def _ids(letter: DeadLetter) -> list[int] | None:
    return None if letter.job is None else letter.job.token_ids().tolist()


def _prompt(letter: DeadLetter, most: int | None = None) -> str:
    """Its token ids, the first `most` of them."""
    if letter.job is None:
        return f"no job: {len(letter.data)} bytes"
    ids = letter.job.token_ids()
    shown = ids if most is None else ids[:most]
    more = f" ... ({len(ids)})" if len(shown) < len(ids) else ""
    return " ".join(map(str, shown)) + more
