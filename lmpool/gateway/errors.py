"""Errors as OpenAI's API has them, and what lmpool's own errors are there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic import BaseModel

from lmpool.errors import (
    ClientClosed,
    LmpoolError,
    NoWorkers,
    PoolBusy,
    PoolMismatch,
    PoolTimeout,
    PromptError,
    ServerError,
    UnknownAdapter,
    UnknownPool,
)

SOON: Final = 1
LATER: Final = 10
LATEST: Final = 120
"""Seconds of ``Retry-After``, which goes with every 429 and 503."""

TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Of the other statuses: invalid_request_error."""

CONTEXT_LENGTH: Final = "context_length_exceeded"
SERVER_AWAY: Final = "the pool's server does not answer"


class Problem(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is none."""

    error: Problem


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        if retry_after is None and status in (429, 503):
            retry_after = LATER
        self.retry_after = None if retry_after is None else max(SOON, min(LATEST, retry_after))

    def body(self) -> bytes:
        """As JSON. What cannot travel in UTF-8 is spelled out."""
        problem = {
            "message": self.message,
            "type": TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": problem}).encode()

    def headers(self) -> dict[str, str]:
        """What goes with it."""
        found = {"content-type": "application/json"}
        if self.retry_after is not None:
            found["retry-after"] = str(self.retry_after)
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def too_long(tokens: int, most: int, param: str = "prompt") -> ApiError:
    """A prompt beyond the model's context, in the words that clients look for."""
    return ApiError(
        400,
        f"This model's maximum context length is {most} tokens. However, your request has {tokens} "
        "input tokens. Please reduce the length of the input.",
        param=param,
        code=CONTEXT_LENGTH,
    )


def of_pool(error: LmpoolError) -> ApiError:
    """What a caller is told of an error of a pool's."""
    text = str(error)
    match error:
        case PromptError():
            return ApiError(400, text)
        case UnknownAdapter():
            return ApiError(404, text, param="model", code="model_not_found")
        case PoolMismatch() | ClientClosed():
            return ApiError(
                503, "the pool came to serve another model: ask again", retry_after=SOON
            )
        case NoWorkers() | PoolBusy():
            return ApiError(503, text)
        # The words of these may name the server's address, which is not the caller's business.
        case PoolTimeout():
            return ApiError(503, SERVER_AWAY if "://" in text else text)
        case UnknownPool():
            return ApiError(503, "the pool is not there at the moment")
        case ServerError():
            return ApiError(503, SERVER_AWAY)
        case _:
            return ApiError(500, f"the pool failed on this request: {text}")


_TEXTS: Final[Mapping[int, str]] = {
    400: "The request cannot be answered as it is",
    401: "No API key, or none that is known",
    404: "No such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    422: "A field of the wrong type",
    429: "As many requests of this key as it may have",
    500: "The request failed",
    503: "No room, no worker, or no answer in time",
}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for its description."""
    return {status: _described(status) for status in statuses}


def _described(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"model": ErrorBody, "description": _TEXTS[status]}
    if status in (429, 503):
        schema = {"type": "integer", "minimum": SOON, "maximum": LATEST}
        found["headers"] = {"Retry-After": {"description": "Seconds", "schema": schema}}
    return found


ASKING: Final = responses(400, 401, 404, 408, 413, 422, 429, 500, 503)
"""Of the routes that ask a pool."""


def phrase(status: int) -> str:
    """A status in words."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"status {status}"
