"""The openai package on a gateway, unpatched; and the examples of lmpool.integrations."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmpool
from tests.support.gateways import GatewayProcess
from tests.support.pools import worker_processes
from tests.support.server import RealServer
from tests.support.workers import clean_environment

openai = pytest.importorskip("openai")

from lmpool.gateway.keys import line  # noqa: E402

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of the clients and what they bring
]

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.joinpath("examples", "integrations").glob("*.py"))
SAYS = {
    "evaluate": ["accuracy 1.00"],
    "inspect_task": ["%  If the file does not exist"],
    "distill_trl": ["losses "],
    "teachers": ["verl    (", "the likeliest 8 have", "Tinker  "],
}
"""What each prints."""
PROMPT = "If the file does not"
ASKED: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def client(tiny_gateway: GatewayProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{tiny_gateway.base_url}/v1", api_key="any") as found:
        yield found


@pytest.fixture
def model(tiny_pool: lmpool.EmbeddedLM) -> str:
    return tiny_pool.pool


def greedy(pool: lmpool.EmbeddedLM, prompt: str, count: int = 8) -> Any:
    return pool.sync.generate(pool.encode(prompt), count, 0.0, logprobs=True, top_logprobs=3)


# --- completions -----------------------------------------------------------------------------


def test_the_models_are_the_pools(client: Any, model: str) -> None:
    (found,) = client.models.list().data
    assert found.id == model
    assert found.max_model_len >= 512
    assert client.models.retrieve(model).id == model


def test_a_completion_of_a_text_and_of_its_ids(
    client: Any, model: str, tiny_pool: lmpool.EmbeddedLM
) -> None:
    ids = tiny_pool.encode(PROMPT)
    expected = tiny_pool.decode(greedy(tiny_pool, PROMPT).token_ids)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        found = client.completions.create(model=model, prompt=prompt, seed=None, **ASKED)
        assert found.choices[0].text == expected
        assert found.choices[0].finish_reason == "length"
        assert found.usage.prompt_tokens == len(ids)
        assert found.usage.total_tokens == len(ids) + 8


def test_logprobs_and_echo_are_the_scores(
    client: Any, model: str, tiny_pool: lmpool.EmbeddedLM
) -> None:
    ids = tiny_pool.encode(PROMPT)
    whole, scores = greedy(tiny_pool, PROMPT), tiny_pool.sync.score(ids, top_logprobs=3)
    found = client.completions.create(model=model, prompt=PROMPT, logprobs=3, echo=True, **ASKED)
    told = found.choices[0].logprobs
    assert found.choices[0].text == PROMPT + tiny_pool.decode(whole.token_ids)
    assert told.token_logprobs[0] is None
    expected = [*scores.logprobs.tolist(), *whole.logprobs.tolist()]
    np.testing.assert_allclose(told.token_logprobs[1:], expected, atol=5e-5)
    best = [*scores.top_logprobs.logprobs[:, 0].tolist(), *whole.top_logprobs.logprobs[:, 0]]
    likeliest = [max(each.values()) for each in told.top_logprobs[1:]]
    np.testing.assert_allclose(likeliest, best, atol=5e-5)


def test_several_choices_of_several_prompts_are_prompt_major_and_repeat(
    client: Any, model: str
) -> None:
    asked = {"model": model, "prompt": [PROMPT, "Return"], "n": 3, "max_tokens": 6, "seed": 4}
    found = client.completions.create(**asked)
    assert [choice.index for choice in found.choices] == list(range(6))
    texts = [choice.text for choice in found.choices]
    assert texts == [choice.text for choice in client.completions.create(**asked).choices]
    assert len(set(texts)) > 2
    alone = client.completions.create(**{**asked, "prompt": PROMPT})
    assert [choice.text for choice in alone.choices] == texts[:3]


def test_text_is_cut_where_a_stop_begins(
    client: Any, model: str, tiny_pool: lmpool.EmbeddedLM
) -> None:
    text = tiny_pool.decode(greedy(tiny_pool, PROMPT, 30).token_ids)
    stop = [text[9:12], "zzz", "qqq", "yyy", "xxx"]  # more than OpenAI's four
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": stop}
    found = client.completions.create(**asked).choices[0]
    assert found.text == text[: text.index(stop[0])]
    assert found.finish_reason == "stop"
    streamed = client.completions.create(stream=True, **asked)
    assert "".join(each.choices[0].text for each in streamed) == found.text


def test_a_stream_is_the_whole_and_its_usage_comes_last(
    client: Any, model: str, tiny_pool: lmpool.EmbeddedLM
) -> None:
    whole = greedy(tiny_pool, PROMPT)
    chunks = list(
        client.completions.create(
            model=model, prompt=PROMPT, stream=True, logprobs=1,
            stream_options={"include_usage": True}, **ASKED,
        )
    )  # fmt: skip
    *parts, last = chunks
    text = "".join(choice.text for chunk in parts for choice in chunk.choices)
    assert text == tiny_pool.decode(whole.token_ids)
    told = [
        value
        for chunk in parts
        for choice in chunk.choices
        if choice.logprobs is not None
        for value in choice.logprobs.token_logprobs
    ]
    np.testing.assert_allclose(told, whole.logprobs, atol=5e-5)
    assert parts[-1].choices[0].finish_reason == "length"
    assert not last.choices
    assert last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in parts)


def test_the_asynchronous_client_asks_many_at_once(
    tiny_gateway: GatewayProcess, model: str, tiny_pool: lmpool.EmbeddedLM
) -> None:
    prompts = [f"Return the number {n} of" for n in range(24)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{tiny_gateway.base_url}/v1", api_key="any"
        ) as client:

            async def one(prompt: str, stream: bool) -> str:
                asked = {"model": model, "prompt": prompt, **ASKED}
                if not stream:
                    return str((await client.completions.create(**asked)).choices[0].text)
                found = await client.completions.create(stream=True, **asked)
                return "".join([chunk.choices[0].text async for chunk in found])

            return await asyncio.gather(
                *(one(prompt, bool(n % 2)) for n, prompt in enumerate(prompts))
            )

    expected = [tiny_pool.decode(greedy(tiny_pool, prompt).text_ids) for prompt in prompts]
    assert asyncio.run(ask()) == expected


# --- chat ------------------------------------------------------------------------------------

MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Return what?"},
]
CHAT_PROMPT = "[system] Be brief.\n[user] Return what?\n[assistant]"


def test_a_conversation(client: Any, model: str, tiny_pool: lmpool.EmbeddedLM) -> None:
    ids = tiny_pool.encode(CHAT_PROMPT, bos=False)
    whole = tiny_pool.sync.generate(ids, 8, 0.0, logprobs=True, top_logprobs=3)
    asked = {"model": model, "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    found = client.chat.completions.create(logprobs=True, top_logprobs=3, **asked)
    choice = found.choices[0]
    expected = tiny_pool.decode(whole.token_ids)
    assert choice.message.content == expected
    assert choice.message.role == "assistant"
    assert found.usage.prompt_tokens == len(ids)
    told = choice.logprobs.content
    np.testing.assert_allclose([each.logprob for each in told], whole.logprobs, atol=5e-5)
    assert [len(each.top_logprobs) for each in told] == [3] * 8
    assert b"".join(bytes(each.bytes) for each in told).decode() == expected
    streamed = client.chat.completions.create(stream=True, **asked)
    assert "".join(each.choices[0].delta.content or "" for each in streamed) == expected


def test_tools_are_refused(client: Any, model: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tool"):
        client.chat.completions.create(model=model, messages=MESSAGES, tools=[tool])


# --- errors ----------------------------------------------------------------------------------


def refused(kind: type[Exception], client: Any, **asked: Any) -> Any:
    """The error of a request, as the package makes one of it: of this very class."""
    with pytest.raises(kind) as found:
        client.with_options(max_retries=0).completions.create(**asked)
    assert type(found.value) is kind
    return found.value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": [[1, 999_999]]}, "999999"),
        ({"prompt": ""}, ""),
        ({"max_tokens": -1}, ""),
        ({"temperature": -2}, "temperature"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_bad_requests(client: Any, model: str, given: dict[str, Any], said: str) -> None:
    asked = {"model": model, "prompt": PROMPT, **given}
    if asked["prompt"] == "":  # a BOS token stands for it
        asked["extra_body"] = {"add_special_tokens": False}
    with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)) as found:
        client.completions.create(**asked)
    assert said in str(found.value)
    assert set(found.value.body) >= {"message", "type", "param", "code"}


def test_a_field_of_another_type(client: Any, model: str) -> None:
    asked = {"model": model, "prompt": "x", "extra_body": {"max_tokens": "many"}}
    error = refused(openai.UnprocessableEntityError, client, **asked)
    assert error.status_code == 422
    assert error.param == "max_tokens"


def test_a_context_that_is_too_long(client: Any, model: str) -> None:
    error = refused(openai.BadRequestError, client, model=model, prompt=[5] * 600)
    assert error.code == "context_length_exceeded"
    assert "maximum context length" in error.message


def test_an_unknown_model(client: Any) -> None:
    error = refused(openai.NotFoundError, client, model="gpt-99", prompt="x")
    assert error.status_code == 404


def test_a_gateway_that_is_away(client: Any, model: str) -> None:
    nowhere = client.with_options(base_url="http://127.0.0.1:9/v1")
    refused(openai.APIConnectionError, nowhere, model=model, prompt="x")


FAILS = 255
"""A token that the engine fails on."""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a gateway with keys and tight limits, before a slow pool and a deserted one."""
    keys = tmp_path_factory.mktemp("strict") / "keys"
    keys.write_text(f"{line('one', 'sk-one', 1)}\n{line('many', 'sk-many')}\n", "utf-8")
    options = (
        "--queue-timeout", "1", "--timeout", "3", "--max-body", "4000", "--body-timeout", "2",
    )  # fmt: skip
    with RealServer() as server:
        with worker_processes(server.url, "gone", 1):
            pass
        with (
            worker_processes(
                server.url, "slow", 1, engine_opts={"delay": 0.5, "fail_token": FAILS}
            ),
            GatewayProcess(
                server.url, "gone", "slow", options=("--api-keys", str(keys), *options)
            ) as gateway,
            openai.OpenAI(base_url=f"{gateway.base_url}/v1", api_key="sk-many") as client,
        ):
            yield client


def test_a_key_that_is_wrong(strict: Any) -> None:
    wrong = strict.with_options(api_key="sk-other")
    error = refused(openai.AuthenticationError, wrong, model="slow", prompt=[1, 2])
    assert error.status_code == 401
    assert strict.completions.create(model="slow", prompt=[1, 2], max_tokens=1).choices


def test_a_body_that_is_too_large(strict: Any) -> None:
    error = refused(openai.APIStatusError, strict, model="slow", prompt=[100] * 4000)
    assert error.status_code == 413


def test_a_body_that_does_not_come_in_time(strict: Any) -> None:
    with keeping_back(strict.base_url.port) as port:
        stuck = strict.with_options(base_url=f"http://127.0.0.1:{port}/v1")
        # The package has no class for it, and tries it again by itself.
        error = refused(openai.APIStatusError, stuck, model="slow", prompt=[1, 2])
    assert error.status_code == 408
    assert error.type == "timeout_error"


@contextmanager
def keeping_back(gateway: int) -> Iterator[int]:
    """A port of this machine: what is sent there reaches the gateway but for its last byte."""

    def forward(listener: socket.socket) -> None:
        with listener.accept()[0] as caller, socket.create_connection(("127.0.0.1", gateway)) as to:
            sent = b""
            while b"\r\n\r\n" not in sent:
                sent += caller.recv(65_536)
            head, _, body = sent.partition(b"\r\n\r\n")
            found = re.search(rb"(?i)content-length: (\d+)", head)
            assert found is not None
            while len(body) < int(found[1]):
                body += caller.recv(65_536)
            to.sendall(head + b"\r\n\r\n" + body[:-1])
            while answer := to.recv(65_536):
                caller.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        forwarding = threads.submit(forward, listener)
        yield int(listener.getsockname()[1])
        forwarding.result(60)


def test_a_prompt_that_the_engine_fails_on(strict: Any) -> None:
    error = refused(openai.InternalServerError, strict, model="slow", prompt=[1, FAILS])
    assert error.status_code == 500
    assert error.type == "server_error"


def test_a_pool_without_workers(strict: Any) -> None:
    error = refused(openai.InternalServerError, strict, model="gone", prompt=[1, 2])
    assert error.status_code == 503
    assert 1 <= int(error.response.headers["retry-after"]) <= 120


def test_a_request_that_takes_too_long(strict: Any) -> None:
    asked = {"model": "slow", "prompt": [1, 3], "max_tokens": 200}
    error = refused(openai.InternalServerError, strict, extra_body={"ignore_eos": True}, **asked)
    assert error.status_code == 503


def test_a_client_that_does_not_wait(strict: Any) -> None:
    asked = {"model": "slow", "prompt": [1, 5]}
    refused(openai.APITimeoutError, strict.with_options(timeout=0.05), **asked)
    assert strict.completions.create(max_tokens=1, **asked).choices


def test_more_requests_of_a_key_than_it_may_have(strict: Any) -> None:
    limited = strict.with_options(api_key="sk-one")
    asked = {"model": "slow", "prompt": [1, 4], "max_tokens": 100}
    with limited.completions.create(stream=True, extra_body={"ignore_eos": True}, **asked) as held:
        next(iter(held))
        error = refused(openai.RateLimitError, limited, model="slow", prompt=[1, 2])
    assert error.status_code == 429
    assert 1 <= int(error.response.headers["retry-after"]) <= 120


# --- the examples of the plugins ---------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_the_tiny_model(
    example: Path, tmp_path: Path, tiny_pool: lmpool.EmbeddedLM
) -> None:
    done = subprocess.run(
        [sys.executable, str(example), "--url", tiny_pool.url, "--pool", tiny_pool.pool],
        cwd=tmp_path,
        env={
            **clean_environment(),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for said in SAYS[example.stem]:
        assert said in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_links_it(example: Path) -> None:
    pages = [page.read_text("utf-8") for page in ROOT.joinpath("docs/integrations").glob("*.md")]
    assert any(f"examples/integrations/{example.name}" in page for page in pages)
