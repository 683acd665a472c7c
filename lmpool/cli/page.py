"""``lmpool page``: the live page of a pool, without a gateway."""

from __future__ import annotations

import logging.config
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from lmpool.cli.gateway import needs_the_extra
from lmpool.cli.options import Pool, Url
from lmpool.cli.terminal import escape, lines
from lmpool.logs import logging_config
from lmpool.settings import ClientOptions, GatewaySettings


def page(
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.", metavar="TEXT")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="0 takes any that is free.", metavar="N", min=0, max=65_535)
    ] = 0,
    api_keys: Annotated[
        Path | None, typer.Option(help="A file of the keys that may look.", metavar="FILE")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    url: Url = None,
    pool: Pool = None,
) -> None:
    """Show a pool in a browser, as it changes, and try it out."""
    needs_the_extra()
    from lmpool.gateway.options import GatewayOptions, PoolAddress
    from lmpool.gateway.serve import serve

    client = ClientOptions(url=url, pool=pool)
    settings = GatewaySettings(api_keys=api_keys)
    options = GatewayOptions(
        pools=(PoolAddress(client.pool, client.url),), api_keys=settings.api_keys
    )
    console = lines()
    logging.config.dictConfig(logging_config("warning", "text", others="uvicorn.error"))

    def show(where: str) -> None:
        console.print(f"pool {escape(client.pool)} is shown at {where}/ until Ctrl-C")
        console.file.flush()
        if settings.api_keys is None and host not in ("127.0.0.1", "::1", "localhost"):
            console.print("[yellow]without --api-keys whoever reaches it may look and ask[/]")
        if open_it:
            # It listens already, and a browser that starts may take its time.
            threading.Thread(target=webbrowser.open, args=(f"{where}/",), daemon=True).start()

    serve(options, host, port, show, page_alone=True)
