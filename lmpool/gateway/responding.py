"""Whole answers: compressed where that is asked for and of use."""

from __future__ import annotations

import gzip
import ipaddress
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.gateway.aside import aside
from lmpool.gateway.state import gateway_of

LEAST: Final = 1 << 14
"""Bytes below which nothing is gained."""
LEVEL: Final = 1
"""zlib's: of log-probabilities the higher ones save little more, and take several times as long."""


async def respond(request: HttpRequest, content: bytes, media_type: str) -> Response:
    """An answer with this content."""
    headers = {"vary": "accept-encoding"}
    if len(content) >= LEAST and _compresses(request):
        content = await aside(gzip.compress, content, LEVEL)
        headers["content-encoding"] = "gzip"
    return Response(content, media_type=media_type, headers=headers)


def _compresses(request: HttpRequest) -> bool:
    how = gateway_of(request).options.compress
    if how == "never" or not _takes_gzip(request.headers.get("accept-encoding", "")):
        return False
    return how == "always" or not _is_here(request)


def _takes_gzip(accepted: str) -> bool:
    said: dict[str, bool] = {}
    for each in accepted.lower().split(","):
        name, _, rest = each.strip().partition(";")
        said[name.strip()] = rest.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    for name in ("gzip", "x-gzip", "*"):
        if name in said:
            return said[name]
    return False


def _is_here(request: HttpRequest) -> bool:
    """Whether it comes from this machine, where a byte costs less than its compression."""
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
