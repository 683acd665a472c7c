"""Hidden states and heads of the vLLM engine, against what it says of rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Request
from lmpool.backends.contract import Reference, ask
from lmpool.backends.contract import write_adapter as write_lora
from lmpool.wants import HeadPart, Hidden, Row, Score, Top
from tests.support.engines import requests_of
from tests.support.models import VOCAB, save_model
from tests.support.states import check_states, states_of
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

from lmpool.backends.head_fit import NoHead  # noqa: E402
from lmpool.backends.vllm.head import ModelHead  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
]

F32 = npt.NDArray[np.float32]

# By name: its configuration, and the scale, the cap and the bias that are found.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[float, float | None, bool]]] = {
    "untied": ("llama", {"tie_word_embeddings": False}, (1.0, None, False)),
    "cap": ("gemma2", {"final_logit_softcapping": 5.0}, (1.0, 5.0, False)),
    "bias": ("phi", {}, (1.0, None, True)),
}


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
        check_states(engine)


def test_half_precision(tmp_path: Path) -> None:
    with vllm_engine(dtype="bfloat16") as engine:
        assert engine.info.head is not None, engine.info.no_head
        assert engine.info.head.numbers == "bf16"
        check_states(engine, 0.3)


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
        check_states(engine)
        assert_nothing_left(engine)


def test_a_process_of_its_own() -> None:
    with vllm_engine(own_process=True) as engine:
        check_states(engine)


def test_adapters_of_the_trunk_and_of_the_head(tmp_path: Path) -> None:
    with vllm_engine(enable_lora=True, max_loras=3, max_lora_rank=16) as engine:
        engine.add_adapter("trunk", write_adapter(tmp_path / "trunk", seed=1))
        head = write_lora(tmp_path / "head", seed=2, targets=("lm_head", "q_proj"))
        engine.add_adapter("head", head)
        moved = states_of(engine, adapter="trunk") - states_of(engine)
        assert np.abs(moved).max() > 0.1
        check_states(engine)
        check_states(engine, adapter="trunk")
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


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"world_size": 2}, "tensor_parallel_size and pipeline_parallel_size part its head"),
        ({"fast": True}, "kv_sharing_fast_prefill skips states"),
    ],
)
def test_workers_that_cannot_give_them_are_not_asked(parts: dict[str, Any], reason: str) -> None:
    """Of a head in parts, as of a pipeline (of two tensor ranks: `test_vllm_parallel`)."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=dict)),
        parallel_config=SimpleNamespace(world_size=parts.get("world_size", 1)),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill="fast" in parts),
    )
    workers = SimpleNamespace()  # which has nothing to call
    with pytest.raises(NoHead, match=reason):
        ModelHead(SimpleNamespace(engine_core=workers, vllm_config=config), "an owner's secret")


def test_a_model_that_does_more_than_its_head_is_refused() -> None:
    compute = LogitsProcessor.forward

    def shifting(self: Any, *given: Any, **named: Any) -> Any:
        logits = compute(self, *given, **named)
        return logits + torch.linspace(0, 1, logits.shape[1])

    with patch.object(LogitsProcessor, "forward", shifting), vllm_engine() as engine:
        refused(engine, "LlamaForCausalLM: its logits differ")
        assert_nothing_left(engine)
