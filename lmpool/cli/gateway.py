"""``lmpool gateway``: pools behind an OpenAI-compatible API, and ``lmpool gateway-key``."""

from __future__ import annotations

import inspect
import logging.config
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lmpool.cli.setting_options import option, parameter
from lmpool.cli.terminal import errors, escape, tell
from lmpool.errors import SettingsError
from lmpool.logs import logging_config
from lmpool.settings import (
    ClientOptions,
    GatewaySettings,
    pool_addresses,
    refuse_unknown_variables,
)

if TYPE_CHECKING:
    from lmpool.gateway.options import PoolAddress

_WHERE: Final = "What it asks"
_WHAT: Final = "Settings (each is also an LMPOOL_GATEWAY_* variable)"
PROBE: Final = 5.0
"""Seconds in which whoever has a port of this machine takes a connection."""


def gateway(pool: list[str] | None, url: str | None, **given: Any) -> None:
    """Serve pools over HTTP: OpenAI's API, and binary answers."""
    needs_the_extra()
    from lmpool.gateway.options import GatewayOptions
    from lmpool.gateway.serve import serve

    refuse_unknown_variables()
    settings = GatewaySettings(**given)
    options = GatewayOptions(
        pools=_addresses(pool or (settings.pool or ClientOptions().pool).split()),
        url=url,
        api_keys=settings.api_keys,
        chat_template=settings.chat_template,
        queue_timeout=settings.queue_timeout,
        request_timeout=settings.timeout,
        body_timeout=settings.body_timeout,
        max_body_bytes=settings.max_body,
        max_response_bytes=settings.max_response,
        max_prompts=settings.max_prompts,
        max_n=settings.max_n,
        max_logprobs=settings.max_logprobs,
        max_in_flight=settings.max_in_flight,
        key_requests=settings.key_requests,
        compress=settings.compress,
    )
    host = settings.host

    level, form = settings.log_level, settings.log_format
    logging.config.dictConfig(logging_config(level, form, others="uvicorn.error"))

    def show(url: str) -> None:
        tell(f"lmpool gateway at {url}/v1, described at {url}/docs, live at {url}/")
        if settings.api_keys is None and host not in ("127.0.0.1", "::1", "localhost"):
            tell("[yellow]without --api-keys whoever reaches it may ask[/]")

    serve(options, host, settings.port, show)


def _options() -> list[inspect.Parameter]:
    fields = dict(GatewaySettings.model_fields)
    del fields["pool"]  # of which there may be several, and each is an option here
    return [
        parameter(
            "pool",
            list[str],
            "A pool, and its server where it is another. More than one may be given. "
            "[dim]\\[$LMPOOL_GATEWAY_POOL or $LMPOOL_POOL, or default][/]",
            metavar="NAME[=URL]",
            panel=_WHERE,
        ),
        parameter(
            "url",
            str,
            "The server, as redis://HOST/0. [dim]\\[$LMPOOL_URL, or that of localhost][/]",
            metavar="URL",
            panel=_WHERE,
        ),
        *(option(name, field, _WHAT) for name, field in fields.items()),
    ]


gateway.__signature__ = inspect.Signature(_options())  # type: ignore[attr-defined]


def gateway_key(
    name: Annotated[str, typer.Argument(help="Whose key it is.")] = "key",
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most requests at once.")
    ] = None,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="It may retry and drop dead letters on the live page."),
    ] = False,
    hash_stdin: Annotated[
        bool, typer.Option("--stdin", help="Hash the key on standard input instead of a new one.")
    ] = False,
) -> None:
    """Make an API key: print it on stderr, and its line for --api-keys on stdout."""
    from lmpool.gateway.keys import line, new_key

    key = _read_key() if hash_stdin else new_key()
    if not key:
        raise SettingsError("no key on standard input: write one in a line")
    written = line(name, key, requests, operator=operator)
    if not hash_stdin:
        errors().print(f"the key, which is shown once: {escape(key)}")
    print(written)


def _read_key() -> str:
    """What is no UTF-8 is left to be refused, whatever the encoding of the terminal."""
    written = sys.stdin.buffer.readline().decode("utf-8", "surrogateescape")
    return written.removeprefix("\ufeff").strip()


def serve_pool(url: str, pool: str, show: Callable[[str], None]) -> None:
    """Serve one pool on this machine, on the usual port or any that is free, which `show` is told.

    Until Ctrl-C or SIGTERM.
    """
    needs_the_extra()
    from lmpool.gateway.options import GatewayOptions, PoolAddress
    from lmpool.gateway.serve import serve

    usual = GatewaySettings()
    port = usual.port
    # A host that there is not, of any family, is refused where it would be listened at, and so is
    # what is no name of one.
    with suppress(OSError, UnicodeError), socket.create_connection((usual.host, port), PROBE):
        port = 0
    serve(GatewayOptions(pools=(PoolAddress(pool, url),)), usual.host, port, show)


def _addresses(given: Sequence[str]) -> tuple[PoolAddress, ...]:
    from lmpool.gateway.options import PoolAddress

    return tuple(PoolAddress(name, url) for name, url in pool_addresses(given))


def needs_the_extra() -> None:
    """Raises `SettingsError` where the packages of the extra are not installed."""
    for name in ("fastapi", "jinja2", "orjson", "uvicorn"):
        if find_spec(name) is None:
            raise SettingsError(f"the gateway needs {name}: pip install 'lmpool[gateway]'")
