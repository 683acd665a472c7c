"""inspect_ai and langchain-openai over a gateway, unpatched."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

import lmpool
from tests.support.gateways import GatewayProcess

pytest.importorskip("inspect_ai")
langchain_openai = pytest.importorskip("langchain_openai")

from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model  # noqa: E402

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of the clients and what they bring
]

PROMPT = "If the file does not"
QUESTION = "Return what?"
CHAT_PROMPT = f"[user] {QUESTION}\n[assistant]"


@pytest.fixture
def model(tiny_pool: lmpool.EmbeddedLM) -> str:
    return tiny_pool.pool


def asked(provider: str, model: str, gateway: GatewayProcess, prompt: Any, **config: Any) -> Any:
    """What a model of inspect_ai's answers."""

    async def ask() -> Any:
        async with get_model(
            f"{provider}/{model}", base_url=f"{gateway.base_url}/v1", api_key="any", memoize=False
        ) as found:
            return await found.generate(prompt, config=GenerateConfig(**config))

    return asyncio.run(ask())


@pytest.mark.parametrize("provider", ["openai-api/pool", "vllm"])
def test_a_conversation(
    tiny_gateway: GatewayProcess, tiny_pool: lmpool.EmbeddedLM, model: str, provider: str
) -> None:
    ids = tiny_pool.encode(CHAT_PROMPT, bos=False)
    whole = tiny_pool.sync.generate(ids, 8, 0.0, logprobs=True)
    config = {"max_tokens": 8, "temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    found = asked(provider, model, tiny_gateway, QUESTION, **config)
    assert found.completion == tiny_pool.decode(whole.token_ids)
    assert found.stop_reason == "max_tokens"
    assert found.usage.total_tokens == len(ids) + 8
    content = found.choices[0].logprobs.content
    np.testing.assert_allclose([each.logprob for each in content], whole.logprobs, atol=5e-5)


@pytest.mark.parametrize("provider", ["openai-api-completions/pool", "vllm-completions"])
def test_a_completion_with_the_prompts_log_probabilities(
    tiny_gateway: GatewayProcess, tiny_pool: lmpool.EmbeddedLM, model: str, provider: str
) -> None:
    ids = tiny_pool.encode(PROMPT)
    scores, whole = tiny_pool.sync.score(ids), tiny_pool.sync.generate(ids, 6, 0.0)
    message = ChatMessageUser(content="", metadata={"prompt_token_ids": ids})
    for prompt in (PROMPT, [message]):
        found = asked(
            provider, model, tiny_gateway, prompt,
            max_tokens=6, temperature=0.0, logprobs=True, prompt_logprobs=3,
        )  # fmt: skip
        assert found.completion == tiny_pool.decode(whole.token_ids)
        content = found.choices[0].prompt_logprobs.content
        np.testing.assert_allclose([each.logprob for each in content], scores.logprobs, atol=5e-5)
        assert [each.token for each in content] == [tiny_pool.str_vocab[t] for t in ids[1:]]


def test_a_prompt_that_is_too_long_is_model_length(
    tiny_gateway: GatewayProcess, model: str
) -> None:
    found = asked("openai-api/pool", model, tiny_gateway, "list " * 800, max_tokens=4)
    assert found.stop_reason == "model_length"


def test_langchain_asks_and_streams(
    tiny_gateway: GatewayProcess, tiny_pool: lmpool.EmbeddedLM, model: str
) -> None:
    ids = tiny_pool.encode(CHAT_PROMPT, bos=False)
    whole = tiny_pool.sync.generate(ids, 8, 0.0, logprobs=True)
    expected = tiny_pool.decode(whole.token_ids)
    url = f"{tiny_gateway.base_url}/v1"
    chat = langchain_openai.ChatOpenAI(
        model=model, base_url=url, api_key="any", temperature=0, max_tokens=8, logprobs=True
    )
    found = chat.invoke(QUESTION)
    assert found.content == expected
    told = found.response_metadata["logprobs"]["content"]
    assert math.isclose(sum(e["logprob"] for e in told), whole.logprobs.sum(), abs_tol=1e-4)
    assert found.usage_metadata["input_tokens"] == len(ids)
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == expected
    batch = chat.batch([QUESTION, "x"])
    assert batch[0].content == expected
    text = langchain_openai.OpenAI(
        model=model, base_url=url, api_key="any", temperature=0, max_tokens=8
    )
    drawn = tiny_pool.sync.generate(tiny_pool.encode(PROMPT), 8, 0.0).token_ids
    assert text.invoke(PROMPT) == tiny_pool.decode(drawn)
