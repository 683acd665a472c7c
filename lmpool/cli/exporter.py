"""``lmpool exporter``: pools as a whole, for Prometheus."""

from __future__ import annotations

import logging.config
import signal
import threading
from typing import Annotated

import typer

from lmpool.cli.options import Url
from lmpool.cli.terminal import tell
from lmpool.errors import SettingsError
from lmpool.logs import logging_config
from lmpool.settings import ClientOptions, pool_addresses, refuse_unknown_variables


def exporter(
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=URL]",
            help="A pool, and its server where it is another. More than one may be given. "
            "[dim]\\[$LMPOOL_POOL, or default][/]",
        ),
    ] = None,
    url: Url = None,
    host: Annotated[
        str, typer.Option(metavar="TEXT", help="Where to listen; 0.0.0.0: everywhere.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65_535, help="0 takes any that is free.")
    ] = 9401,
) -> None:
    """Offer pools as a whole to Prometheus: backlog, workers, dead letters, the server's memory.

    At /metrics, beside /health and /ready. Workers and gateways have metrics of their own.
    """
    try:
        from lmpool.exporter import Exporter
        from lmpool.monitoring.server import MonitoringServer, application
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"the exporter needs {error.name}: pip install 'lmpool[metrics]'"
        ) from None
    refuse_unknown_variables()
    logging.config.dictConfig(logging_config())
    with Exporter(pool_addresses(pool or [ClientOptions().pool]), url) as exported:
        app = application(exported.registry, exported.readiness)
        server = MonitoringServer(app, host, port)
        server.listen()
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        server.start()
        shown = f"[{host}]" if ":" in host else host
        tell(f"lmpool exporter at http://{shown}:{server.port}/metrics")
        while not stopped.wait(3600):
            pass
        server.close()
