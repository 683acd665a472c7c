"""Who may do what on the page, and whether it is the page that asks.

A browser sends what any site has it send: so what the page may do is asked by the page alone. With
API keys that is plain, as no other site has the key. Without them the address says it.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest

from lmpool.gateway.door import KEY
from lmpool.gateway.errors import ApiError
from lmpool.gateway.keys import Key

_PROXIES: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers of who asks for somebody else: where he is, is not known."""


def key_of(request: HttpRequest) -> Key | None:
    """The key that opened the door; None where there are no keys."""
    found: Key | None = request.scope.get(KEY)
    return found


def check_caller(request: HttpRequest) -> None:
    """Refuse what another site's page has a browser ask. Raises `ApiError`."""
    headers = request.headers
    host = headers.get("host", "")
    if key_of(request) is None and not _is_own_name(host):
        raise ApiError(
            403,
            f"the name {host[:100]!r} may be anyone's: open the page by the machine's IP address, "
            "or give the gateway --api-keys",
        )
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ApiError(403, "another site asks this: open the gateway's own page")
    if request.method != "POST":
        return
    origin = headers.get("origin")
    if origin is not None and not _is_of(origin, host):
        raise ApiError(403, "another site asks this: open the gateway's own page")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send 'Content-Type: application/json'")


def may_operate(request: HttpRequest) -> bool:
    """Whether dead letters may be retried and dropped.

    With API keys it is for those whose line says ``operator``, without them for this machine.
    """
    key = key_of(request)
    if key is not None:
        return key.operator
    if any(name in request.headers for name in _PROXIES):
        return False
    return request.client is not None and _is_loopback(request.client.host)


def check_operator(request: HttpRequest) -> None:
    """Refuse who may not. Raises `ApiError`."""
    if may_operate(request):
        return
    if key_of(request) is None:
        raise ApiError(
            403, "without API keys this is for callers on the gateway's own machine alone"
        )
    raise ApiError(403, "this key may not: write operator behind it in the file of keys")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_of(origin: str, host: str) -> bool:
    """Whether an origin is that of a host."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # as of brackets around what is no address
        return False


def _is_own_name(host: str) -> bool:
    """Whether a Host header cannot be the name of another site, which its owner has point here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = {"localhost", socket.gethostname().lower()}
        return name in own or name.endswith(".localhost")
    return True  # the name of no one
