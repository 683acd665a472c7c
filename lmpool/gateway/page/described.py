"""``/docs``: what ``/openapi.json`` says, for people, without a script of anybody's.

It is of one origin with the live page, which holds keys: so it is drawn here, as plain HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from lmpool.gateway.page.assets import HEADERS

router = APIRouter(include_in_schema=False)

Schema = Mapping[str, Any]

_HEAD: Final = """\
<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>lmpool: what the gateway answers</title>
  <link rel="icon" href="/page/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/page/page.css">
  <link rel="stylesheet" href="/page/described.css">
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
"""
_BOUNDS: Final = (
    ("minimum", "from {}"),
    ("exclusiveMinimum", "over {}"),
    ("maximum", "to {}"),
    ("maxItems", "{} at most"),
    ("maxLength", "{} characters at most"),
)


@router.api_route("/docs", methods=["GET", "HEAD"], response_class=Response)
async def docs(request: HttpRequest) -> Response:
    """Every path, field and error."""
    return HTMLResponse(page(request.app.openapi()), headers=HEADERS)


def page(description: Schema) -> str:
    """A description of OpenAPI as HTML."""
    schemas = description["components"]["schemas"]
    operations = [
        (method.upper(), path, operation)
        for path, each in description["paths"].items()
        for method, operation in each.items()
    ]
    top = (
        "<header class='top'><div class='wide'><h1>What this gateway answers</h1>"
        f"<p class='model'>lmpool {escape(description['info']['version'])}. The same for programs: "
        "<a href='/openapi.json'>openapi.json</a>. The pools themselves: <a href='/'>the live "
        "page</a>.</p></div></header>"
    )
    parts = [
        _HEAD + top,
        "<main id='main' class='wide described' tabindex='-1'><h2>Paths</h2>",
        *(_operation(*each) for each in operations),
        "<h2>Bodies</h2>",
        *(_schema(name, schemas[name]) for name in sorted(schemas) if not name.startswith("HTTP")),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Schema) -> str:
    asked = operation.get("requestBody", {}).get("content", {})
    lines = [
        f"<section class='card'><h3><code>{method} {escape(path)}</code></h3>",
        f"<p>{_told(operation.get('description', ''))}</p>",
    ]
    if asked:
        lines.append(f"<p>Body: {', '.join(_contents(asked))}</p>")
    lines.append("<dl>")
    for status, each in operation["responses"].items():
        said = [] if status == "200" else [_told(each.get("description", ""))]
        said += _contents(each.get("content", {})) if status == "200" else []
        said += [f"header {escape(name)}" for name in each.get("headers", {})]
        lines.append(f"<dt>{escape(status)}</dt><dd>{', '.join(said) or 'answered'}</dd>")
    return "".join([*lines, "</dl></section>"])


def _contents(content: Schema) -> Iterator[str]:
    for kind, each in content.items():
        form = _form(each["schema"]) if each.get("schema") else ""
        yield f"{form} <span class='note'>({escape(kind)})</span>".strip()


def _schema(name: str, schema: Schema) -> str:
    required, neutral, lines = schema.get("required", ()), list[str](), list[str]()
    for field, each in schema.get("properties", {}).items():
        if is_neutral(each) and field not in required:
            neutral.append(f"<code>{escape(field)}</code>")
            continue
        needed = " <span class='note'>(required)</span>" if field in required else ""
        told = _told(each.get("description", ""))
        lines.append(f"<dt><code>{escape(field)}</code>{needed}</dt>")
        lines.append(f"<dd>{_form(each)}{'. ' if told else ''}{told}</dd>")
    more = f"<p class='note'>Not supported: {', '.join(neutral)}</p>" if neutral else ""
    return (
        f"<section class='card' id='{escape(name)}'><h3>{escape(name)}</h3>"
        f"<p>{_told(schema.get('description', ''))}</p><dl>{''.join(lines)}</dl>{more}</section>"
    )


def is_neutral(schema: Schema) -> bool:
    """Whether a field takes nothing but what is as good as leaving it out."""
    forms = [form for form in schema.get("anyOf", (schema,)) if form.get("type") != "null"]
    return all(
        form.get("const", True) is False
        or ("maximum" in form and form["maximum"] == form.get("minimum"))
        or 0 in (form.get(most) for most in ("maxItems", "maxLength", "maxProperties"))
        for form in forms
    )


def _form(schema: Schema) -> str:
    """What a value is, in a few words."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        forms = (_form(each) for each in several if each.get("type") != "null")
        return " or ".join(dict.fromkeys(forms))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return " or ".join(f"<code>{escape(repr(each))}</code>" for each in values)
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        kind = f"list of {_form(schema['items'])}" if schema.get("items") else "list"
    bounds = [text.format(_number(schema[name])) for name, text in _BOUNDS if name in schema]
    return " ".join(
        [kind, *([f"<span class='note'>({', '.join(bounds)})</span>"] if bounds else [])]
    )


def _told(text: str) -> str:
    """A description, which is written as docstrings are."""
    return re.sub(r"(``?)([^`]+)\1", r"<code>\2</code>", escape(text))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:g}"
