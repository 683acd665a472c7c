"""Hidden states and heads of the vLLM engine, against what it says of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Request
from lmpool.backends.contract import Reference, ask
from lmpool.backends.contract import write_adapter as write_lora
from lmpool.backends.contract.heads import read_head
from lmpool.wants import HeadPart, Hidden, Row, Score, Top
from tests.support.engines import requests_of, rows_of
from tests.support.models import VOCAB, save_model
from tests.support.vllm_engine import (
    assert_nothing_left,
    need_vllm,
    prompts,
    spoiled_model,
    vllm_engine,
    write_adapter,
)

need_vllm()

import torch  # noqa: E402
import transformers  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
]

F32 = npt.NDArray[np.float32]
PROMPTS = [[5, 9, 11], [7], [5, 9], [5, 9, 11, 200, 3], [3] * 60, [5, 9, 11]]

# By name: its configuration, and the scale, the cap and the bias that are found.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[float, float | None, bool]]] = {
    "untied": ("llama", {"tie_word_embeddings": False}, (1.0, None, False)),
    "cap": ("gemma2", {"final_logit_softcapping": 5.0}, (1.0, 5.0, False)),
    "bias": ("phi", {}, (1.0, None, True)),
}


def states_of(engine: Any, given: Sequence[Sequence[int]], adapter: str | None) -> F32:
    found = []
    for outcome in ask(engine, requests_of(given, want=Hidden(), adapter=adapter)):
        assert outcome.error is None, outcome.error
        assert isinstance(outcome.answer, np.ndarray)
        assert outcome.answer.dtype == np.float32
        found.append(outcome.answer)
    return np.stack(found)


def check(engine: Any, within: float = 1e-4, adapter: str | None = None) -> None:
    """The engine's own head makes the rows of its states."""
    head = read_head(engine)
    assert head is not None, engine.info.no_head
    made = head.logprobs(states_of(engine, PROMPTS, adapter))
    np.testing.assert_allclose(made, rows_of(engine, PROMPTS, adapter=adapter), atol=within)


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_every_kind(name: str, tmp_path: Path) -> None:
    kind, changes, (scale, cap, bias) = MODELS[name]
    folder = save_model(tmp_path, kind, hidden=64, **changes)
    if bias:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.lm_head.bias.copy_(torch.linspace(-2, 2, VOCAB))
        model.save_pretrained(folder)
    with vllm_engine(model=folder) as engine:
        form = engine.info.head
        assert form is not None, engine.info.no_head
        assert (form.scale, form.cap, form.bias) == (scale, cap, bias)
        assert form.numbers == "f32"
        check(engine)


def test_half_precision(tmp_path: Path) -> None:
    with vllm_engine(dtype="bfloat16") as engine:
        assert engine.info.head is not None, engine.info.no_head
        assert engine.info.head.numbers == "bf16"
        check(engine, 0.3)


def test_states_however_they_are_scheduled() -> None:
    """Beside rows, texts and answers, cached and not, in pieces."""
    reference = Reference.of("tiny").model
    with vllm_engine(max_num_seqs=8, max_num_batched_tokens=64, block_size=32) as engine:
        given = [*prompts(12, 40, shared=40), *prompts(6, 150, seed=1)]
        wants = [Hidden(), Row(), Top(3), Hidden(), Score(1)]
        asked = [
            Request(b"%d %d" % (number, place), np.append(prompt, 5).astype(np.uint32), None, want)
            for number, prompt in enumerate(given)
            for place, want in enumerate(wants)
        ]
        for _ in range(2):
            for request, outcome in zip(asked, ask(engine, asked), strict=True):
                assert outcome.error is None, outcome.error
                if not isinstance(request.want, Hidden):
                    continue
                ids = torch.from_numpy(request.tokens.astype(np.int64))[None]
                with torch.inference_mode():
                    right = reference.base_model(ids).last_hidden_state[0, -1]
                np.testing.assert_allclose(np.asarray(outcome.answer), right.numpy(), atol=5e-4)
        check(engine)
        assert_nothing_left(engine)


def test_a_process_of_its_own() -> None:
    with vllm_engine(own_process=True) as engine:
        check(engine)


def test_adapters_of_the_trunk_and_of_the_head(tmp_path: Path) -> None:
    with vllm_engine(enable_lora=True, max_loras=3, max_lora_rank=16) as engine:
        engine.add_adapter("trunk", write_adapter(tmp_path / "trunk", seed=1))
        head = write_lora(tmp_path / "head", seed=2, targets=("lm_head", "q_proj"))
        engine.add_adapter("head", head)
        moved = states_of(engine, PROMPTS, "trunk") - states_of(engine, PROMPTS, None)
        assert np.abs(moved).max() > 0.1
        check(engine)
        check(engine, adapter="trunk")
        batch = [
            Request(b"1", np.array([1, 2], np.uint32), "head", Hidden()),
            Request(b"2", np.array([1, 2], np.uint32), None, Hidden()),
            Request(b"3", np.array([1, 2], np.uint32), "head", Row()),
        ]
        refused, state, row = ask(engine, batch)
        assert "'head' changes the model's head" in str(refused.error)
        assert state.error is row.error is None


def test_a_state_that_overflows_fails_alone(tmp_path: Path) -> None:
    with vllm_engine(model=spoiled_model(tmp_path / "spoiled", 7)) as engine:
        for _ in range(2):
            outcomes = ask(engine, requests_of([[5, 9], [7], [5, 7], [3]], want=Hidden()))
            assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
            assert all("overflows" in str(o.error) for o in outcomes if o.error is not None)


def refused(engine: Any, reason: str) -> None:
    assert engine.info.head is None
    assert reason in engine.info.no_head
    wants = (Hidden(), HeadPart(0), Row())
    asked = [Request(b"%d" % n, np.array([1], np.uint32), None, w) for n, w in enumerate(wants)]
    hidden, part, row = ask(engine, asked)
    assert "no hidden states" in str(hidden.error)
    assert "no hidden states" in str(part.error)
    assert row.error is None


def test_where_nothing_is_captured_there_are_none() -> None:
    with vllm_engine(capture=False) as engine:
        refused(engine, "this vLLM captures nothing")


def test_a_model_that_does_more_than_its_head_is_refused() -> None:
    compute = LogitsProcessor.forward

    def shifting(self: Any, *given: Any, **named: Any) -> Any:
        logits = compute(self, *given, **named)
        return logits + torch.linspace(0, 1, logits.shape[1])

    with patch.object(LogitsProcessor, "forward", shifting), vllm_engine() as engine:
        refused(engine, "LlamaForCausalLM: its logits differ")
        assert_nothing_left(engine)
