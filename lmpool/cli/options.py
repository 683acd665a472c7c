"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    # No word of it is too long for the column that a narrow terminal leaves.
    typer.Option(metavar="URL", help="The server. [dim]\\[$LMPOOL_URL, or localhost:6379][/]"),
]
Pool = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The pool's name. [dim]\\[$LMPOOL_POOL, or default][/]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="As one line of JSON.")]
Every = Annotated[
    float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.1, max=86_400)
]
