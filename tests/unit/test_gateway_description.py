"""What a gateway's description says of its answers."""

from __future__ import annotations

from typing import Any

import pytest

from lmpool.gateway.app import create_app
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
