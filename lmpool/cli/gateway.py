"""``lmpool gateway``: pools behind an OpenAI-compatible API, and ``lmpool gateway-key``."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from lmpool.cli.options import Url
from lmpool.cli.terminal import errors, escape
from lmpool.errors import SettingsError

if TYPE_CHECKING:
    from lmpool.gateway.options import PoolAddress

HOST: Final = "127.0.0.1"
PORT: Final = 8000


def gateway(
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=URL]",
            help="A pool, and its server where it is another. More than one may be given. "
            "[dim]\\[$LMPOOL_POOL, or default][/]",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = HOST,
    port: Annotated[int, typer.Option(help="0 takes any that is free.", min=0, max=65_535)] = PORT,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The keys that may ask, a line each as lmpool gateway-key writes it.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A chat template, in place of the model's own."),
    ] = None,
    queue_timeout: Annotated[
        float,
        typer.Option(metavar="S", min=0.001, help="Seconds to wait for room or workers."),
    ] = 240.0,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0.001, help="Seconds a request may take.")
    ] = 600.0,
    body_timeout: Annotated[
        float,
        typer.Option(metavar="S", min=0.001, help="Seconds its head or body may take to come."),
    ] = 30.0,
    max_body: Annotated[
        int, typer.Option(metavar="BYTES", min=1, help="Most bytes of a request.")
    ] = 64 << 20,
    max_response: Annotated[
        int, typer.Option(metavar="BYTES", min=1, help="Most bytes of an answer.")
    ] = 512 << 20,
    max_prompts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most prompts of a request, times n.")
    ] = 2048,
    max_n: Annotated[int, typer.Option(metavar="N", min=1, help="Most choices of a prompt.")] = 128,
    max_logprobs: Annotated[
        int, typer.Option(metavar="K", min=0, help="Most of the likeliest tokens at a position.")
    ] = 100,
    max_in_flight: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most prompts that are asked at once.")
    ] = 2048,
    key_requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most requests of a key at once, if its line says nothing else.",
        ),
    ] = None,
    compress: Annotated[
        str,
        typer.Option(
            help="auto, always or never: whether an answer is compressed that may be. "
            "auto leaves out callers on this machine."
        ),
    ] = "auto",
    url: Url = None,
) -> None:
    """Serve pools over HTTP: OpenAI's API, and binary answers."""
    _needs_the_extra()
    from lmpool.gateway.options import GatewayOptions
    from lmpool.gateway.serve import serve

    if compress not in ("auto", "always", "never"):
        raise SettingsError(f"--compress {compress}: write auto, always or never")
    options = GatewayOptions(
        pools=_addresses(pool),
        url=url,
        api_keys=api_keys,
        chat_template=chat_template,
        queue_timeout=queue_timeout,
        request_timeout=timeout,
        body_timeout=body_timeout,
        max_body_bytes=max_body,
        max_response_bytes=max_response,
        max_prompts=max_prompts,
        max_n=max_n,
        max_logprobs=max_logprobs,
        max_in_flight=max_in_flight,
        key_requests=key_requests,
        compress=compress,  # type: ignore[arg-type]
    )

    def show(url: str) -> None:
        errors().print(f"lmpool gateway at {url}/v1, described at {url}/docs")
        if api_keys is None and host not in ("127.0.0.1", "::1", "localhost"):
            errors().print("[yellow]without --api-keys whoever reaches it may ask[/]")

    serve(options, host, port, show)


def gateway_key(
    name: Annotated[str, typer.Argument(help="Whose key it is.")] = "key",
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most requests at once.")
    ] = None,
    hash_stdin: Annotated[
        bool, typer.Option("--stdin", help="Hash the key on standard input instead of a new one.")
    ] = False,
) -> None:
    """Make an API key: print it on stderr, and its line for --api-keys on stdout."""
    from lmpool.gateway.keys import line, new_key

    key = sys.stdin.readline().strip() if hash_stdin else new_key()
    if not key:
        raise SettingsError("no key on standard input: write one in a line")
    written = line(name, key, requests)
    if not hash_stdin:
        errors().print(f"the key, which is shown once: {escape(key)}")
    print(written)


def serve_pool(url: str, pool: str, show: Callable[[str], None]) -> None:
    """Serve one pool on this machine, on the usual port or any that is free, which `show` is told.

    Until Ctrl-C or SIGTERM.
    """
    _needs_the_extra()
    from lmpool.gateway.options import GatewayOptions, PoolAddress
    from lmpool.gateway.serve import serve

    with socket.socket() as probe:
        port = PORT if probe.connect_ex((HOST, PORT)) else 0
    serve(GatewayOptions(pools=(PoolAddress(pool, url),)), HOST, port, show)


def _addresses(given: list[str] | None) -> tuple[PoolAddress, ...]:
    from lmpool.gateway.options import PoolAddress
    from lmpool.keys import check_pool_name
    from lmpool.settings import ClientOptions, check_url

    if not given:
        return (PoolAddress(ClientOptions().pool),)
    found = []
    for text in given:
        name, equals, where = text.partition("=")
        found.append(PoolAddress(check_pool_name(name), check_url(where) if equals else None))
    names = [address.name for address in found]
    for each in names:
        if names.count(each) > 1:
            raise SettingsError(f"--pool {each} is there more than once: a name is one pool's")
    return tuple(found)


def _needs_the_extra() -> None:
    for name in ("fastapi", "jinja2", "orjson", "uvicorn"):
        if find_spec(name) is None:
            raise SettingsError(f"the gateway needs {name}: pip install 'lmpool[gateway]'")
