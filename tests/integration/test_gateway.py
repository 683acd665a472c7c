"""`lmpool gateway` as a process, over a pool of real workers: what it answers, and how exactly."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

import lmpool
from lmpool.backends import tiny
from lmpool.producer import EmbeddedLM, NumpyRows
from tests.support.gateways import GATEWAY, GatewayProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.slow]

JSON = {"content-type": "application/json"}
TEXT = "Return the number of items in the list"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{{ m['tool_calls'] | length if 'tool_calls' in m }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def lm() -> Iterator[EmbeddedLM[NumpyRows]]:
    with lmpool.embedded("tiny", engine="hf", workers=1, pool="tiny", framework="numpy") as lm:
        yield lm


@pytest.fixture(scope="module")
def gateway(
    lm: EmbeddedLM[NumpyRows], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    options = ("--chat-template", str(template), "--compress", "always", "--queue-timeout", "20")
    with GatewayProcess(lm.url, "tiny", options=options) as gateway:
        with httpx.Client(base_url=gateway.base_url, timeout=60) as http:
            until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        yield gateway


@pytest.fixture
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.base_url, timeout=60) as client:
        yield client


def asked(http: httpx.Client, path: str = "/v1/completions", /, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(http: httpx.Client, path: str = "/v1/completions", /, **body: Any) -> tuple[int, Any]:
    answer = http.post(path, json=body)
    return answer.status_code, answer.json()["error"]


def events(http: httpx.Client, path: str, /, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


# --- what it is ---------------------------------------------------------------------------------


def test_it_says_what_it_serves(http: httpx.Client, lm: EmbeddedLM[NumpyRows]) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["root"], card["object"]) == ("tiny", "tiny", "model")
    assert card["max_model_len"] == lm.info.max_prompt_tokens
    assert http.get("/v1/models/tiny").json()["id"] == "tiny"
    assert http.get("/v1/models/none").status_code == 404
    assert http.get("/version").json() == {"version": lmpool.__version__}
    assert http.get("/health").status_code == 200


def test_text_is_read_as_the_models_tokenizer_reads_it(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    found = asked(http, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert found["tokens"] == tokenizer.encode(TEXT) == lm.encode(TEXT)
    assert (found["count"], "".join(found["token_strs"][1:])) == (len(found["tokens"]), TEXT)
    assert (
        asked(http, "/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"]
        == (found["tokens"][1:])
    )
    # One that says BOS itself has no second one.
    assert asked(http, "/tokenize", prompt="<s>" + TEXT)["tokens"] == found["tokens"]
    assert asked(http, "/detokenize", tokens=found["tokens"])["prompt"] == "<s>" + TEXT


def test_many_token_ids_are_compressed_for_who_accepts_it(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "a b " * 9000, "return_token_strs": True})
    assert answer.headers["content-encoding"] == "gzip"
    found = answer.json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    back = http.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.headers["content-encoding"] == "gzip"
    assert back.json()["prompt"] == "<s>" + "a b " * 9000


# --- completions --------------------------------------------------------------------------------


def rows(lm: EmbeddedLM[NumpyRows], ids: list[int]) -> np.ndarray[Any, Any]:
    return np.asarray(lm.sync.batch_next_token_logprobs([ids[:i] for i in range(1, len(ids) + 1)]))


def test_what_is_drawn_is_what_the_pool_draws(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows]
) -> None:
    ids = lm.encode(TEXT)
    one = asked(http, prompt=TEXT, max_tokens=12, seed=5, return_token_ids=True)
    (choice,) = one["choices"]
    direct = lm.sync.generate(ids, 12, seed=5)
    assert choice["token_ids"] == direct.token_ids.tolist()
    assert choice["text"] == lm.decode(direct.text_ids.tolist())
    assert choice["prompt_token_ids"] == ids
    assert one["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": direct.token_ids.size,
        "total_tokens": len(ids) + direct.token_ids.size,
    }
    assert choice["logprobs"] is None
    assert choice["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        ("/v1/completions", {"prompt": [[1, 5, 9], [1, 7]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_each_chunk_tells_the_usage_of_its_choice_so_far_where_that_is_asked_for(
    http: httpx.Client, path: str, asks: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asks, "n": 2, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    *chunks, last = events(http, path, **body, seed=1, stream_options=options)
    drawn: dict[int, int] = {}
    read: dict[int, int] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        drawn[index] = drawn.get(index, 0) + len(choice.get("token_ids", ()))
        read[index] = chunk["usage"]["prompt_tokens"]
        assert chunk["usage"]["completion_tokens"] == drawn[index]
        assert chunk["usage"]["total_tokens"] == read[index] + drawn[index]
    assert set(drawn.values()) == {6}
    assert last["usage"]["completion_tokens"] == sum(drawn.values())
    assert last["usage"]["prompt_tokens"] == sum(read.values()) / 2  # once, whatever n
    # Alone it asks for nothing, as in vLLM.
    alone = {"continuous_usage_stats": True}
    assert not any("usage" in each for each in events(http, path, **body, stream_options=alone))


def test_offsets_point_into_the_text_that_is_told(http: httpx.Client) -> None:
    body = {
        "prompt": "5 € is 日本 x",
        "echo": True,
        "logprobs": 0,
        "max_tokens": 3,
        "temperature": 0,
    }
    (choice,) = asked(http, **body)["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert (tokens[0], offsets[:2]) == ("<s>", [0, 0])  # which the text is without
    for token, offset in zip(tokens[1:], offsets[1:], strict=True):
        there = choice["text"][offset:]
        assert there.startswith(token) or "\ufffd" in token or token == "</s>"
    assert "\ufffd" in tokens


def test_choices_come_prompt_by_prompt_and_each_has_its_seed(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows]
) -> None:
    prompts = [[1, 5, 9], [1, 7]]
    found = asked(http, prompt=prompts, n=3, seed=10, max_tokens=6, return_token_ids=True)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    expected = [
        lm.sync.generate(p, 6, seed=10 + j).token_ids.tolist() for p in prompts for j in range(3)
    ]
    assert [choice["token_ids"] for choice in found["choices"]] == expected
    assert [choice["prompt_token_ids"] for choice in found["choices"]] == [
        p for p in prompts for _ in range(3)
    ]
    assert found["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_echo_gives_the_log_probability_of_each_token(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows], max_tokens: int, k: int
) -> None:
    ids = lm.encode(TEXT)
    body = {
        "prompt": [ids],
        "max_tokens": max_tokens,
        "temperature": 0,
        "echo": True,
        "logprobs": k,
    }
    (choice,) = asked(http, **body, return_token_ids=True)["choices"]
    found, drawn = choice["logprobs"], choice["token_ids"]
    assert len(drawn) == max_tokens
    everything = ids + drawn
    right = rows(lm, everything)
    texts = [lm.decode([token]) for token in everything]
    assert found["tokens"] == texts
    assert found["text_offset"] == [sum(map(len, texts[:i])) for i in range(len(texts))]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    for at, token in list(enumerate(everything))[1:]:
        row = right[at - 1]
        number, top = found["token_logprobs"][at], found["top_logprobs"][at]
        assert number == pytest.approx(row[token], abs=2e-5)
        assert top[texts[at]] >= number
        best = [int(i) for i in np.argsort(-row, kind="stable")[:k]]
        assert set(top) == {lm.decode([i]) for i in {*best, token}}
        if k:
            # As lm-evaluation-harness sees whether a token is greedy: by equality.
            assert (number == max(top.values())) == (row[token] == row.max())
    assert choice["text"] == "".join(texts)


def test_a_text_that_ends_the_text_has_an_entry_too(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows]
) -> None:
    """The one entry that lm-evaluation-harness cuts off, also where it is an EOS."""
    ids, greedy = lm.encode(TEXT), lm.sync.generate(lm.encode(TEXT), 1, temperature=0)
    token = int(greedy.token_ids[0])
    for more in ({}, {"stop_token_ids": [token]}, {"stop": lm.decode([token])}):
        body = {"prompt": [ids], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        (choice,) = asked(http, **body, **more)["choices"]
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
        assert choice["finish_reason"] == ("stop" if more else "length")
        assert choice["text"].endswith(lm.decode([token])) == (not more)


@pytest.mark.parametrize(
    "more", [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0}, {"max_tokens": 0}]
)
def test_prompt_logprobs_begin_with_the_prompts_own_token(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows], more: dict[str, Any]
) -> None:
    ids = lm.encode(TEXT)
    body = {"prompt": [ids, [1]], "max_tokens": 1, "prompt_logprobs": 4, **more}
    first, second = asked(http, **body)["choices"]
    assert second["prompt_logprobs"] == [None]
    assert first["prompt_logprobs"][0] is None
    assert len(first["prompt_logprobs"]) == len(ids)
    right = rows(lm, ids)
    for at, entry in list(enumerate(first["prompt_logprobs"]))[1:]:
        row = right[at - 1]
        assert next(iter(entry)) == str(ids[at])
        best = {str(i) for i in np.argsort(-row, kind="stable")[:4]}
        assert set(entry) == best | {str(ids[at])}
        for name, value in entry.items():
            token = int(name)
            assert value["logprob"] == pytest.approx(row[token], abs=2e-5)
            assert value["rank"] == int((row >= row[token]).sum())
            assert value["decoded_token"] == lm.decode([token])


def test_prompts_may_be_scored_at_a_temperature(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows]
) -> None:
    ids = lm.encode(TEXT)
    body = {"prompt": [ids], "max_tokens": 0, "prompt_logprobs": 0}
    (choice,) = asked(http, **body, prompt_logprobs_temperature=0.5)["choices"]
    right = rows(lm, ids).astype(np.float64) / 0.5
    right -= np.log(np.exp(right).sum(1, keepdims=True))
    found = [
        entry[str(i)]["logprob"]
        for i, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    np.testing.assert_allclose(found, [right[i, t] for i, t in enumerate(ids[1:])], atol=5e-5)


def test_the_token_that_comes_with_the_scores_is_drawn_as_any_other(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows]
) -> None:
    ids = [1, 373]
    row = np.exp(np.asarray(lm.sync.next_token_logprobs(ids)).astype(np.float64))
    body = {"prompt": [ids] * 2000, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    drawn = [choice["token_ids"][0] for choice in asked(http, **body)["choices"]]
    counts = np.bincount(drawn, minlength=row.size)
    likely = np.argsort(-row)[:5]
    for token in likely:
        mean, spread = 2000 * row[token], math.sqrt(2000 * row[token] * (1 - row[token]))
        assert abs(counts[token] - mean) < 5 * spread
    # Those that are not among the likeliest come as well.
    rest = 1 - row[np.argsort(-row)[:20]].sum()
    outside = 2000 - counts[np.argsort(-row)[:20]].sum()
    assert abs(outside - 2000 * rest) < 5 * math.sqrt(2000 * rest)


def test_labels_may_be_ids(http: httpx.Client) -> None:
    body = {
        "prompt": [[1, 5.0]],
        "max_tokens": 2.0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    (choice,) = asked(http, **body, return_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    for top, token in zip(choice["logprobs"]["top_logprobs"], choice["token_ids"], strict=True):
        assert f"token_id:{token}" in top
        assert all(label.startswith("token_id:") for label in top)


def test_any_number_of_stop_texts_cut_exactly(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows]
) -> None:
    whole = asked(http, prompt=TEXT, max_tokens=40, seed=3)["choices"][0]["text"]
    stop = whole[10:13]
    stops = [f"never {i}" for i in range(500)] + [stop]
    (choice,) = asked(http, prompt=TEXT, max_tokens=40, seed=3, stop=stops)["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    streamed = events(http, "/v1/completions", prompt=TEXT, max_tokens=40, seed=3, stop=stops)
    assert "".join(e["choices"][0]["text"] for e in streamed) == choice["text"]


def test_a_stream_tells_the_same(http: httpx.Client) -> None:
    body = {
        "prompt": [TEXT, "a€"],
        "max_tokens": 10,
        "n": 2,
        "seed": 4,
        "logprobs": 2,
        "echo": True,
    }
    whole = asked(http, **body)
    parts = events(http, "/v1/completions", **body, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in parts[:-1] if p["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert all(part["finish_reason"] is None for part in mine[:-1])
        told = {
            name: [each for part in mine for each in part["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        }
        right = choice["logprobs"]
        assert told["tokens"] == right["tokens"]
        assert told["text_offset"] == right["text_offset"]
        # Other prompts in a batch round otherwise.
        assert told["token_logprobs"][1:] == pytest.approx(right["token_logprobs"][1:], abs=2e-5)
        for one, other in zip(told["top_logprobs"][1:], right["top_logprobs"][1:], strict=True):
            assert one == pytest.approx(other, abs=2e-5)


def test_answers_are_compressed_for_who_asks(http: httpx.Client) -> None:
    body = {"prompt": [[1, 5, 9] * 60], "max_tokens": 0, "prompt_logprobs": 50}
    plain = http.post("/v1/completions", json=body, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with http.stream("POST", "/v1/completions", json=body) as packed:
        assert packed.headers["content-encoding"] == "gzip"
        data = b"".join(packed.iter_raw())
    assert len(data) < len(plain.content) / 3
    assert json.loads(gzip.decompress(data))["choices"] == plain.json()["choices"]


# --- chats --------------------------------------------------------------------------------------


def test_a_chat_is_read_by_its_template(http: httpx.Client, lm: EmbeddedLM[NumpyRows]) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = lm.encode("<s>user: hello\nassistant:", bos=False)
    body = {"messages": messages, "max_tokens": 6, "seed": 2, "return_token_ids": True}
    found = asked(http, "/v1/chat/completions", **body, logprobs=True, top_logprobs=2)
    (choice,) = found["choices"]
    direct = lm.sync.generate(ids, 6, seed=2, logprobs=True, top_logprobs=2)
    assert found["prompt_token_ids"] == ids
    assert choice["token_ids"] == direct.token_ids.tolist()
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == lm.decode(direct.text_ids.tolist())
    assert direct.logprobs is not None
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(
        direct.logprobs.tolist(), abs=1e-6
    )
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert asked(http, "/tokenize", messages=messages)["tokens"] == ids
    streamed = events(http, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"
    said = [event["choices"][0]["delta"]["content"] for event in streamed[:-1]]
    assert "".join(said) == choice["message"]["content"]
    assert streamed[-1]["usage"] == found["usage"]


def test_a_template_gets_text_parts_as_text_and_may_go_on(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = asked(http, "/tokenize", messages=[{"role": "user", "content": "hello"}])
    assert asked(http, "/tokenize", messages=[{"role": "user", "content": parts}]) == whole
    found = asked(
        http, "/tokenize",
        messages=[{"role": "assistant", "content": "I am"}], continue_final_message=True,
    )  # fmt: skip
    assert asked(http, "/detokenize", tokens=found["tokens"])["prompt"] == "<s>assistant: I am"


def test_what_is_null_in_a_message_is_not_there(http: httpx.Client) -> None:
    """As in an answer's message that the openai package gives back."""
    absent = [{"role": "assistant", "content": "I am"}, {"role": "user"}]
    null = [{**absent[0], "tool_calls": None, "refusal": None}, {**absent[1], "content": None}]
    found = asked(http, "/tokenize", messages=null)
    assert found == asked(http, "/tokenize", messages=absent)
    text = "<s>assistant: I am\nuser: \nassistant:"
    assert asked(http, "/detokenize", tokens=found["tokens"])["prompt"] == text


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {"5": 1}}, {"frequency_penalty": 0.5}, {"presence_penalty": -1},
        {"repetition_penalty": 1.1}, {"best_of": 3}, {"response_format": {"type": "json_object"}},
        {"use_beam_search": True}, {"guided_json": {}}, {"structured_outputs": {"regex": "a"}},
        {"suffix": "x"}, {"min_tokens": 2}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]},
        {"temperature": -1}, {"top_p": 0}, {"n": 0}, {"n": 10**6}, {"logprobs": 101},
        {"prompt_logprobs": 10**6}, {"stop": ""}, {"stop": ["x"] * 5000}, {"max_tokens": -1},
        {"prompt": []}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": [2000]}, {"prompt": [-1]},
        {"prompt": "\ud800"},
    ],
    ids=lambda more: "-".join(more),
)  # fmt: skip
def test_what_would_mean_something_else_is_refused(
    http: httpx.Client, more: dict[str, Any]
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2, **more})
    answer = http.post("/v1/completions", content=body, headers=JSON)
    if more == {"prompt": ""}:  # this model has a BOS token, which is a prompt
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] in more


def test_neutral_and_unknown_fields_are_ignored(http: httpx.Client) -> None:
    neutral = {
        "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "best_of": 1,
        "repetition_penalty": 1.0, "response_format": {"type": "text"}, "seed": None, "stop": None,
        "user": "me", "top_k": -1, "min_p": 0, "priority": {"a": [1]}, "max_tokens": None,
        "max_completion_tokens": 3, "echo": None, "logprobs": None, "stream": None, "n": None,
    }  # fmt: skip
    assert asked(http, prompt="a", **neutral)["usage"]["completion_tokens"] <= 3
    messages = [{"role": "user", "content": "a", "name": None}]
    chat = {"messages": messages, "tools": [], "tool_choice": "none", "max_completion_tokens": 3}
    assert asked(http, "/v1/chat/completions", **chat)["usage"]["completion_tokens"] <= 3
    tools = [{"type": "function", "function": {"name": "f"}}]
    status, error = refused(http, "/v1/chat/completions", messages=messages, tools=tools)
    assert (status, error["param"]) == (400, "tools")


@pytest.mark.parametrize(
    "body",
    [
        {}, {"prompt": None}, {"prompt": 5}, {"prompt": {"a": 1}}, {"prompt": [["a"]]},
        {"prompt": [1.5]}, {"prompt": [True]}, {"prompt": ["a", 1]}, {"prompt": "a", "n": "2"},
        {"prompt": "a", "n": True}, {"prompt": "a", "stop": [1]}, {"prompt": "a", "echo": "yes"},
        {"prompt": "a", "temperature": "1"}, {"prompt": "a", "logprobs": True},
        {"prompt": "a", "model": 3}, {"prompt": "a", "stream_options": 1}, [], "a", 7,
    ],
)  # fmt: skip
def test_wrong_types_are_said(http: httpx.Client, body: Any) -> None:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", ["", "{", '{"prompt": NaN', "[" * 100_000, '{"prompt": "\\ud800"}']
)
def test_what_is_no_json_is_said(http: httpx.Client, body: str) -> None:
    answer = http.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "headers", "why"),
    [
        (b"{", {}, "Expecting property name"),
        (
            gzip.compress(b"{}"),
            {"content-encoding": "gzip"},
            "its content-encoding is 'gzip': send it",
        ),
        (b'{"prompt": "\xff"}', {}, "it is no UTF-8"),
        (b"[" * 100_000, {}, "it is nested too deeply"),
        (b'{"seed": ' + b"1" * 5000 + b"}", {}, "a number has too many digits"),
    ],
    ids=["cut", "compressed", "bytes", "deep", "digits"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/logprobs", "/live/surprise"])
def test_why_a_body_is_no_json_is_said(
    http: httpx.Client, path: str, body: bytes, headers: dict[str, str], why: str
) -> None:
    answer = http.post(path, content=body, headers=JSON | headers)
    assert answer.status_code == 400
    assert f"the body is not JSON: {why}" in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows]
) -> None:
    most = lm.info.max_prompt_tokens
    status, error = refused(http, prompt=[[1] * (most + 1)], max_tokens=1)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {most} tokens" in error["message"]
    for prompt in ([[1] * (most + 2)], "a" * 100_000):
        status, error = refused(http, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        assert f"maximum context length is {most} tokens" in error["message"]
    # The last token of a text that is only scored needs no answer after it.
    body = {"max_tokens": 0, "echo": True, "logprobs": 0}
    assert asked(http, prompt=[[1] * (most + 1)], **body)["usage"]["completion_tokens"] == 0
    found = asked(http, prompt=[[1] * most], max_tokens=50, temperature=0)
    assert found["usage"]["completion_tokens"] == 1
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_model_that_is_not_there_is_404(http: httpx.Client) -> None:
    status, error = refused(http, prompt="a", model="gpt-9")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert asked(http, prompt="a", model="tiny", max_tokens=1)["model"] == "tiny"


def test_paths_and_methods_that_are_not_there(http: httpx.Client) -> None:
    assert http.post("/v1/nothing").json()["error"]["type"] == "not_found_error"
    answer = http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_the_description_names_every_path_and_error(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        found = description["paths"][path]["post"]["responses"]
        assert {"200", "400", "404", "408", "413", "422", "429", "500", "503"} <= set(found)
        assert "Retry-After" in found["503"]["headers"]
        assert "401" not in found  # there are no keys here


def test_what_cannot_be_used_ends_it_at_once(
    lm: EmbeddedLM[NumpyRows], gateway: GatewayProcess, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% for %}")
    for option, said in (
        (("--chat-template", str(bad)), "no chat template"),
        (("--api-keys", str(tmp_path / "none")), "cannot be read"),
        (("--port", str(gateway.port)), "cannot listen there"),
        (("--pool", "tiny", "--pool", "tiny"), "more than once"),
    ):
        command = [*GATEWAY, "--url", lm.url, *option]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == (2 if "--port" in option else 78)  # which may be free later
        assert said in done.stderr
        assert "Traceback" not in done.stderr
