"""Hidden states and heads of the SGLang engine, against what it says of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("sglang")

from lmpool.backends import Request
from lmpool.backends.contract import ask, write_adapter
from lmpool.backends.contract.heads import read_head
from lmpool.backends.sglang import SGLangEngine
from lmpool.wants import HeadPart, Hidden, Row, Score, Top
from tests.support.engines import requests_of, rows_of
from tests.support.models import save_model
from tests.support.sglang_engine import SMALL, WARNINGS
from tests.support.states import check_states, states_of

pytestmark = [pytest.mark.engine, *WARNINGS]

F32 = npt.NDArray[np.float32]

# By name: its configuration, and the scale and the cap that are found.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[float, float | None]]] = {
    "untied": ("llama", {"tie_word_embeddings": False}, (1.0, None)),
    "tied": ("llama", {"tie_word_embeddings": True}, (1.0, None)),
    "cap": (
        "gemma2",
        {"final_logit_softcapping": 5.0, "hidden_act": "gelu_pytorch_tanh"},
        (1.0, 5.0),
    ),
}


@pytest.fixture
def opened() -> Iterator[list[SGLangEngine]]:
    """Engines to close, for a process has one at a time."""
    engines: list[SGLangEngine] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_every_kind(name: str, tmp_path: Path, opened: list[SGLangEngine]) -> None:
    kind, changes, (scale, cap) = MODELS[name]
    engine = SGLangEngine(save_model(tmp_path, kind, hidden=64, **changes))
    opened.append(engine)
    form = engine.info.head
    assert form is not None, engine.info.no_head
    assert (form.scale, form.cap, form.numbers) == (scale, cap, "f32")
    check_states(engine)


def test_half_precision(opened: list[SGLangEngine]) -> None:
    engine = SGLangEngine("tiny", dtype="bfloat16")
    opened.append(engine)
    assert engine.info.head is not None, engine.info.no_head
    assert engine.info.head.numbers == "bf16"
    check_states(engine, 0.3)


def test_states_however_they_are_scheduled(opened: list[SGLangEngine]) -> None:
    """Beside rows, texts and answers, cached and not, in pieces."""
    engine = SGLangEngine("tiny", **SMALL)
    opened.append(engine)
    head = read_head(engine)
    assert head is not None
    random = np.random.default_rng(0)
    shared = random.integers(3, 2000, 40)
    given = [np.append(shared, random.integers(3, 2000, n)) for n in (1, 5, 30, 90)]
    given += [random.integers(3, 2000, n) for n in (1, 60, 150)]
    right = rows_of(engine, given)
    wants = [Hidden(), Row(), Top(3), Hidden(), Score(1)]
    asked = [
        Request(b"%d %d" % (number, place), prompt.astype(np.uint32), None, want)
        for number, prompt in enumerate(given)
        for place, want in enumerate(wants)
        if prompt.size > 1 or not isinstance(want, Score)
    ]
    for _ in range(2):
        for request, outcome in zip(asked, ask(engine, asked), strict=True):
            assert outcome.error is None, outcome.error
            if isinstance(request.want, Hidden):
                made = head.logprobs(np.asarray(outcome.answer)[None])[0]
                row = right[int(request.id.split()[0])]
                np.testing.assert_allclose(made, row, atol=1e-4)
        engine.clear_cache()


def test_adapters_of_the_trunk_and_of_the_head(tmp_path: Path, opened: list[SGLangEngine]) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "lm_head"]
    engine = SGLangEngine("tiny", max_loras=3, lora_targets=targets)
    opened.append(engine)
    trunk = write_adapter(tmp_path / "trunk", seed=1, targets=("q_proj", "v_proj"))
    engine.add_adapter("trunk", trunk)
    engine.add_adapter("head", write_adapter(tmp_path / "head", seed=2, targets=("lm_head",)))
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


def test_a_state_that_overflows_fails_alone(tmp_path: Path, opened: list[SGLangEngine]) -> None:
    import torch
    import transformers

    folder = save_model(tmp_path, "llama", hidden=64, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    model.save_pretrained(folder)
    engine = SGLangEngine(folder)
    opened.append(engine)
    for _ in range(2):
        outcomes = ask(engine, requests_of([[5, 9], [7], [5, 7], [3]], want=Hidden()))
        assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
        assert all("overflows" in str(o.error) for o in outcomes if o.error is not None)


def test_a_model_that_does_more_than_its_head_is_refused(
    monkeypatch: pytest.MonkeyPatch, opened: list[SGLangEngine]
) -> None:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessor

    compute = LogitsProcessor._get_logits

    def shifting(self: Any, *given: Any, **named: Any) -> Any:
        logits = compute(self, *given, **named)
        return logits + torch.linspace(0, 1, logits.shape[1])

    monkeypatch.setattr(LogitsProcessor, "_get_logits", shifting)
    engine = SGLangEngine("tiny")
    opened.append(engine)
    assert engine.info.head is None
    assert "LlamaForCausalLM: its logits differ" in engine.info.no_head
    wants = (Hidden(), HeadPart(0), Row())
    asked = [Request(b"%d" % n, np.array([1], np.uint32), None, w) for n, w in enumerate(wants)]
    hidden, part, row = ask(engine, asked)
    assert "no hidden states" in str(hidden.error)
    assert "no hidden states" in str(part.error)
    assert row.error is None
