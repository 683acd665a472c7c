"""lm-evaluation-harness through a gateway: its own HTTP models get what its `hf` gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lmpool
from tests.support.gateways import GatewayProcess
from tests.support.lm_eval_tasks import assert_same, evaluated, flat, write_tasks

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402

from lmpool.backends import tiny  # noqa: E402

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of the harness and its data sets
]

CONTEXT = 512
LONGEST = CONTEXT - 2
"""What `hf` has to be told for the same cuts: `local-completions` keeps one token of its context
for what is generated, and counts the last target among the rest."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, transformers.AutoTokenizer.from_pretrained(tiny.path()), LONGEST)
    return folder


@pytest.fixture(scope="module")
def expected(tasks: Path) -> Any:
    model = HFLM(pretrained=tiny.path(), device="cpu", batch_size=4, max_length=LONGEST)
    return evaluated(model, tasks)


def local(gateway: str, model: str, **given: Any) -> Any:
    """The harness's `local-completions`."""
    return LocalCompletionsAPI(
        base_url=f"{gateway}/v1/completions",
        model=model,
        tokenizer=tiny.path(),
        tokenizer_backend="huggingface",
        add_bos_token=True,
        max_length=CONTEXT,
        **given,
    )


@pytest.mark.parametrize(("size", "concurrent"), [(1, 1), (4, 1), (5, 1), (1, 3), (4, 3)])
def test_local_completions_has_the_results_of_hf(
    tiny_gateway: GatewayProcess,
    tiny_pool: lmpool.EmbeddedLM,
    tasks: Path,
    expected: Any,
    size: int,
    concurrent: int,
) -> None:
    model = local(tiny_gateway.base_url, tiny_pool.pool, batch_size=size, num_concurrent=concurrent)
    assert_same(evaluated(model, tasks), expected)


def test_with_the_gateways_own_tokenizer(
    tiny_gateway: GatewayProcess, tiny_pool: lmpool.EmbeddedLM, tasks: Path, expected: Any
) -> None:
    """Texts are sent as texts: the gateway makes tokens of them."""
    model = local(tiny_gateway.base_url, tiny_pool.pool, tokenized_requests=False, batch_size=4)
    found = evaluated(model, tasks, ["lmpool_texts"])
    assert flat(found["samples"]["lmpool_texts"][0]["resps"]) == flat(
        expected["samples"]["lmpool_texts"][0]["resps"]
    )


def test_local_chat_completions_has_the_texts_of_the_template(
    tiny_gateway: GatewayProcess, tiny_pool: lmpool.EmbeddedLM, tasks: Path
) -> None:
    found = evaluated(
        "local-chat-completions",
        tasks,
        ["lmpool_texts"],
        model_args={
            "base_url": f"{tiny_gateway.base_url}/v1/chat/completions",
            "model": tiny_pool.pool,
        },
        apply_chat_template=True,
    )
    stops = ["\n\n", ".", " list of the", "("]  # it sends four
    for sample in found["samples"]["lmpool_texts"]:
        (message,) = json.loads(sample["arguments"][0][0].prompt)
        ids = tiny_pool.encode(f"[user] {message['content']}\n[assistant]", bos=False)
        drawn = tiny_pool.sync.generate(ids, 24, 0.0).text_ids.tolist()
        text = tiny_pool.tokenizer.decode(drawn, skip_special_tokens=True)
        ends = [text.index(stop) for stop in stops if stop in text]
        assert flat(sample["resps"]) == [text[: min(ends, default=len(text))]]
