"""Where commands print, and what fits there."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any, Final

from rich import markup
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table

from lmpool.errors import LmpoolError
from lmpool.stderr import say

FAILED: Final = 2
"""Exit status after an error of ours."""
INTERRUPTED: Final = 130


def lines() -> Console:
    """A console for lines, which the terminal wraps as it likes."""
    return Console(highlight=False, soft_wrap=True)


def tables() -> Console:
    """A console for tables, which keep to its width."""
    return Console(highlight=False)


def errors() -> Console:
    """A console on stderr."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def escape(text: str) -> str:
    """Text of others as it is shown: neither markup nor control characters mean anything in it."""
    return markup.escape(printable(text))


def printable(text: str) -> str:
    """The same where nothing is markup."""
    return "".join(c if c.isprintable() or c in "\n\t" else _named(c) for c in text)


def _named(character: str) -> str:
    return character.encode("unicode_escape").decode()


def tell(text: str) -> None:
    """A line on stderr, where that takes one."""
    console = errors()
    with contextlib.suppress(OSError):  # rich writes nothing there, which fails, too
        with console.capture() as line:  # rich ends the process where a pipe has no reader
            console.print(text)
        say(line.get(), end="")


def print_error(error: LmpoolError) -> None:
    """``error: ...`` on stderr."""
    tell(f"[bold red]error:[/] {escape(str(error))}")


def json_text(value: Any) -> str:
    """A value as one line of JSON, which has no infinity: what is not finite is null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


def speaks_unicode(console: Console) -> bool:
    """Whether the terminal, or the file, takes more than ASCII."""
    return console.encoding.lower().replace("-", "").startswith("utf")


def titled(title: str, table: Table) -> Group:
    """A table below its title, which may be wider than it: a table's own is broken at its width."""
    return Group(f"[italic]{title}[/]", table)


def grid(style: str = "") -> Table:
    """Names, and beside them what may take several lines."""
    lines = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    lines.add_column(style=style, no_wrap=True)
    lines.add_column(overflow="fold")
    return lines


def shortened(text: str, width: int) -> str:
    """A text in so many columns: what is too long keeps its beginning and its end."""
    if cell_len(text) <= width:
        return text
    tail = max(0, (width - 1) // 2)
    end = text[len(text) - tail :]
    while cell_len(end) > tail:  # of characters that are two columns wide
        end = end[1:]
    return set_cell_size(text, max(0, width - 1 - cell_len(end))) + "…" + end


def fits(table: Table, console: Console) -> bool:
    """Whether nothing of the table would have to be wrapped or cut."""
    unbounded = console.options.update(max_width=10_000)
    return Measurement.get(console, unbounded, table).maximum <= console.width
