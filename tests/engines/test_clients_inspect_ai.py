"""inspect_ai on a pool: what its provider tells is what the pool's own answers say."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.errors import NoWorkers, PromptError
from lmpool.wants import Generate

inspect_ai = pytest.importorskip("inspect_ai")

from inspect_ai import Task  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import (  # noqa: E402
    ChatMessageSystem,
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate  # noqa: E402
from inspect_ai.tool import ToolInfo  # noqa: E402
from inspect_ai.util import JSONSchema  # noqa: E402

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of inspect_ai and what it brings
]

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
PROMPT = "If the file does not"


@pytest.fixture(scope="module")
def pool(tiny_pool: lmpool.EmbeddedLM) -> lmpool.EmbeddedLM:
    return tiny_pool


def model_of(pool: lmpool.EmbeddedLM, **given: Any) -> Any:
    """The model as inspect_ai makes one of its name."""
    options = {"raw": True, **given}
    return get_model(f"lmpool/{pool.pool}", base_url=pool.url, memoize=False, **options)


def asked(model: Any, prompt: Any = PROMPT, **config: Any) -> Any:
    """What a model answers."""

    async def ask() -> Any:
        async with model:
            return await model.generate(prompt, config=GenerateConfig(**config))

    return asyncio.run(ask())


def test_inspect_ai_finds_the_provider_by_its_entry_point(pool: lmpool.EmbeddedLM) -> None:
    (found,) = entry_points(group="inspect_ai", name="lmpool")
    assert found.value == "lmpool.integrations.inspect_ai"
    assert type(model_of(pool).api).__name__ == "LmpoolAPI"


def test_an_answer_is_the_pools_continuation(pool: lmpool.EmbeddedLM) -> None:
    ids = pool.encode(PROMPT)
    whole = pool.sync.generate(ids, 12, 0.0, logprobs=True, top_logprobs=3)
    found = asked(model_of(pool), max_tokens=12, temperature=0.0, logprobs=True, top_logprobs=3)
    assert whole.finish_reason == "eos"
    assert found.completion == pool.decode(whole.text_ids)
    assert found.stop_reason == "stop"
    count = whole.token_ids.size
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(ids), count)
    assert found.usage.total_tokens == len(ids) + count
    (choice,) = found.choices
    vocabulary, top = pool.byte_vocab, whole.top_logprobs
    assert top is not None
    assert whole.logprobs is not None
    for at, each in enumerate(choice.logprobs.content):
        assert bytes(each.bytes) == bytes(vocabulary[whole.token_ids[at]])
        others = [o.logprob for o in each.top_logprobs]
        np.testing.assert_allclose(each.logprob, whole.logprobs[at], atol=5e-5)
        np.testing.assert_allclose(others, top.logprobs[at], atol=5e-5)
        assert [bytes(o.bytes) for o in each.top_logprobs] == [
            bytes(vocabulary[token]) for token in top.token_ids[at]
        ]
    assert len(choice.logprobs.content) == whole.text_ids.size


def test_an_answer_that_is_as_long_as_it_may_be(pool: lmpool.EmbeddedLM) -> None:
    found = asked(model_of(pool), max_tokens=3, temperature=0.0)
    assert found.stop_reason == "max_tokens"
    assert found.choices[0].logprobs is None


def test_a_text_is_cut_where_a_stop_begins_however_tokens_divide_it(
    pool: lmpool.EmbeddedLM,
) -> None:
    text = pool.decode(pool.sync.generate(pool.encode(PROMPT), 40, 0.0).token_ids)
    for at in range(3, len(text) - 3, 5):
        stop = text[at : at + 3]
        found = asked(model_of(pool), max_tokens=40, temperature=0.0, stop_seqs=[stop, "zzz"])
        assert found.completion == text[: text.index(stop)]
        assert found.stop_reason == "stop"


def test_the_prompts_log_probabilities_are_its_scores(pool: lmpool.EmbeddedLM) -> None:
    ids = pool.encode(PROMPT)
    scores = pool.sync.score(ids, top_logprobs=4)
    found = asked(model_of(pool), max_tokens=1, prompt_logprobs=4)
    content = found.choices[0].prompt_logprobs.content
    np.testing.assert_allclose([each.logprob for each in content], scores.logprobs, atol=5e-5)
    assert [each.token for each in content] == [pool.str_vocab[token] for token in ids[1:]]
    top = scores.top_logprobs
    assert top is not None
    for at, each in enumerate(content):
        others = [
            value
            for token, value in zip(top.token_ids[at], top.logprobs[at].tolist(), strict=True)
            if token != ids[at + 1]
        ]
        told = [other.logprob for other in each.top_logprobs]
        np.testing.assert_allclose(told, others, atol=5e-5)
    alone = asked(model_of(pool), max_tokens=1, prompt_logprobs=1).choices[0].prompt_logprobs
    assert all(each.top_logprobs is None for each in alone.content)


def test_several_answers_have_seeds_that_follow(pool: lmpool.EmbeddedLM) -> None:
    found = asked(model_of(pool), max_tokens=8, num_choices=3, seed=5, top_k=40, top_p=0.9)
    ids = pool.encode(PROMPT)
    wants = [Generate(8, seed=seed, top_k=40, top_p=0.9) for seed in (5, 6, 7)]
    expected = [
        pool.tokenizer.decode(each.token_ids.tolist(), skip_special_tokens=True)
        for each in (pool.sync.ask(ids, want) for want in wants)
    ]
    assert [choice.message.text for choice in found.choices] == expected
    assert len(set(expected)) > 1


def test_a_conversation_is_read_by_the_template(pool: lmpool.EmbeddedLM) -> None:
    messages = [ChatMessageSystem(content="Be brief."), ChatMessageUser(content="Return what?")]
    model = model_of(pool, raw=False, chat_template=TEMPLATE)
    found = asked(model, messages, max_tokens=6, temperature=0.0)
    prompt = "[system] Be brief.\n[user] Return what?\n[assistant]"
    ids = pool.encode(prompt, bos=False)
    assert found.usage.input_tokens == len(ids)
    assert found.completion == pool.decode(pool.sync.generate(ids, 6, 0.0).token_ids)


def test_token_ids_may_be_the_prompt(pool: lmpool.EmbeddedLM) -> None:
    message = ChatMessageUser(content="", metadata={"prompt_token_ids": [1, 5, 9]})
    found = asked(model_of(pool), [message], max_tokens=4, temperature=0.0)
    assert found.completion == pool.decode(pool.sync.generate([1, 5, 9], 4, 0.0).token_ids)
    assert found.usage.input_tokens == 3


def test_a_prompt_that_is_too_long_is_model_length(pool: lmpool.EmbeddedLM) -> None:
    found = asked(model_of(pool), "list " * 600)
    assert found.stop_reason == "model_length"
    assert "maximum context length is 512" in found.error


def test_the_end_of_the_room_is_model_length(pool: lmpool.EmbeddedLM) -> None:
    message = ChatMessageUser(content="", metadata={"prompt_token_ids": [5] * 511})
    found = asked(model_of(pool), [message], temperature=0.0)
    assert found.stop_reason in {"model_length", "stop"}


def test_without_a_template_it_says_what_to_give(pool: lmpool.EmbeddedLM) -> None:
    with pytest.raises(PromptError, match=r"chat_template=\.\.\., or have prompts taken"):
        asked(model_of(pool, raw=False))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"best_of": 3}, "best_of=3"),
        (
            {"response_schema": ResponseSchema(name="x", json_schema=JSONSchema(type="object"))},
            "response_schema",
        ),
    ],
)
def test_what_a_pool_does_not_do_is_refused(
    pool: lmpool.EmbeddedLM, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(PromptError, match=said):
        asked(model_of(pool), **config)


def test_tools_are_refused(pool: lmpool.EmbeddedLM) -> None:
    api = model_of(pool).api
    tools = [ToolInfo(name="look", description="Look.")]
    with pytest.raises(PromptError, match="1 tools"):
        asyncio.run(api.generate([ChatMessageUser(content="x")], tools, "auto", GenerateConfig()))
    assert api.should_retry(NoWorkers("none"))
    assert not api.should_retry(PromptError("bad"))
    api.close()


def test_an_evaluation_runs(pool: lmpool.EmbeddedLM, tmp_path: Path) -> None:
    starts = ["If the file does not", "Return the number of", "The class is used to"]
    expected = [pool.decode(pool.sync.generate(pool.encode(s), 5, 0.0).token_ids) for s in starts]
    task = Task(
        dataset=[Sample(s, target=e.strip()) for s, e in zip(starts, expected, strict=True)],
        solver=generate(),
        scorer=includes(),
    )
    model = model_of(pool)
    (log,) = inspect_ai.eval(
        task, model=model, max_tokens=5, temperature=0.0, logprobs=True, log_dir=str(tmp_path),
        display="none",
    )  # fmt: skip
    model.api.close()
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert [sample.output.completion for sample in log.samples] == expected
