"""Server-sent events, and streams that end when their response does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lmpool.gateway.errors import ApiError
from lmpool.gateway.json_parts import dumps

EVENTS: Final[dict[str, Any]] = {"text/event-stream": {}}
"""Of a route's description: what it answers where a stream was asked for. A schema would be read as
that of an event."""

STREAM_HEADERS: Final[Mapping[str, str]] = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE: Final = b"data: [DONE]\n\n"


class Streamed(StreamingResponse):
    """A response of parts, whose generator ends with it.

    One that is cut off in its midst would leave the generator, and the places that it holds, to
    the garbage collector.
    """

    def __init__(self, parts: AsyncGenerator[bytes], media_type: str) -> None:
        super().__init__(parts, media_type=media_type, headers=STREAM_HEADERS)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts):
            await super().__call__(scope, receive, send)


async def event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> Response:
    """A response that tells chunks as they come. What fails before the first one is no stream."""
    try:
        first = await anext(chunks, None)
    except BaseException:
        await chunks.aclose()
        raise
    return Streamed(_events(first, chunks), "text/event-stream")


async def _events(
    first: dict[str, Any] | None, chunks: AsyncGenerator[dict[str, Any]]
) -> AsyncGenerator[bytes]:
    async with aclosing(chunks):
        try:
            if first is not None:
                yield _event(first)
            async for chunk in chunks:
                yield _event(chunk)
        except ApiError as error:
            yield b"data: " + error.body() + b"\n\n"
        yield _DONE


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + dumps(chunk) + b"\n\n"
