"""``lmpool top``: a pool as it changes, in a terminal.

One thread looks at the pool, so that a server which hangs holds up no key; the main thread draws.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from lmpool.cli.keyboard import keys_pressed
from lmpool.cli.options import Every, Pool, Url
from lmpool.cli.terminal import json_text, tables
from lmpool.cli.top_look import Look

if TYPE_CHECKING:
    from lmpool.pool_view import PoolViewer

KEY_WAIT: Final = 0.25
"""Seconds for which a key is waited for before it is seen whether there is something new."""
PATIENCE: Final = 3.0
"""Seconds in which a server must answer that is not gone: whoever watches wants to know it soon."""
SCROLL: Final = {"j": 1, "\x1b[B": 1, " ": 10, "k": -1, "\x1b[A": -1}
DIM: Final = Style(dim=True)


def top(
    every: Every = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once. Status 1 if no worker is alive.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each look.")] = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Watch a pool: its workers, pace, backlog, results and failures. q ends it.

    It waits for a server that is gone, and for a pool that nobody serves.
    """
    from lmpool.pool_view import PoolViewer

    console, viewer = tables(), PoolViewer(url, pool, answers_within=PATIENCE)
    if console.is_terminal and not (once or as_json or console.is_dumb_terminal):
        _watch(viewer, every, console)
        return
    look = Look(viewer.pool)
    with viewer:
        while True:
            look = look.next(viewer)
            if once and look.error is not None:
                raise look.error
            if as_json:
                print(json_text(look.as_dict()), flush=True)
            else:
                console.print(_shown(look, console))
            if once:
                raise typer.Exit(0 if look.view is not None and look.view.workers else 1)
            time.sleep(every)


def _shown(look: Look, console: Console) -> RenderableType:
    from lmpool.cli.top_screen import shown  # which brings numpy

    return shown(look, console)


class _Looks:
    """Looks again and again on a thread of its own; `latest` is what it saw last."""

    def __init__(self, viewer: PoolViewer, every: float) -> None:
        self.latest = Look(viewer.pool)
        self.failure: BaseException | None = None
        self._viewer = viewer
        self._every = every
        self._ended = threading.Event()
        # Nobody waits for a server that hangs when the process ends.
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(KEY_WAIT)

    def _run(self) -> None:
        try:
            with self._viewer:
                while not self._ended.is_set():
                    self.latest = self.latest.next(self._viewer)
                    self._ended.wait(self._every)
        except BaseException as error:
            self.failure = error


@dataclass(frozen=True, slots=True)
class _Page:
    """A look as the whole terminal: what is above `first` has been scrolled away."""

    look: Look
    first: int
    every: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(2, options.height or console.height)
        body = options.update(height=None)
        lines = console.render_lines(_shown(self.look, console), body, pad=False)
        first = max(0, min(self.first, len(lines) - height + 1))
        room = lines[first : first + height - 1]
        for line in room:
            yield from line
            yield Segment.line()
        below = len(lines) - first - len(room)
        more = f", j and k scroll: {below} more" if below or first else ""
        yield Segment(f"q ends, every {self.every:g} s{more}"[: options.max_width], DIM)

    def last_first(self, console: Console) -> int:
        """The first line of the last screenful."""
        lines = console.render_lines(_shown(self.look, console), pad=False)
        return max(0, len(lines) - console.height + 1)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _watch(viewer: PoolViewer, every: float, console: Console) -> None:
    """Draw on the terminal's other screen, whenever there is something new, until q."""
    first, drawn = 0, None
    signal.signal(signal.SIGTERM, _leave)  # not without giving the terminal back
    with (
        _Looks(viewer, every) as looks,
        keys_pressed() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while (failure := looks.failure) is None:
            look = looks.latest
            # How long the server has been away is seen to grow.
            now = (look, first, console.size, int(time.time()) if look.error else 0)
            if now != drawn:
                live.update(_Page(look, first, every), refresh=True)
                drawn = now
            typed = pressed(KEY_WAIT)
            if "q" in typed.lower():
                return
            if by := sum(lines * typed.count(key) for key, lines in SCROLL.items()):
                last = _Page(look, first, every).last_first(console)
                first = max(0, min(first + by, last))
    raise failure
