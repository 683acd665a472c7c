"""``lmpool`` itself: its commands, and how its errors look.

Each command imports what it needs when it runs: ``lmpool --help`` is quick.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from lmpool import __version__
from lmpool.checks import check_working_directory
from lmpool.cli.bench import bench
from lmpool.cli.config import config, use
from lmpool.cli.dead import dead
from lmpool.cli.demo import demo
from lmpool.cli.doctor import doctor
from lmpool.cli.exporter import exporter
from lmpool.cli.gateway import gateway, gateway_key
from lmpool.cli.generate import generate
from lmpool.cli.page import page
from lmpool.cli.plan import plan
from lmpool.cli.pool import logprobs, ping, stats
from lmpool.cli.score import score
from lmpool.cli.shards import shards
from lmpool.cli.terminal import FAILED, INTERRUPTED, print_error
from lmpool.cli.top import top
from lmpool.cli.worker import worker
from lmpool.errors import LmpoolError, SettingsError
from lmpool.exit_status import EXIT_REFUSED

UNWRITTEN: Final = (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE)
"""Why a file or a pipe takes nothing more."""
SERVING: Final = frozenset({"worker", "gateway", "exporter", "page"})
"""Commands that run until they are told to end, and that something may start again."""
PASSING: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""Why an address cannot be listened at for now: another has it still, or it is not up yet."""


class _Commands(TyperGroup):
    """Says errors of ours in one line, without a traceback."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """All of a command, with what is printed last."""
        _fill_streams()
        try:
            try:
                return super().main(*args, **extra)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if error.errno not in UNWRITTEN or error.filename is not None:
                raise
            _drop_output()
            if error.errno == errno.EPIPE:  # whoever read it has seen enough
                sys.exit(1)
            print_error(LmpoolError(f"what it says cannot be written: {error.strerror}"))
            sys.exit(FAILED)

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            except FileNotFoundError:  # libraries look for the working directory as they load
                check_working_directory()
                raise
        except LmpoolError as error:
            print_error(error)
            raise typer.Exit(_status(error, ctx.invoked_subcommand)) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _status(error: LmpoolError, command: str | None) -> int:
    """The exit status after an error of ours: whether to start a command that serves again."""
    if command not in SERVING or not isinstance(error, SettingsError):
        return FAILED
    of_address = error.__context__
    if isinstance(of_address, OSError) and of_address.errno in PASSING:
        return FAILED
    return EXIT_REFUSED


def _fill_streams() -> None:
    """Python has None for a standard stream that was closed (``>&-``), which nobody looks for."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as Python runs


def _drop_output() -> None:
    """What is left of it would be written once more as Python ends, and fail again."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


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
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Settings, as TOML. [dim]\\[$LMPOOL_CONFIG, or lmpool.toml][/]",
        ),
    ] = None,
) -> None:
    """Full-vocabulary next-token log-probabilities from a pool of language-model workers."""
    use(config_file)


for command in (
    demo, worker, gateway, exporter, generate, logprobs, score, ping, stats, top, page, shards,
    doctor, bench, plan, config,
):  # fmt: skip
    app.command()(command)
app.command("gateway-key")(gateway_key)
app.add_typer(dead, name="dead")
