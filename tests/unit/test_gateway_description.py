"""What a gateway's description says of its answers."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from lmpool.gateway.app import create_app
from lmpool.gateway.door import OPEN
from lmpool.gateway.options import GatewayOptions, PoolAddress


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/logprobs", "/inference/v1/generate"],
)
def test_no_schema_says_that_an_event_of_a_stream_is_a_text(path: str) -> None:
    """It is an object for who reads the description, whose data is JSON."""
    requests: Any = create_app(GatewayOptions((PoolAddress("pool"),)))
    app = requests._app._app._app  # behind what counts, what traces, and the door
    content = app.openapi()["paths"][path]["post"]["responses"]["200"]["content"]
    assert content["text/event-stream"].get("schema", {}).get("type") != "string"


def answers(*paths: str) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(GatewayOptions((PoolAddress("pool"),))))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return [await http.get(path) for path in paths]

    return asyncio.run(ask())


def test_its_page_says_the_same_and_has_no_script_and_nothing_of_elsewhere() -> None:
    page, described = answers("/docs", "/openapi.json")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page.text
    assert "`" not in page.text
    links = re.findall(r"(?:href|src)=[\"']([^\"']*)", page.text)
    assert all(re.match(r"/(?!/)|#", link) for link in links), links
    assert {"/page/page.css", "/page/described.css"} <= OPEN & {*links}
    description = described.json()
    for path, operations in description["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    names = set(re.findall(r"id='(\w+)'><h3>", page.text))
    assert {link[1:] for link in links if link[0] == "#" and link != "#main"} <= names
    for name, schema in description["components"]["schemas"].items():
        if not name.startswith("HTTP"):
            _, _, rest = page.text.partition(f"id='{name}'")
            section, _, _ = rest.partition("</section>")
            assert set(re.findall(r"<code>(\w+)</code>", section)) >= {
                *schema.get("properties", ())
            }


def test_no_page_of_the_frameworks_own_is_there() -> None:
    assert [answer.status_code for answer in answers("/redoc", "/docs/oauth2-redirect")] == [
        404
    ] * 2
