"""Answers to the page."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.responses import Response

_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def tell(answer: dict[str, Any]) -> Response:
    """An answer, which nobody keeps."""
    return Response(as_json(answer), media_type="application/json", headers=_HEADERS)


def as_json(answer: dict[str, Any]) -> bytes:
    """What a browser reads as it is meant."""
    return json.dumps(answer, separators=(",", ":")).encode()
