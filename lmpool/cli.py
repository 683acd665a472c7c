"""The command line. Each command imports what it needs: ``lmpool --help`` is quick."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from lmpool import __version__
from lmpool.errors import LmpoolError
from lmpool.worker_command import REFUSED, read_options, with_worker_options

FAILED: Final = 2
"""Exit status after an error of ours."""
INTERRUPTED: Final = 130


class _Commands(TyperGroup):
    """Says errors of ours in one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LmpoolError as error:
            print_error(error)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def print_error(error: LmpoolError) -> None:
    """``error: ...`` on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"[bold red]error:[/] {escape(str(error))}"
    )


app = typer.Typer(
    name="lmpool",
    cls=_Commands,
    help="Full-vocabulary next-token log-probabilities from a pool of language-model workers.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    # A traceback with local variables would show passwords.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[
    str | None,
    typer.Option(help="The server. [dim]\\[$LMPOOL_URL, or redis://localhost:6379/0][/]"),
]
Pool = Annotated[
    str | None, typer.Option(help="The pool's name. [dim]\\[$LMPOOL_POOL, or default][/]")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lmpool {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Full-vocabulary next-token log-probabilities from a pool of language-model workers."""


@app.command()
def demo(
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1)] = 2,
    engine: Annotated[str, typer.Option(help="hf, mock, or another engine.")] = "hf",
    model: Annotated[str, typer.Option(help="tiny, a folder, or a hub id.")] = "tiny",
    prompts: Annotated[
        int, typer.Option(help="Prompts of the load, all clients together.", min=2)
    ] = 4000,
) -> None:
    """See it work: a private server, workers, a small model, two clients at once."""
    from lmpool.demo import run_demo

    run_demo(workers=workers, engine=engine, model=model, prompts=prompts)


def _worker(**given: Any) -> None:
    """Serve a model: one worker for each GPU, started again when it dies.

    Ends on SIGTERM or Ctrl-C once the running batches are done.
    """
    places = {name: given.pop(name) for name in ("gpus", "workers", "events")}
    from lmpool.worker.launcher import launch

    try:
        status = launch(read_options(given), **places)
    except LmpoolError as error:
        print_error(error)
        status = REFUSED
    raise typer.Exit(status)


app.command("worker")(with_worker_options(_worker))


@app.command()
def logprobs(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    k: Annotated[int, typer.Option("-k", help="How many tokens to show.", min=1)] = 10,
    adapter: Annotated[str | None, typer.Option(help="A LoRA adapter of the pool.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=0.001)] = 60.0,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Show the likeliest next tokens of a prompt, as bars."""
    from lmpool.pool_commands import show_logprobs

    show_logprobs(text, k=k, adapter=adapter, timeout=timeout, url=url, pool=pool)


@app.command()
def ping(url: Url = None, pool: Pool = None) -> None:
    """Ask whether server and pool answer, and how fast. Status 1 if no worker is alive."""
    from lmpool.pool_commands import show_ping

    raise typer.Exit(show_ping(url=url, pool=pool))


@app.command()
def stats(
    as_json: Annotated[bool, typer.Option("--json", help="As one line of JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=86_400)
    ] = 2.0,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Show what the pool has done, its backlog and its workers."""
    from lmpool.pool_commands import show_stats

    show_stats(as_json=as_json, every=every if watch else None, url=url, pool=pool)


@app.command()
def doctor(
    engines: Annotated[
        bool, typer.Option("--engines", help="Compare the engines that are installed here instead.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="With --engines: tiny, a folder, or a hub id.")
    ] = "tiny",
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Find out what is wrong with this server and pool. Status 1 if something is."""
    if engines:
        from lmpool.engine_check import run_engine_check

        raise typer.Exit(run_engine_check(model=model))
    from lmpool.doctor import run_doctor

    raise typer.Exit(run_doctor(url=url, pool=pool))


dead = typer.Typer(
    no_args_is_help=True, help="Jobs that were given up: look at them, try them again, drop them."
)
app.add_typer(dead, name="dead")

Ids = Annotated[
    list[str] | None, typer.Argument(help="Entries, named as lmpool dead list shows them.")
]
Every = Annotated[bool, typer.Option("--all", help="Every entry.")]


@dead.command("list")
def dead_list(url: Url = None, pool: Pool = None) -> None:
    """List the jobs that were given up."""
    from lmpool.dead import list_dead

    list_dead(url=url, pool=pool)


@dead.command("show")
def dead_show(ids: Ids = None, every: Every = False, url: Url = None, pool: Pool = None) -> None:
    """Show everything about entries: the whole prompt, and the reason."""
    from lmpool.dead import show_dead

    show_dead(ids or [], every, url=url, pool=pool)


@dead.command("retry")
def dead_retry(
    ids: Ids = None,
    every: Every = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each.", min=0.001)] = 60.0,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Ask for entries again: whoever asks the same meanwhile gets the row, too.

    What is answered is dropped. Status 1 if any was not.
    """
    from lmpool.dead import retry_dead

    raise typer.Exit(retry_dead(ids or [], every, timeout, url=url, pool=pool))


@dead.command("drop")
def dead_drop(ids: Ids = None, every: Every = False, url: Url = None, pool: Pool = None) -> None:
    """Forget entries."""
    from lmpool.dead import drop_dead

    drop_dead(ids or [], every, url=url, pool=pool)


@app.command()
def bench(
    seconds: Annotated[
        float, typer.Option(help="How long the load lasts.", min=0.1, max=86_400)
    ] = 5.0,
    concurrency: Annotated[
        int, typer.Option(help="Prompts asked at a time.", min=1, max=100_000)
    ] = 256,
    length: Annotated[int, typer.Option(help="Tokens in each prompt.", min=1, max=1_000_000)] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="As one line of JSON.")] = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Measure a pool from here: rows per second and latencies. It loads the pool."""
    from lmpool.bench import run_bench

    run_bench(
        seconds=seconds, concurrency=concurrency, length=length, as_json=as_json, url=url, pool=pool
    )


if __name__ == "__main__":
    sys.exit(app())
