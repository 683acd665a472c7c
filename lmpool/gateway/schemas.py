"""What requests have in common."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool.checks import quoted
from lmpool.gateway import json_reading
from lmpool.gateway.aside import aside


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
SMALL_BODY: Final = 1 << 16
"""Bytes that are read without leaving the event loop to others."""


def is_json(request: HttpRequest) -> bool:
    """Whether FastAPI, which asks the same, reads its body as JSON."""
    message = Message()
    message["content-type"] = request.headers.get("content-type", "")
    kind = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (
        kind == "json" or kind.endswith("+json")
    )


class _JsonRequest(HttpRequest):
    """A request whose 1.0 is an integer too, as JSON's schemas have it."""

    _made: Any = None
    """What a large body is, once it was read."""
    _wrong: json.JSONDecodeError | None = None

    async def json(self) -> Any:
        """The body, or what was made of a large one."""
        if self._wrong is not None:
            raise self._wrong
        return self._read(await self.body()) if self._made is None else self._made

    async def read_aside(self, shape: TypeAdapter[Any]) -> None:
        """Make of a large body what the route takes, beside the event loop: FastAPI, which is given
        that, leaves it as it is. Raises `RequestValidationError`."""
        body = await self.body()
        if len(body) <= SMALL_BODY or not is_json(self):
            return
        try:
            self._made = await aside(self._shaped, body, shape)
        except json.JSONDecodeError as error:
            self._wrong = error.with_traceback(None)  # FastAPI says what it is

    def _shaped(self, body: bytes, shape: TypeAdapter[Any]) -> Any:
        with _nothing_collected():
            try:
                return shape.validate_python(self._read(body), from_attributes=True)  # as FastAPI
            except ValidationError as error:
                found = error.errors(include_url=False, include_input=False)
            # Not within: that one has all of the body, and would be freed by the event loop.
            every = [{**each, "loc": ("body", *each["loc"])} for each in found]
            raise RequestValidationError(every)

    def _read(self, body: bytes) -> Any:
        try:
            if len(body) > SMALL_BODY:
                return json_reading.loads(body, _number)
            return json.loads(body, parse_float=_number)
        except (ValueError, RecursionError) as error:
            why = self._why(error)
        # FastAPI would say of no other error what it is; what was read so far is of that one.
        raise json.JSONDecodeError(why, "", 0)

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


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Nothing of what is read is garbage, and a collector would look through it again and again:
    it takes most of the time of millions of lists, and holds up all threads."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:  # of several at once the first one turns it on again
            gc.enable()


def _number(text: str) -> int | float:
    found = float(text)
    return int(found) if found.is_integer() and abs(found) <= EXACT else found


class JsonRoute(APIRoute):
    """A route that reads JSON so."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """As FastAPI makes it, for such a request."""
        handler = super().get_route_handler()
        taken: Any = None if self.body_field is None else self.body_field.field_info.annotation
        shape: TypeAdapter[Any] | None = None if taken is None else TypeAdapter(taken)

        async def handle(request: HttpRequest) -> Response:
            read = _JsonRequest(request.scope, request.receive)
            if shape is not None:
                await read.read_aside(shape)
            return await handler(read)

        return handle
