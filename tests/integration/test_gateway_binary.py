"""Binary answers over HTTP: a gateway, a server and workers, each a process of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

import lmpool
from lmpool.gateway.binary_forms import ERRORS_HEADER
from lmpool.wants import Draw, Hidden, Row, Score, Tokens, Top, TopLogprobs, Want
from tests.support.clients import connected
from tests.support.cluster import Cluster
from tests.support.gateways import GatewayProcess
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import worker_process

NPY = {"accept": "application/x-npy"}
MSGPACK = {"accept": "application/msgpack"}
BAD = 66
"""A token that the mock engine fails on."""
SLOW = 0.05
PROMPTS = [[1, 5, 9, 77, 3], [1, 5], [2, 3, 4, 5]]


@dataclass(frozen=True)
class Doors:
    """A gateway with three pools, and clients of them."""

    gateway: GatewayProcess
    tiny: lmpool.PooledLM[Any]
    odd: lmpool.PooledLM[Any]
    slow: lmpool.PooledLM[Any]

    def post(self, body: dict[str, Any], path: str = "/v1/logprobs", **headers: str) -> Any:
        """An answer."""
        return httpx.post(self.gateway.base_url + path, json=body, headers=headers, timeout=50)


@pytest.fixture(scope="module")
def _doors(_session_server: RealServer | Cluster) -> Iterator[Doors]:
    url = _session_server.url
    with ExitStack() as stack:
        hf = {"engine": "hf", "model": "tiny", "engine_opts": {"threads": 1}}
        fails, slow = {"fail_token": BAD}, {"delay": SLOW}
        workers = []
        for pool, settings in (
            ("tiny", hf),
            ("odd", {"engine_opts": fails}),
            ("slow", {"engine_opts": slow, "batch_size": 1}),
        ):
            started = worker_process(url, pool, alive=False, **settings)  # type: ignore[arg-type]
            workers.append(stack.enter_context(started))
        pools = ("tiny", "odd", "slow")
        options = ("--max-prompts", "512")
        for worker in workers:
            worker.wait_until_alive()
        gateway = stack.enter_context(GatewayProcess(url, *pools, options=options))
        clients = [stack.enter_context(connected(url, pool)) for pool in pools]
        yield Doors(gateway, *clients)


@pytest.fixture
def doors(_doors: Doors, server_url: str) -> Doors:
    """The same for all tests of this module."""
    return _doors


def arrays(data: bytes) -> list[Any]:
    """Every array of an answer."""
    file, found = io.BytesIO(data), []
    while file.tell() < len(data):
        found.append(np.load(file))
    return found


def same(found: dict[str, Any], want: Want, answer: Any) -> None:
    """That an answer by names, of arrays or lists, is what the pool's client gives."""
    expected: dict[str, Any]
    if isinstance(answer, np.ndarray):
        expected = {"state" if want.kind == "hidden" else "logprobs": answer}
    else:
        names = [name for name in answer.__slots__ if getattr(answer, name) is not None]
        expected = {name: getattr(answer, name) for name in names}
    top = expected.get("top_logprobs")
    if isinstance(top, TopLogprobs):
        expected |= {"top_token_ids": top.token_ids, "top_logprobs": top.logprobs, "rest": top.rest}
    for name, array in expected.items():
        array = np.asarray(array)
        given = np.asarray(found[name], array.dtype).reshape(array.shape)
        if array.dtype.kind == "f":  # two computations of one thing agree within rounding
            np.testing.assert_allclose(given, array, atol=1e-5, rtol=0, err_msg=name)
        else:
            assert np.array_equal(given, array), name
    assert set(expected) == set(found) - {"index", "position"}


WANTS: list[tuple[dict[str, Any], Want]] = [
    ({"kind": "row"}, Row()),
    ({"kind": "top", "k": 7}, Top(7)),
    ({"kind": "top"}, Top(20)),
    ({"kind": "tokens", "token_ids": [3, 1999, 3]}, Tokens([3, 1999, 3])),
    ({"kind": "score"}, Score()),
    (
        {"kind": "score", "start": 1, "top_logprobs": 3, "token_ids": [5, 6], "temperature": 0.5},
        Score(1, 3, [5, 6], 0.5),
    ),
    ({"kind": "hidden"}, Hidden()),
]


@pytest.mark.parametrize(("body", "want"), WANTS, ids=[str(body) for body, _ in WANTS])
def test_every_want_in_every_form_is_the_clients_own(
    doors: Doors, body: dict[str, Any], want: Want
) -> None:
    expected = doors.tiny.sync.ask_many([(ids, want) for ids in PROMPTS])
    asked = {"model": "tiny", "prompt": PROMPTS, "want": body}
    found = doors.post(asked).json()
    assert [each["index"] for each in found["data"]] == [0, 1, 2]
    for each, answer in zip(found["data"], expected, strict=True):
        same(each, want, answer)
    packed = msgpack.unpackb(doors.post(asked, **MSGPACK).content)
    for each, answer in zip(packed, expected, strict=True):
        same({name: unpacked(name, value) for name, value in each.items()}, want, answer)
    response = doors.post(asked, **NPY)
    assert response.headers["content-type"] == "application/x-npy"
    (array,) = arrays(response.content)
    for index, answer in enumerate(expected):
        if array.dtype.names is None:
            np.testing.assert_allclose(array[index], answer, atol=1e-5, rtol=0)
        else:
            lines = array[array["index"] == index] if want.kind == "score" else array[index]
            same({name: lines[name] for name in array.dtype.names}, want, answer)


def unpacked(name: str, value: Any) -> Any:
    ids = name in ("token_ids", "top_token_ids", "ranks")
    return np.frombuffer(value, "<i4" if ids else "<f4") if isinstance(value, bytes) else value


def test_draws_of_a_request_are_those_of_a_batch(doors: Doors) -> None:
    body = {"kind": "draw", "n": 4, "seed": 7, "temperature": 0.7, "excluded": [1, 2]}
    asked = {"model": "tiny", "prompt": PROMPTS, "want": body}
    (array,) = arrays(doors.post(asked, **NPY).content)
    expected = doors.tiny.sync.batch_draw(PROMPTS, 4, seed=7, temperature=0.7, excluded=[1, 2])
    for line, draws in zip(array, expected, strict=True):
        same({name: line[name] for name in array.dtype.names}, Draw(), draws)


def test_a_text_and_one_prompt(doors: Doors) -> None:
    (array,) = arrays(doors.post({"model": "tiny", "prompt": "The function"}, **NPY).content)
    ids = doors.tiny.encode("The function")
    assert np.array_equal(array, [doors.tiny.sync.next_token_logprobs(ids)])
    (array,) = arrays(doors.post({"prompt": ids}, **NPY).content)  # the first pool's
    assert array.shape == (1, 2000)


def test_wants_of_several_kinds(doors: Doors) -> None:
    wants = [{"kind": "top", "k": 2}, {"kind": "score"}, {"kind": "tokens", "token_ids": [1]}]
    asked = {"model": "tiny", "prompt": PROMPTS, "want": wants}
    top, scores, some = msgpack.unpackb(doors.post(asked, **MSGPACK).content)
    assert len(top["token_ids"]) == 8
    assert len(scores["ranks"]) == 4
    assert len(some["logprobs"]) == 4
    response = doors.post(asked, **NPY)
    assert response.status_code == 400
    assert "one kind" in response.json()["error"]["message"]
    response = doors.post({**asked, "want": wants[:2]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "want"


# --- errors --------------------------------------------------------------------------------------

ODD = [[1, 2], [BAD], [3, 10**6], [4], list(range(60)) * 300]


def test_an_error_of_one_prompt_is_where_its_answer_would_be(doors: Doors) -> None:
    asked = {"model": "odd", "prompt": ODD, "want": {"kind": "top", "k": 2}}
    found = doors.post(asked).json()["data"]
    assert [("error" in each, each["index"]) for each in found] == [
        (False, 0),
        (True, 1),
        (True, 2),
        (False, 3),
        (True, 4),
    ]
    assert [found[i]["error"]["status"] for i in (1, 2, 4)] == [500, 400, 400]
    assert found[4]["error"]["code"] == "context_length_exceeded"
    packed = msgpack.unpackb(doors.post(asked, **MSGPACK).content)
    assert [each.get("error") for each in packed] == [each.get("error") for each in found]
    response = doors.post(asked, **NPY)
    (array,) = arrays(response.content)
    assert np.isnan(array["rest"]).tolist() == [False, True, True, False, True]
    errors = json.loads(response.headers[ERRORS_HEADER])
    assert {int(i): each["status"] for i, each in errors.items()} == {1: 500, 2: 400, 4: 400}


def test_where_all_fail_the_first_error_is_the_answer(doors: Doors) -> None:
    for headers in ({}, NPY, MSGPACK):
        response = doors.post({"model": "odd", "prompt": [[3, 10**6], [BAD]]}, **headers)
        assert response.status_code == 400
        assert "1000000" in response.json()["error"]["message"]
    assert doors.post({"model": "odd", "prompt": [[BAD]]}).status_code == 500


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": []}, 400),
        ({"prompt": [[1]] * 513}, 400),
        ({"prompt": [1], "model": "none"}, 404),
        ({"prompt": [1], "want": {"kind": "nothing"}}, 400),
        ({"prompt": [1], "want": {"kind": "tokens"}}, 422),
        ({"prompt": [1], "want": {"kind": "top", "k": 10**9}}, 400),
        ({"prompt": [1], "want": {"kind": "top", "k": "2"}}, 422),
        ({"prompt": [1, 2], "want": {"kind": "score", "start": 9}}, 400),
        ({"prompt": [[1] * 1000] * 500, "want": {"kind": "score", "top_logprobs": 2000}}, 413),
        ({}, 422),
    ],
)
def test_what_cannot_be_is_refused(doors: Doors, body: dict[str, Any], status: int) -> None:
    response = doors.post(body)
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# --- streams -------------------------------------------------------------------------------------


def test_a_stream_has_every_answer_with_its_index(doors: Doors) -> None:
    prompts = [[i + 1] for i in range(100)]
    asked = {"model": "odd", "prompt": prompts, "want": {"kind": "top", "k": 2}, "stream": True}
    expected = doors.odd.sync.ask_many([(ids, Top(2)) for ids in prompts], errors="return")
    lines = doors.post(asked).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    maps = list(msgpack.Unpacker(io.BytesIO(doors.post(asked, **MSGPACK).content)))
    for found in (events, maps):
        assert sorted(each["index"] for each in found) == list(range(100))
        assert [each["index"] for each in found if "error" in each] == [BAD - 1]
    by_index = {each["index"]: each for each in events}
    parts = arrays(doors.post(asked, **NPY).content)
    assert sorted(part["index"][0] for part in parts) == list(range(100))
    for part in parts:
        index = part["index"][0]
        if "error" in part.dtype.names:
            assert part["status"][0] == 500
            continue
        same(by_index[index], Top(), expected[index])
        same({name: part[name][0] for name in part.dtype.names}, Top(), expected[index])


def test_a_stream_begins_long_before_it_ends(doors: Doors) -> None:
    asked = {"model": "slow", "want": {"kind": "top", "k": 1}, "stream": True}
    doors.post({**asked, "prompt": [[99]]})  # the pool is known from here on

    def first_part(start: int) -> float:
        """When it came, of all the time."""
        prompts = [[start, i] for i in range(1, 41)]
        began, first, count = time.monotonic(), 0.0, 0
        with httpx.stream(
            "POST",
            doors.gateway.base_url + "/v1/logprobs",
            json={**asked, "prompt": prompts},
            headers=MSGPACK,
            timeout=50,
        ) as response:
            unpacker = msgpack.Unpacker()
            for part in response.iter_raw():
                unpacker.feed(part)
                count += len(list(unpacker))
                first = first or time.monotonic() - began
        took = time.monotonic() - began
        assert count == 40
        assert took > 40 * SLOW
        return first / took

    # Again where somebody paused just then.
    assert any(first_part(start) < 0.5 for start in range(100, 103))


def test_who_hangs_up_withdraws_what_is_left(doors: Doors) -> None:
    prompts = [[i, j] for i in range(1, 17) for j in range(1, 33)]  # half of them are 13 s
    before = doors.slow.sync.pool_statistics()["computed"]
    for stream in (True, False):
        asked = {"model": "slow", "prompt": prompts, "want": {"kind": "top"}, "stream": stream}

        async def leave(asked: dict[str, Any] = asked) -> None:
            async with httpx.AsyncClient(base_url=doors.gateway.base_url, timeout=50) as client:
                post = client.post("/v1/logprobs", json=asked)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(post, 0.7)

        asyncio.run(leave())
        until(
            lambda: doors.slow.sync.pool_statistics()["backlog"] == 0,
            what="what nobody waits for to be withdrawn",
        )
    computed = doors.slow.sync.pool_statistics()["computed"] - before
    assert computed < len(prompts) / 2


# --- /inference/v1/generate ----------------------------------------------------------------------

GENERATE = "/inference/v1/generate"
IDS = [1, 5, 9, 77, 3]


def at_ids(found: dict[str, Any]) -> Any:
    return np.load(io.BytesIO(base64.b64decode(found["prompt_token_id_logprobs"])))


@pytest.mark.parametrize("start", [0, 1, 3])
def test_ids_at_each_position_of_a_prompt(doors: Doors, start: int) -> None:
    rows = [[3, 4, -1], [5], [1, 2, 1999], [-1, 7]][start:]
    params = {"max_tokens": 1, "prompt_logprob_token_ids": rows, "prompt_logprob_start": start}
    body = {"model": "tiny", "token_ids": IDS, "sampling_params": params}
    found = at_ids(doors.post(body, GENERATE).json())
    width = max(map(len, rows))
    assert (found.dtype, found.shape) == (np.float32, (len(rows), width))
    for position, (row, line) in enumerate(zip(rows, found, strict=True), start + 1):
        expected = doors.tiny.sync.next_token_logprobs(IDS[:position])
        for token, logprob in zip(row + [-1] * (width - len(row)), line, strict=True):
            assert np.isclose(logprob, -np.inf if token == -1 else expected[token], atol=1e-4)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"prompt_logprob_token_ids": [[1]] * 3}, "has 3 rows, but the prompt has 4"),
        ({"prompt_logprob_token_ids": [[]] * 4}, "at least one id"),
        ({"prompt_logprob_token_ids": [[2000]] * 4}, "token id 2000"),
        ({"prompt_logprob_token_ids": [[-2]] * 4}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_start": 1}, "needs prompt_logprob_token_ids"),
        ({"logprob_token_ids": [1, 2], "logprobs": 1}, "logprobs=1"),
        ({"logprob_token_ids": [2000]}, "token id 2000"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"n": 1000}, "n=1000"),
        ({"prompt_logprobs": 101}, "prompt_logprobs=101"),
    ],
)
def test_what_vllm_refuses_too(doors: Doors, params: dict[str, Any], message: str) -> None:
    body = {"model": "tiny", "token_ids": IDS, "sampling_params": params}
    response = doors.post(body, GENERATE)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_greedy_continuation_with_log_probabilities(doors: Doors) -> None:
    params = {"max_tokens": 6, "temperature": 0, "logprobs": 3, "prompt_logprobs": 2}
    asked = {"token_ids": IDS, "sampling_params": params, "request_id": "mine"}
    found = doors.post({"model": "tiny", **asked, "return_token_ids": True}, GENERATE).json()
    expected = doors.tiny.sync.generate(IDS, 6, 0.0, logprobs=True, top_logprobs=3)
    (choice,) = found["choices"]
    assert choice["token_ids"] == expected.token_ids.tolist()
    assert choice["finish_reason"] == "length"
    assert found["request_id"] == "generate-tokens-mine"
    assert found["output_mode"] == "tokens"
    assert found["prompt_token_ids"] == IDS
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert found["prompt_token_id_logprobs"] is None
    for at, entry in enumerate(choice["logprobs"]["content"]):
        assert entry["token_id"] == expected.token_ids[at]
        assert entry["rank"] == 1
        assert [each["rank"] for each in entry["top_logprobs"]] == [1, 2, 3]
        assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]
        np.testing.assert_allclose(entry["logprob"], expected.logprobs[at], atol=1e-4)
    assert found["prompt_logprobs"][0] is None
    assert [next(iter(each)) for each in found["prompt_logprobs"][1:]] == [str(i) for i in IDS[1:]]


def test_ids_at_each_token_that_is_drawn(doors: Doors) -> None:
    params = {"max_tokens": 3, "seed": 1, "logprobs": 2, "logprob_token_ids": [4, 1999], "n": 2}
    body = {"model": "tiny", "token_ids": IDS, "sampling_params": params}
    for choice in doors.post(body, GENERATE).json()["choices"]:
        before = list(IDS)
        for entry in choice["logprobs"]["content"]:
            row = doors.tiny.sync.next_token_logprobs(before)
            told = {each["token_id"]: each["logprob"] for each in entry["top_logprobs"]}
            assert list(told) == list(dict.fromkeys([entry["token_id"], 4, 1999]))
            np.testing.assert_allclose(list(told.values()), row[list(told)], atol=1e-3)
            before.append(entry["token_id"])


def test_a_stream_of_tokens_and_one_of_text(doors: Doors) -> None:
    params = {"max_tokens": 5, "temperature": 0, "logprobs": 1}
    asked = {"model": "tiny", "token_ids": IDS, "sampling_params": params, "stream": True}
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    whole = doors.post({**asked, "stream": False, "output_mode": "text"}, GENERATE).json()
    for mode in ("tokens", "text"):
        lines = doors.post({**asked, **options, "output_mode": mode}, GENERATE).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert chunks[0]["prompt_token_ids"] == IDS
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        parts = [chunk["choices"][0] for chunk in chunks[:-1]]
        ids = [token for part in parts for token in part["token_ids"]]
        assert ids == whole["choices"][0]["token_ids"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        if mode == "text":
            text = "".join(part["text"] for part in parts)
            assert text == whole["choices"][0]["text"] == doors.tiny.decode(ids)
            (entry, *_) = parts[0]["logprobs"]["content"]
            assert bytes(entry["bytes"]).decode() == entry["token"]
    refused = {**asked, "sampling_params": {**params, "prompt_logprobs": 1}}
    assert doors.post(refused, GENERATE).status_code == 400
