"""TRL's own client and a trainer's steps over a gateway; but for its check of vLLM, unpatched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.wants import Generate
from tests.support.gateways import GatewayProcess

pytest.importorskip("torch")
pytest.importorskip("trl")

from trl.generation import vllm_client

from tests.support.distillation import ExactTeacher, losses

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of TRL and what it brings
]

PROMPTS = ["If the file does not", "Return the number of"]


@pytest.fixture(autouse=True)
def as_if_vllm_were_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *given, **named: True)


@pytest.fixture
def client(tiny_gateway: GatewayProcess, as_if_vllm_were_installed: None) -> Iterator[Any]:
    found = vllm_client.VLLMClient(base_url=tiny_gateway.base_url, connection_timeout=10)
    yield found
    found.session.close()


def test_completions_are_the_pools(client: Any, tiny_pool: lmpool.EmbeddedLM) -> None:
    ids = [tiny_pool.encode(text) for text in PROMPTS]
    for prompts in (PROMPTS, ids):
        found = client.generate(
            prompts, n=2, max_tokens=6, top_k=50, logprobs=2, generation_kwargs={"seed": 3}
        )
        assert found["prompt_ids"] == ids
        assert len(found["completion_ids"]) == 4
        assert [len(each) for each in found["logprobs"]] == [6] * 4
    again = client.generate(ids, n=2, max_tokens=6, top_k=50, generation_kwargs={"seed": 3})
    assert again["completion_ids"] == found["completion_ids"]
    alone = client.generate(ids, max_tokens=5, temperature=0.0, logprobs=0)
    expected = [
        tiny_pool.sync.ask(each, Generate(5, temperature=0.0, logprobs=True)) for each in ids
    ]
    assert alone["completion_ids"] == [each.token_ids.tolist() for each in expected]
    for mine, whole in zip(alone["logprobs"], expected, strict=True):
        np.testing.assert_allclose([value for (value,) in mine], whole.logprobs, atol=5e-5)
    assert client.generate(ids, max_tokens=2, logprobs=None)["logprobs"] is None


def test_conversations(client: Any, tiny_pool: lmpool.EmbeddedLM) -> None:
    messages = [[{"role": "user", "content": "Return what?"}], [{"role": "user", "content": "x"}]]
    found = client.chat(messages, max_tokens=4, temperature=0.0, logprobs=1)
    ids = [
        tiny_pool.encode(f"[user] {each[0]['content']}\n[assistant]", bos=False)
        for each in messages
    ]
    assert found["prompt_ids"] == ids
    assert found["completion_ids"] == [
        tiny_pool.sync.generate(each, 4, 0.0).token_ids.tolist() for each in ids
    ]


@pytest.mark.parametrize("chunk_size", [0, 2])
def test_sequences_have_the_log_probabilities_of_exact_rows(client: Any, chunk_size: int) -> None:
    random = np.random.default_rng(3)
    sequences = [random.integers(3, 2000, size).tolist() for size in (12, 40, 200)]
    starts = [4, 1, 150]
    found = client.get_sequence_logprobs(sequences, starts, top_logprobs=100, chunk_size=chunk_size)
    exact = ExactTeacher().get_sequence_logprobs(sequences, starts, top_logprobs=100)
    assert found["actual_token_ids"] == exact["actual_token_ids"]
    for name in ("logprobs", "actual_logprobs"):
        for mine, theirs in zip(found[name], exact[name], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0, "loss_top_k": 20, "temperature": 0.8},
        {"beta": 0.5, "loss_top_k": 1},
    ],
)
def test_a_trainers_losses_are_those_of_exact_rows(
    tiny_gateway: GatewayProcess, tmp_path: Path, options: dict[str, Any]
) -> None:
    found = losses(tmp_path / "gateway", url=tiny_gateway.base_url, **options)
    exact = losses(tmp_path / "exact", teacher=ExactTeacher(), **options)
    assert len(found) == len(exact) == 2
    assert min(exact) > 1e-4
    np.testing.assert_allclose(found, exact, atol=5e-5, rtol=0)
