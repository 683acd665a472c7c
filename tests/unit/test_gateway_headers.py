"""Headers that make no sense, and methods that ask for nothing but them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from lmpool.gateway.app import create_app
from lmpool.gateway.options import GatewayOptions, PoolAddress

NONSENSE = [
    "[", "http://[", "http://[x]", "http://a:b", "//[::1", "\x7f", "é", ";", "=", ",", "*;q=x",
    "text/plain;version=x", "application/openmetrics-text;version=", "application/json;charset",
    'application/json; charset="', "null", "Basic [", "9" * 5000, "-1", "%", "\t",
]  # fmt: skip
NAMES = [
    "host", "origin", "accept", "accept-encoding", "content-type", "authorization", "if-none-match",
    "sec-fetch-site", "traceparent", "tracestate", "forwarded", "content-encoding",
]  # fmt: skip
PATHS = [
    "/",
    "/health",
    "/metrics",
    "/version",
    "/v1/models",
    "/live/events",
    "/docs",
    "/none",
]
ASKED = ["/v1/logprobs", "/live/next-tokens", "/live/dead-letters/drop"]


def statuses(*asked: tuple[str, str, dict[str, str]]) -> list[httpx.Response]:
    """Of requests of these methods, paths and headers, to a gateway whose pool is not there."""
    app = create_app(GatewayOptions((PoolAddress("pool"),), queue_timeout=0.001))

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            found = []
            for method, path, given in asked:
                headers = {"content-type": "application/json"} if method == "POST" else {}
                raw = [(k.encode(), v.encode()) for k, v in {**headers, **given}.items()]
                content = b'{"prompt":[1],"text":"a","names":["a"]}' if method == "POST" else None
                found.append(await http.request(method, path, headers=raw, content=content))
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize("name", NAMES)
def test_no_header_is_a_failure_of_ours(name: str) -> None:
    asked = [("GET", path, {name: value}) for path in PATHS for value in NONSENSE]
    asked += [("POST", path, {name: value}) for path in ASKED for value in NONSENSE]
    asked = [each for each in asked if each[1] != "/live/events"]
    for (method, path, headers), answer in zip(asked, statuses(*asked), strict=True):
        assert answer.status_code != 500, (method, path, headers)


@pytest.mark.parametrize("origin", ["http://[", "http://[x]", "null", "http://a:b"])
def test_an_origin_that_is_none_is_another_sites(origin: str) -> None:
    (answer,) = statuses(("POST", "/live/next-tokens", {"origin": origin}))
    assert answer.status_code == 403
    assert "another site asks this" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/v1/models"])
def test_what_may_be_read_may_be_asked_for_its_head_alone(path: str) -> None:
    whole, head = statuses(("GET", path, {}), ("HEAD", path, {}))
    assert head.status_code == whole.status_code
    assert head.headers["content-type"] == whole.headers["content-type"]
