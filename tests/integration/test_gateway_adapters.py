"""Adapters of a pool by their names over HTTP: each path answers with the adapter's own numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import lmpool
from lmpool.backends import tiny
from lmpool.producer import EmbeddedLM, NumpyRows
from tests.support.gateways import GatewayProcess
from tests.support.hf_texts import save_adapter
from tests.support.waiting import until

pytestmark = [pytest.mark.slow]

TEXT = "Return the number of items in the list"
MESSAGES = [{"role": "user", "content": "Return what?"}]
CHAT = "user: Return what?\nassistant:"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NAMES = ["style", "tiny:style"]
UNKNOWN = ["none", "tiny:none", "other:style", "tiny:", ":style", "style:tiny", "tiny:style:x", ""]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/logprobs": {"prompt": [[1, 2]], "want": {"kind": "top"}},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    "/tokenize": {"prompt": TEXT},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    save_adapter(str(tiny.path()), folder / "style")
    save_adapter(str(tiny.path()), folder / "later", seed=2)
    return folder


@pytest.fixture(scope="module")
def lm(folder: Path) -> Iterator[EmbeddedLM[NumpyRows]]:
    given: dict[str, Any] = {"adapter_dirs": [str(folder)], "framework": "numpy"}
    with lmpool.embedded("tiny", engine="hf", workers=1, pool="tiny", **given) as lm:
        lm.add_new_lora(str(folder / "style"), "style")
        yield lm


@pytest.fixture(scope="module")
def gateway(lm: EmbeddedLM[NumpyRows], folder: Path) -> Iterator[GatewayProcess]:
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    with GatewayProcess(lm.url, "tiny", options=("--chat-template", str(template))) as gateway:
        with httpx.Client(base_url=gateway.base_url, timeout=60) as http:
            until(lambda: http.get("/ready").is_success, 120, what="it to be ready", every=0.1)
        yield gateway


@pytest.fixture
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.base_url, timeout=60) as client:
        yield client


def asked(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def drawn(lm: EmbeddedLM[NumpyRows], ids: list[int], adapter: str | None = "style") -> Any:
    return lm.sync.generate(ids, 8, 0.0, logprobs=True, lora_name=adapter)


def test_adapters_are_listed_beside_their_pool(http: httpx.Client) -> None:
    first, adapter = http.get("/v1/models").json()["data"]
    assert (first["id"], first["parent"]) == ("tiny", None)
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("tiny:style", "tiny", "tiny")
    assert adapter["max_model_len"] == first["max_model_len"]
    for name in NAMES:
        card = http.get(f"/v1/models/{name}").json()
        assert (card["id"], card["parent"]) == (name, "tiny")


@pytest.mark.parametrize("name", NAMES)
def test_completions_are_the_adapters(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows], name: str
) -> None:
    ids = lm.encode(TEXT)
    expected, scores = drawn(lm, ids), lm.sync.score(ids, lora_name="style")
    assert drawn(lm, ids, None).logprobs.tolist() != expected.logprobs.tolist()
    body = {"model": name, "prompt": TEXT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
    found = asked(http, "/v1/completions", **body, echo=True, return_token_ids=True)
    assert found["model"] == name
    (choice,) = found["choices"]
    assert choice["token_ids"] == expected.token_ids.tolist()
    told = [*scores.logprobs.tolist(), *expected.logprobs.tolist()]
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], told, atol=2e-5)
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(event["text"] for event in events) == lm.decode(expected.text_ids)


@pytest.mark.parametrize("name", NAMES)
def test_one_token_that_comes_with_its_scores_is_the_adapters(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows], name: str
) -> None:
    """As lm-evaluation-harness asks."""
    ids = lm.encode(TEXT)
    body = {"model": name, "prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1}
    (choice,) = asked(http, "/v1/completions", **body, echo=True)["choices"]
    scores = lm.sync.score(ids, lora_name="style").logprobs.tolist()
    told = [*scores, drawn(lm, ids).logprobs[0]]
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], told, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_chats_are_the_adapters(http: httpx.Client, lm: EmbeddedLM[NumpyRows], name: str) -> None:
    expected = drawn(lm, lm.encode(CHAT, bos=False))
    body = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    (choice,) = asked(http, "/v1/chat/completions", **body, logprobs=True)["choices"]
    assert choice["message"]["content"] == lm.decode(expected.text_ids)
    told = [each["logprob"] for each in choice["logprobs"]["content"]]
    np.testing.assert_allclose(told, expected.logprobs, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_binary_answers_and_vllms_are_the_adapters(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows], name: str
) -> None:
    prompts = [[1, 5, 9], [1, 7]]
    (one, other) = asked(http, "/v1/logprobs", model=name, prompt=prompts)["data"]
    expected = lm.sync.batch_next_token_logprobs(prompts, lora_name="style")
    np.testing.assert_allclose([one["logprobs"], other["logprobs"]], expected, atol=2e-5)
    assert np.abs(expected - lm.sync.batch_next_token_logprobs(prompts)).max() > 0.01
    asking = {"token_ids": prompts[0], "sampling_params": {"max_tokens": 8, "temperature": 0}}
    found = asked(http, "/inference/v1/generate", model=name, **asking)
    assert found["choices"][0]["token_ids"] == drawn(lm, prompts[0]).token_ids.tolist()


@pytest.mark.parametrize("path", ASKED)
def test_names_that_are_none_are_not_found(http: httpx.Client, path: str) -> None:
    for name in UNKNOWN:
        answer = http.post(path, json={**ASKED[path], "model": name})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "model_not_found"), (name, answer.text)
        assert error["param"] == "model"
        assert http.get(f"/v1/models/{name}").status_code == 404 or not name
    for name in [*NAMES, "tiny"]:
        assert http.post(path, json={**ASKED[path], "model": name}).status_code == 200


def test_one_that_is_added_is_found_and_one_that_is_removed_is_not(
    http: httpx.Client, lm: EmbeddedLM[NumpyRows], folder: Path
) -> None:
    def status(name: str) -> int:
        body = {"model": name, "prompt": [1, 2], "max_tokens": 1}
        return http.post("/v1/completions", json=body).status_code

    def listed() -> list[str]:
        return [card["id"] for card in http.get("/v1/models").json()["data"]]

    assert (status("later"), status("tiny:later")) == (404, 404)
    lm.add_new_lora(str(folder / "later"), "later")
    until(lambda: status("later") == status("tiny:later") == 200, what="it to be there")
    until(lambda: listed() == ["tiny", "tiny:later", "tiny:style"], what="it to be listed")
    lm.remove_lora("later")
    until(lambda: status("later") == status("tiny:later") == 404, what="it to be gone")
    until(lambda: listed() == ["tiny", "tiny:style"], what="it to be listed no more")
