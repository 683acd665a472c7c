"""``lmpool demo``: what a newcomer wants to see.

`show` prints it, `load` makes the work of two client processes and runs them, and `client` is one.
`over_http` is that of the gateway.
"""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    workers: Annotated[int, typer.Option(metavar="N", help="Worker processes.", min=1)] = 2,
    engine: Annotated[str, typer.Option(help="hf, mock, or another engine.")] = "hf",
    model: Annotated[str, typer.Option(help="tiny, a folder, or a hub id.")] = "tiny",
    prompts: Annotated[
        int, typer.Option(metavar="N", help="Prompts of the load, all clients together.", min=2)
    ] = 4000,
    gateway: Annotated[
        bool,
        typer.Option("--gateway", help="Instead of the load, answer HTTP as OpenAI's API does."),
    ] = False,
) -> None:
    """See it work: a private server, workers, a small model, two clients at once."""
    if gateway:
        from lmpool.cli.demo.over_http import run_over_http

        run_over_http(workers=workers, engine=engine, model=model)
        return
    from lmpool.cli.demo.show import run_demo

    run_demo(workers=workers, engine=engine, model=model, prompts=prompts)
