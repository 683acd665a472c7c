"""``lmpool demo``: what a newcomer wants to see.

`show` prints it, `load` makes the work of two client processes and runs them, and `client` is one.
`over_http` is that of the gateway, `over_cluster` that of a Redis Cluster.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lmpool.errors import SettingsError


def demo(
    workers: Annotated[int, typer.Option(metavar="N", help="Worker processes.", min=1)] = 2,
    engine: Annotated[
        str | None,
        typer.Option(help="hf, mock, or another engine.", show_default="hf, with --cluster mock"),
    ] = None,
    model: Annotated[str, typer.Option(help="tiny, a folder, or a hub id.")] = "tiny",
    prompts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Prompts of the load, all clients together.",
            min=2,
            show_default="4000, with --cluster 12000",
        ),
    ] = None,
    gateway: Annotated[
        bool,
        typer.Option("--gateway", help="Instead of the load, answer HTTP as OpenAI's API does."),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="On a Redis Cluster, a primary of which is killed."),
    ] = False,
) -> None:
    """See it work: a private server, workers, a small model, two clients at once."""
    if gateway and cluster:
        raise SettingsError("--gateway and --cluster: one of them at a time")
    if gateway:
        from lmpool.cli.demo.over_http import run_over_http

        run_over_http(workers=workers, engine=engine or "hf", model=model)
    elif cluster:
        from lmpool.cli.demo.over_cluster import run_over_cluster

        run_over_cluster(
            workers=workers, engine=engine or "mock", model=model, prompts=prompts or 12_000
        )
    else:
        from lmpool.cli.demo.show import run_demo

        run_demo(workers=workers, engine=engine or "hf", model=model, prompts=prompts or 4000)
