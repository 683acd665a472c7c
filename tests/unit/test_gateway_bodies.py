"""Bodies of many parts: how far they are read, and where."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, TypeAdapter

from lmpool.gateway import json_reading
from lmpool.gateway.app import create_app
from lmpool.gateway.options import GatewayOptions, PoolAddress
from lmpool.gateway.sampling import MAX_PROMPT_IDS, MAX_PROMPTS
from lmpool.gateway.schemas import SMALL_BODY, JsonRoute, Request, _JsonRequest
from lmpool.wants.position_ids import MAX_TOKEN_IDS

JSON = "application/json; charset=utf-8"


def posted(app: Any, path: str, content: bytes, kind: str = JSON) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            headers = {"content-type": kind}
            return await http.post(path, content=content, headers=headers)

    return asyncio.run(ask())


def refusal(path: str, body: str, kind: str = JSON) -> tuple[int, str]:
    """Of a gateway whose pool is not there: a body that is taken is a 503."""
    app = create_app(GatewayOptions((PoolAddress("pool"),), queue_timeout=0.001))
    answer = posted(app, path, body.encode(), kind)
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize("item", ["[1]", '"a"', "[]"])
def test_more_prompts_than_there_may_ever_be_are_not_looked_at(item: str) -> None:
    def body(count: int) -> str:
        return '{"prompt":[' + ",".join([item] * count) + "]}"

    for path in ("/v1/completions", "/v1/logprobs"):
        assert refusal(path, body(MAX_PROMPTS))[0] == 503
        status, said = refusal(path, body(MAX_PROMPTS + 1))
        assert status == 400
        assert said.startswith(f"prompt: List should have at most {MAX_PROMPTS} items")
        assert said.endswith("not supported beyond this")


@pytest.mark.parametrize(
    ("path", "before", "after", "place"),
    [
        ("/v1/logprobs", '{"prompt":[1],"want":{"kind":"score","token_ids":[', "]}}", "want"),
        ("/v1/logprobs", '{"prompt":[1],"want":{"kind":"draw","excluded":[', "]}}", "want"),
        ("/inference/v1/generate",
         '{"token_ids":[1],"sampling_params":{"prompt_logprob_token_ids":[', "]}}",
         "sampling_params.prompt_logprob_token_ids"),
    ],
    ids=["score", "draw", "generate"],
)  # fmt: skip
def test_more_ids_than_can_be_asked_for_are_not_looked_at(
    path: str, before: str, after: str, place: str
) -> None:
    item = "1" if "draw" in before else "[1]"
    status, said = refusal(path, before + ",".join([item] * (MAX_TOKEN_IDS + 1)) + after)
    assert status == 400
    assert said.startswith(place)
    assert f"at most {MAX_TOKEN_IDS} items" in said


def test_a_prompt_of_more_ids_than_any_model_takes_is_not_looked_at() -> None:
    for path, name in (("/v1/completions", "prompt"), ("/inference/v1/generate", "token_ids")):
        ids = ",".join(["1"] * (MAX_PROMPT_IDS + 1))
        body = f'{{"{name}":[{ids}],"sampling_params":{{}}}}'
        status, said = refusal(path, body)
        assert status == 400
        assert f"at most {MAX_PROMPT_IDS} items" in said


def test_a_large_body_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    read = json_reading.loads

    def seen(body: bytes, parse_float: Any) -> Any:
        sizes.append(len(body))
        return read(body, parse_float)

    monkeypatch.setattr(json_reading, "loads", seen)
    for blanks in ("", " " * SMALL_BODY):
        assert refusal("/v1/completions", f'{{"prompt":[1]{blanks}}}')[0] == 503
    (size,) = sizes
    assert size > SMALL_BODY


class Seen:
    """Where a body is read and checked, and how often garbage is looked for meanwhile."""

    def __init__(self) -> None:
        self.readers: set[str] = set()
        self.collections = 0
        self.route = FastAPI()
        self.route.router.route_class = JsonRoute

        def look(found: Any) -> Any:
            self.readers.add(threading.current_thread().name)
            return found

        class Body(Request):
            numbers: Annotated[list[Any], AfterValidator(look)]
            first: Annotated[int, AfterValidator(look)]

        async def take(body: Body) -> int:
            assert type(body) is Body
            return len(body.numbers) + body.first

        take.__annotations__ = {"body": Body, "return": int}
        self.route.post("/")(take)

    @contextmanager
    def counting(self) -> Iterator[None]:
        def count(phase: str, info: dict[str, int]) -> None:
            self.collections += phase == "start"

        gc.callbacks.append(count)
        try:
            yield
        finally:
            gc.callbacks.remove(count)


def test_a_large_body_is_read_and_checked_beside_the_event_loop() -> None:
    for count, aside in ((10, False), (SMALL_BODY, True)):
        seen = Seen()
        content = json.dumps({"numbers": [1] * count, "first": 7.0}).encode()
        answer = posted(seen.route, "/", content)
        assert answer.json() == count + 7
        (reader,) = seen.readers
        assert reader.startswith("beside-the-loop") is aside


def test_a_large_body_that_is_wrong_is_refused_as_a_small_one() -> None:
    blanks = " " * SMALL_BODY
    for body in (
        '{"prompt":5%s}',
        '{"prompt":[1,"a"]%s}',
        '{"prompt":[1]%s',
        "[%s]",
        '{"top_p":2%s}',
    ):
        small, large = (refusal("/v1/completions", body % some) for some in ("", blanks))
        assert small == large
        assert small[0] in (400, 422)


@pytest.mark.parametrize(
    ("kind", "is_json"),
    [
        ("application/json", True),
        (JSON, True),
        ("APPLICATION/JSON", True),
        ("application/foo+json", True),
        ("application/x/json", False),
        ("application/x-json", False),
        ("text/json", False),
        ("", False),
    ],
)
def test_a_large_body_is_json_where_a_small_one_is(kind: str, is_json: bool) -> None:
    for blanks in ("", " " * SMALL_BODY):
        _, said = refusal("/v1/completions", f'{{"prompt":5{blanks}}}', kind)
        assert said.startswith("prompt: " if is_json else "the body is not read as JSON")


def test_no_garbage_is_looked_for_among_the_lists_of_a_body() -> None:
    content = b'{"first":1,"numbers":[' + b",".join([b"[]"] * 200_000) + b"]}"
    seen = Seen()
    gc.collect()
    with seen.counting():
        assert posted(seen.route, "/", content).json() == 200_001
    # Those of what serves it: of the lists alone there would be hundreds.
    assert seen.collections < 20
    assert gc.isenabled()


def test_what_is_wrong_with_a_large_body_does_not_keep_it() -> None:
    class Body(Request):
        first: int

    request = _JsonRequest({"type": "http", "headers": []})
    for body in (b'{"numbers":[[1],[2]]}', b'{"numbers":[[1],[2]'):
        with pytest.raises((RequestValidationError, json.JSONDecodeError)) as told:
            request._shaped(body, TypeAdapter(Body))
        assert told.value.__context__ is None
