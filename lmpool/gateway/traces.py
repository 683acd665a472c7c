"""A span for each request that comes through the door, in the trace that its headers name."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from lmpool.gateway.door import OPEN, WATCHING, App, Message, Receive, Send
from lmpool.tracing import active, within

NATIVE: Any = {"tracing": False, "metrics": False, "logs": False}
"""For FastAPI, whose later releases would make spans, too: one for each request is enough."""


class Traced:
    """An application in front of another, where anybody takes spans."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_untraced(scope["path"]) or not active():
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        with within(headers, f"{scope['method']} request") as span:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    route = scope.get("route")
                    if route is not None:  # of lmpool's own, not of a caller's making
                        span.update_name(f"{scope['method']} {route.path}")
                        span.set_attribute("http.route", route.path)
                await send(message)

            await self._app(scope, receive, noted)


def _is_untraced(path: str) -> bool:
    """What is open, or stays open: a page that somebody looks at is no request that takes long."""
    return path in OPEN or path == WATCHING
