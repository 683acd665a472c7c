"""What requests have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.checks import quoted


class Request(BaseModel):
    """A request's body. Fields that it does not have are ignored, and null is as good as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Answer(BaseModel):
    """The shape of an answer, for the API's description: answers are written without it."""

    model_config = ConfigDict(extra="allow")


Json = dict[str, Any]


class Usage(Answer):
    """Tokens that were read and drawn."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


EXACT: Final = 2.0**53
"""Up to it a float is an integer that a client may have meant."""


class _JsonRequest(HttpRequest):
    """A request whose 1.0 is an integer too, as JSON's schemas have it."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body, parse_float=_number)
        except (ValueError, RecursionError) as error:
            # FastAPI would say of no other error what it is.
            raise json.JSONDecodeError(self._why(error), "", 0) from None

    def _why(self, error: Exception) -> str:
        coding = self.headers.get("content-encoding", "identity")
        if coding != "identity":
            return f"its content-encoding is {quoted(coding)}: send it as it is"
        if isinstance(error, json.JSONDecodeError):
            return error.msg
        if isinstance(error, UnicodeDecodeError):
            return "it is no UTF-8"
        if isinstance(error, RecursionError):
            return "it is nested too deeply"
        return "a number has too many digits"


def _number(text: str) -> int | float:
    found = float(text)
    return int(found) if found.is_integer() and abs(found) <= EXACT else found


class JsonRoute(APIRoute):
    """A route that reads JSON so."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """As FastAPI makes it, for such a request."""
        handler = super().get_route_handler()

        async def handle(request: HttpRequest) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
