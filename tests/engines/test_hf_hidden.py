"""Hidden states and heads of the Hugging Face engine, against what it says of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends import Request
from lmpool.backends.contract import ask, write_adapter
from lmpool.backends.contract.heads import read_head
from lmpool.errors import PromptFailed
from lmpool.wants import HeadPart, Hidden, Row, Score, Top

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lmpool.backends.hf import HFEngine  # noqa: E402
from tests.support.engines import requests_of, rows_of  # noqa: E402
from tests.support.models import VOCAB, save_model  # noqa: E402
from tests.support.states import PROMPTS, check_states, state_in, states_of  # noqa: E402

F32 = npt.NDArray[np.float32]

# By name: its configuration, and the scale, the cap and the bias that are found.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[float, float | None, bool]]] = {
    "untied": ("llama", {"tie_word_embeddings": False}, (1.0, None, False)),
    "tied": ("llama", {"tie_word_embeddings": True}, (1.0, None, False)),
    "cap": ("gemma2", {"final_logit_softcapping": 5.0}, (1.0, 5.0, False)),
    "large cap": ("gemma2", {"final_logit_softcapping": 50.0}, (1.0, 50.0, False)),
    "bias": ("phi", {}, (1.0, None, True)),
    "unlike window": ("windowed mistral", {}, (1.0, None, False)),
    "state": ("mamba", {}, (1.0, None, False)),
}


def with_bias(folder: str) -> str:
    """The same model, its head's bias no zeros."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.linspace(-2, 2, VOCAB))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_every_kind(name: str, dtype: str, tmp_path: Path) -> None:
    kind, changes, (scale, cap, bias) = MODELS[name]
    folder = save_model(tmp_path, kind, **changes)
    options = {"max_prompt_tokens": 64} if kind == "mamba" else {}
    engine = HFEngine(with_bias(folder) if bias else folder, dtype=dtype, **options)
    form = engine.info.head
    assert form is not None, engine.info.no_head
    assert (form.scale, form.cap, form.bias) == (scale, cap, bias)
    assert form.numbers == ("f32" if dtype == "float32" else "bf16")
    check_states(engine, 1e-4 if dtype == "float32" else 0.3)
    engine.close()


@pytest.mark.parametrize(
    ("kind", "changes", "scale"),
    [
        ("CohereConfig", {"logit_scale": 0.0625}, 0.0625),
        ("GraniteConfig", {"logits_scaling": 13.0}, 1 / 13),
    ],
)
def test_logits_that_are_scaled(
    kind: str, changes: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    config = getattr(transformers, kind)(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path))
    assert engine.info.head is not None
    assert engine.info.head.scale == scale
    check_states(engine)


@pytest.mark.parametrize("positions", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "llama"])
def test_models_of_few_positions(kind: str, positions: int, tmp_path: Path) -> None:
    """No prompt that is tried is longer than the table that a model has of its positions."""
    name = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    engine = HFEngine(save_model(tmp_path, kind, **{name: positions}))
    assert engine.info.max_prompt_tokens == positions
    prompts = [list(range(5, 5 + size)) for size in range(1, positions + 1)]
    head = read_head(engine)
    assert head is not None, engine.info.no_head
    made = head.logprobs(states_of(engine, prompts))
    np.testing.assert_allclose(made, rows_of(engine, prompts), atol=1e-4)
    kept = engine.statistics()
    assert kept is not None or kind == "gpt_neo", engine.info.execution
    engine.close()


def test_states_in_company_kept_and_alone(tmp_path: Path) -> None:
    """Beside rows, scores and reduced answers, of kept prefixes, and in little memory."""
    folder = save_model(tmp_path, "llama")
    engine = HFEngine(folder)
    wants = [Hidden(), Row(), Top(3), Hidden(), Score(1)]
    asked = [
        Request(b"%d" % (number * 10 + place), np.array([*prompt, 1], np.uint32), None, want)
        for number, prompt in enumerate(PROMPTS)
        for place, want in enumerate(wants)
    ]
    small = HFEngine(folder, kv_cache_bytes=0, forward_tokens=4)
    (head,) = {read_head(e).parts[0] for e in (engine, small)}  # type: ignore[union-attr]
    assert len(head) == VOCAB * 32 * 4
    for each in (engine, small, engine):
        found = dict(zip((r.id for r in asked), ask(each, asked), strict=True))
        for request in asked:
            outcome = found[request.id]
            if isinstance(request.want, Hidden):
                alone = states_of(engine, [request.tokens.tolist()])[0]
                np.testing.assert_allclose(state_in(outcome), alone, atol=1e-4)
            else:
                assert outcome.error is None
        check_states(each)
        each.clear_cache()


def test_states_are_what_the_models_own_head_sees(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama")
    engine = HFEngine(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, state in zip(PROMPTS, states_of(engine), strict=True):
        with torch.inference_mode():
            right = model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
        np.testing.assert_allclose(state, right.numpy(), atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_the_trunk_and_of_the_head(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    engine = HFEngine(folder)
    for name, targets in (
        ("trunk", ("q_proj", "down_proj")),
        ("head", ("lm_head", "q_proj")),
        ("embeddings", ("embed_tokens",)),
    ):
        path = write_adapter(tmp_path / name, folder, seed=1, targets=targets)
        engine.add_adapter(name, path)
        moved = rows_of(engine, [[1, 2]], adapter=name) - rows_of(engine, [[1, 2]])
        assert np.abs(moved).max() > 0.01
    check_states(engine)
    check_states(engine, adapter="trunk")
    check_states(engine, adapter="embeddings")  # the head is the embedding without the adapter
    batch = [
        Request(b"1", np.array([1, 2], np.uint32), "head", Hidden()),
        Request(b"2", np.array([1, 2], np.uint32), None, Hidden()),
        Request(b"3", np.array([1, 2], np.uint32), "head", Row()),
    ]
    refused, state, row = ask(engine, batch)
    assert isinstance(refused.error, PromptFailed)
    assert "'head' changes the model's head" in str(refused.error)
    assert state.error is row.error is None
    engine.remove_adapter("head")
    check_states(engine)


def test_a_state_that_overflows_fails_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama", tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    model.save_pretrained(folder)
    engine = HFEngine(folder)
    outcomes = ask(engine, requests_of([[5, 9], [7], [5, 7], [3]], want=Hidden()))
    assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
    assert all("overflows" in str(o.error) for o in outcomes if o.error is not None)


def test_a_model_that_does_more_than_its_head_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = transformers.LlamaForCausalLM.forward

    def shifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + torch.linspace(0, 1, VOCAB)
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", shifting)
    engine = HFEngine(save_model(tmp_path, "llama"))
    assert engine.info.head is None
    assert "LlamaForCausalLM: its logits differ" in engine.info.no_head
    wants = (Hidden(), HeadPart(0), Row())
    asked = [Request(b"%d" % n, np.array([1], np.uint32), None, w) for n, w in enumerate(wants)]
    hidden, part, row = ask(engine, asked)
    assert "no hidden states: LlamaForCausalLM" in str(hidden.error)
    assert "no hidden states: LlamaForCausalLM" in str(part.error)
    assert row.error is None
