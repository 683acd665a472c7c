"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    # No word of it is too long for the column that a narrow terminal leaves.
    typer.Option(
        metavar="URL",
        help="The server, as redis://HOST/0. [dim]\\[$LMPOOL_URL, or that of localhost][/]",
    ),
]
Pool = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The pool's name. [dim]\\[$LMPOOL_POOL, or default][/]"),
]
Adapter = Annotated[
    str | None, typer.Option("--adapter", metavar="NAME", help="A LoRA adapter of the pool.")
]
Lora = Annotated[str | None, typer.Option("--lora", metavar="NAME", hidden=True)]
"""The same, by the name that some know it by."""
AsJson = Annotated[bool, typer.Option("--json", help="As one line of JSON.")]
Every = Annotated[
    float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.1, max=86_400)
]
