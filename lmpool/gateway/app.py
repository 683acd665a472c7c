"""The application: routes, errors, and what is told of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool import __version__
from lmpool.gateway import (
    binary,
    chat,
    completions,
    health,
    inference,
    metrics,
    models,
    tokens,
)
from lmpool.gateway.door import OPEN, App, Door
from lmpool.gateway.errors import ApiError, phrase
from lmpool.gateway.keys import KeyFile
from lmpool.gateway.options import GatewayOptions
from lmpool.gateway.page import assets, described, live, playground
from lmpool.gateway.sampling import TOKEN_ID
from lmpool.gateway.schemas import is_json
from lmpool.gateway.state import Gateway
from lmpool.gateway.traces import NATIVE, Traced

_WRONG_TYPE: Final = ("missing", "_type", "_parsing", "_unicode")
"""Ends of pydantic's names for what is of another type than a field; the rest is out of bounds."""

_SHAPE: Final = re.compile(r"[A-Z]|.*[\[-]|(str|int|float|bool|list|dict)$")
"""What pydantic calls one of several shapes, where its path has the names of fields."""
_SHOULD: Final = "Input should be "


def create_app(options: GatewayOptions, *, page_alone: bool = False) -> App:
    """The ASGI application of a gateway, or of its live page alone.

    Raises `SettingsError` for files that it cannot read.
    """
    keys = None if options.api_keys is None else KeyFile(options.api_keys)
    gateway = Gateway(options)
    page = live.LivePage(gateway)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        gateway.pools.start()
        try:
            yield
        finally:
            await page.stop()
            await gateway.pools.stop()

    app = FastAPI(
        title="lmpool",
        version=__version__,
        description="Language models of lmpool's pools, as OpenAI's API has them.",
        lifespan=life,
        separate_input_output_schemas=False,
        # FastAPI's own pages come with scripts of others, beside one that holds keys.
        docs_url=None,
        redoc_url=None,
        openapi_url=None if page_alone else "/openapi.json",
        telemetry=NATIVE,  # which earlier releases keep, and do nothing with
    )
    app.state.gateway, app.state.page = gateway, page
    apis = (described, models, completions, chat, tokens, binary, inference)
    modules = (assets, live, playground, health, metrics, *(() if page_alone else apis))
    for module in modules:
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    _describe(app, gateway, with_keys=keys is not None)
    routes = [route for module in modules for route in module.router.routes]
    return metrics.observe(gateway, Traced(Door(app, options, keys)), routes)


# --- errors --------------------------------------------------------------------------------------


def _respond(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error.body(), error.status, {**(headers or {}), **error.headers()})


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(error)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    """What Starlette itself answers: no such path, another method."""
    assert isinstance(error, HTTPException)
    detail = error.detail if isinstance(error.detail, str) else phrase(error.status_code)
    return _respond(ApiError(error.status_code, detail), error.headers)


async def _failed(_: HttpRequest, error: Exception) -> Response:
    return _respond(ApiError(500, f"the gateway failed on this request ({type(error).__name__})"))


async def _invalid(request: HttpRequest, error: Exception) -> Response:
    """What is not as the description says: 400 for what is out of bounds, 422 for another type."""
    assert isinstance(error, RequestValidationError)
    every = error.errors()
    found = max(every, key=_weight)
    if found["type"] == "json_invalid":
        return _respond(ApiError(400, f"the body is not JSON: {found['ctx']['error']}"))
    place = _place(found)
    name = place[0] if place else None
    says = [found["msg"]]
    if _is_type(found):  # as several shapes may have been taken
        others = (each for each in every if _place(each) == place and _is_type(each))
        says += [each["msg"].removeprefix(_SHOULD) for each in others if each is not found]
    text = f"{'.'.join(place) or 'the body'}: {', or '.join(dict.fromkeys(says))}"
    if not place and not is_json(request):
        text = "the body is not read as JSON: send 'Content-Type: application/json'"
    status = 422 if _is_type(found) else 400
    if _is_unsupported(found, request.app):
        text = f"{'.'.join(place)}: not supported: leave it out"
    elif status == 400 and found["type"] in ("too_long", "literal_error"):
        text += ": not supported beyond this"
    return _respond(ApiError(status, text[:500], param=name))


def _place(found: Mapping[str, Any]) -> list[str]:
    """Names of fields and numbers of items: where a field may have several shapes, pydantic's path
    has their names too."""
    return [str(part) for part in found["loc"][1:] if not _SHAPE.match(str(part))]


def _is_type(found: Mapping[str, Any]) -> bool:
    return str(found["type"]).endswith(_WRONG_TYPE)


def _is_unsupported(found: Mapping[str, Any], app: FastAPI) -> bool:
    """Whether the field is there to be refused: nothing but its neutral value is taken."""
    bounds: Mapping[str, Any] = found.get("ctx", {})
    kind: str = found["type"]
    if kind in ("less_than_equal", "greater_than_equal"):
        name = found["loc"][-1]
        schemas = app.openapi()["components"]["schemas"].values()
        fields = (each.get("properties", {}).get(name) for each in schemas)
        return any(described.is_neutral(field) for field in fields if field is not None)
    if kind == "literal_error":
        return str(bounds.get("expected")) == "False"
    return kind == "none_required" or bool(bounds.get("max_length") == 0)


def _weight(found: Mapping[str, Any]) -> tuple[bool, int, bool]:
    """Of several findings, as of a union, the one that came furthest says most: of a list that is
    too long all that there may be of it was right."""
    return found["type"] == "too_long", len(found["loc"]), not _is_type(found)


# --- description ---------------------------------------------------------------------------------


def _describe(app: FastAPI, gateway: Gateway, *, with_keys: bool) -> None:
    """Say what only a gateway knows: whether it has keys, which are checked outside of the routes,
    its bounds, and those of its models.
    """
    make = app.openapi

    def openapi() -> dict[str, Any]:
        made = app.openapi_schema is None
        schema = make()
        if made:
            _add_keys(schema, with_keys)
        _add_bounds(schema["components"]["schemas"], gateway)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bounds(schemas: Any, gateway: Gateway) -> None:
    options = gateway.options
    likeliest = options.max_logprobs
    bounds: dict[str | None, int] = {"n": options.max_n}
    bounds |= dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), likeliest)
    sizes = [pool.served.info.vocab_size for pool in gateway.pools.all if pool.served is not None]

    def visit(node: Any, name: str | None) -> None:
        if isinstance(node, list):
            for each in node:
                visit(each, name)
        if not isinstance(node, dict):
            return
        if node.get("type") == "integer" and name in bounds:
            node["maximum"] = bounds[name]
        if node.get("format") == TOKEN_ID and sizes:
            node["maximum"] = min(sizes) - 1
        for key, each in node.items():
            if key == "properties":
                for field, its in each.items():
                    visit(its, field)
            else:
                visit(each, name)

    visit([schemas[each] for each in schemas if each.endswith("Request")], None)


def _add_keys(schema: dict[str, Any], with_keys: bool) -> None:
    operations: Sequence[tuple[str, dict[str, Any]]] = [
        (path, operation) for path, each in schema["paths"].items() for operation in each.values()
    ]
    if with_keys:
        schemes = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic"},
        }
        schema.setdefault("components", {})["securitySchemes"] = schemes
    for path, operation in operations:
        if with_keys and path not in OPEN:
            operation["security"] = [{"bearer": []}, {"basic": []}]
        elif not with_keys:
            operation["responses"].pop("401", None)
