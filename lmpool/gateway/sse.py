"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from lmpool.gateway.errors import ApiError
from lmpool.gateway.json_parts import dumps

EVENTS: Final[dict[str, Any]] = {"text/event-stream": {"schema": {"type": "string"}}}
"""Of a route's description: what it answers where a stream was asked for."""

_DONE: Final = b"data: [DONE]\n\n"


async def event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> Response:
    """A response that tells chunks as they come. What fails before the first one is no stream."""
    try:
        first = await anext(chunks, None)
    except BaseException:
        await chunks.aclose()
        raise
    return StreamingResponse(
        _events(first, chunks),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def _events(
    first: dict[str, Any] | None, chunks: AsyncGenerator[dict[str, Any]]
) -> AsyncIterator[bytes]:
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
