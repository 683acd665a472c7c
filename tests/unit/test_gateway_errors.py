"""What a gateway says of bodies that are not as the description says."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from lmpool.errors import LmpoolError, PoolTimeout, ServerUnreachable, UnknownPool
from lmpool.gateway.app import create_app
from lmpool.gateway.errors import of_pool
from lmpool.gateway.options import GatewayOptions, PoolAddress

INTEGER = "Input should be a valid integer"


def refused(path: str, body: Any) -> tuple[int, str]:
    """The status and the words of a refusal, for which no pool is asked."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(GatewayOptions((PoolAddress("pool"),))))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post(path, json=body)

    answer = asyncio.run(ask())
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": [1, "a"]}, 422, f"prompt.1: {INTEGER}"),
        ({"prompt": [[1, -2]]}, 400, "prompt.0.1: Input should be greater than or equal to 0"),
        ({"prompt": 5}, 422, "prompt: Input should be a valid string, or a valid list"),
        ({"stop": [1]}, 422, "stop.0: Input should be a valid string"),
        ({"top_p": 2}, 400, "top_p: Input should be less than or equal to 1"),
    ],
    ids=str,
)
def test_the_place_of_what_is_wrong_has_names_of_fields_alone(
    body: dict[str, Any], status: int, said: str
) -> None:
    assert refused("/v1/completions", {"prompt": "a", **body}) == (status, said)


@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 3}, {"frequency_penalty": 0.5}, {"presence_penalty": -1}, {"min_tokens": 2},
        {"repetition_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"use_beam_search": True},
        {"suffix": "x"}, {"guided_json": {}}, {"bad_words": ["a"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_must_be_neutral_is_told_to_be_left_out(body: dict[str, Any]) -> None:
    (name,) = body
    said = f"{name}: not supported: leave it out"
    assert refused("/v1/completions", {"prompt": "a", **body}) == (400, said)


def test_the_same_within_a_field() -> None:
    body = {"token_ids": [1], "sampling_params": {"best_of": 2}}
    assert refused("/inference/v1/generate", body) == (
        400,
        "sampling_params.best_of: not supported: leave it out",
    )


@pytest.mark.parametrize("kind", [PoolTimeout, ServerUnreachable, UnknownPool])
def test_no_error_tells_a_pools_server(kind: type[LmpoolError]) -> None:
    """Not where it is, nor who asks it."""
    told = of_pool(kind("no answer from redis://me@10.1.2.3:6379/0 after 3 s"))
    assert told.status == 503
    assert b"10.1.2.3" not in told.body()
