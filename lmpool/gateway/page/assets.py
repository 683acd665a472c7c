"""The page's own files. They hold no secret, and need no key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

HOME: Final = "/"
FOLDER: Final = "/page/"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # looked at again each time, and mostly found unchanged
}


@dataclass(frozen=True, slots=True)
class _Asset:
    data: bytes
    kind: str
    tag: str


def _read() -> dict[str, _Asset]:
    """Every file by its path."""
    found: dict[str, _Asset] = {}
    for file in files("lmpool.gateway.page").joinpath("static").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            data = file.read_bytes()
            path = HOME if file.name == "index.html" else FOLDER + file.name
            found[path] = _Asset(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return found


_ASSETS: Final = _read()
PATHS: Final = frozenset(_ASSETS)
router = APIRouter(include_in_schema=False)


async def _asset(request: HttpRequest) -> Response:
    asset = _ASSETS[request.scope["path"]]  # the URL is of a Host that may be none
    headers = {**HEADERS, "etag": asset.tag}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    return Response(asset.data, headers=headers, media_type=asset.kind)


for _path in sorted(PATHS):
    router.add_api_route(_path, _asset, methods=["GET", "HEAD"], response_class=Response)
