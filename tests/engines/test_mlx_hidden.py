"""Hidden states and heads of the MLX engine, against what it says of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lmpool.backends import Request  # noqa: E402
from lmpool.backends.contract import ask, write_adapter  # noqa: E402
from lmpool.backends.mlx import MLXEngine  # noqa: E402
from lmpool.wants import HeadPart, Hidden, Row, Score, Top  # noqa: E402
from tests.support.engines import requests_of  # noqa: E402
from tests.support.models import LONGEST, VOCAB, save_model, without_prefix  # noqa: E402
from tests.support.states import PROMPTS, check_states, states_of  # noqa: E402

pytestmark = [pytest.mark.engine]

F32 = npt.NDArray[np.float32]

# By name: its configuration, and the scale, the cap and the bias that are found.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[float, float | None, bool]]] = {
    "untied": ("llama", {"tie_word_embeddings": False}, (1.0, None, False)),
    "tied": ("llama", {"tie_word_embeddings": True}, (1.0, None, False)),
    # No window that mlx-lm would have to heed.
    "cap": (
        "gemma2",
        {"final_logit_softcapping": 5.0, "sliding_window": LONGEST},
        (1.0, 5.0, False),
    ),
    "bias": ("phi", {}, (1.0, None, True)),
    "gpt2": ("gpt2", {"n_ctx": LONGEST}, (1.0, None, False)),
    "state": ("mamba", {}, (1.0, None, False)),
}


def saved(folder: Path, name: str, scale: float = 2.0) -> str:
    kind, changes, (_, _, bias) = MODELS[name]
    path = save_model(folder, kind, hidden=64, scale=scale, **changes)
    if bias:
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            model.lm_head.bias.copy_(torch.linspace(-2, 2, VOCAB))
        model.save_pretrained(path)
    return without_prefix(path, "transformer.") if kind == "gpt2" else path


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_every_kind(name: str, dtype: str, tmp_path: Path) -> None:
    scale, cap, bias = MODELS[name][2]
    wide = dtype == "float32"
    engine = MLXEngine(
        saved(tmp_path, name, 2.0 if wide else 1.0),
        dtype=dtype,
        max_prompt_tokens=LONGEST,
        forward_tokens=40,
    )
    form = engine.info.head
    assert form is not None, engine.info.no_head
    assert (form.scale, form.cap, form.bias) == (scale, cap, bias)
    assert form.numbers == ("f32" if wide else "bf16")
    check_states(engine, 2e-4 if wide else 0.3)
    engine.close()


def test_logits_that_are_scaled(tmp_path: Path) -> None:
    config = transformers.CohereConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        logit_scale=0.0625,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = MLXEngine(str(tmp_path))
    assert engine.info.head is not None, engine.info.no_head
    assert engine.info.head.scale == 0.0625
    check_states(engine)
    engine.close()


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_states_are_what_the_models_own_head_sees(cache_bytes: int, tmp_path: Path) -> None:
    """In company, of kept prefixes, and alone."""
    folder = saved(tmp_path, "untied")
    engine = MLXEngine(folder, cache_bytes=cache_bytes)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [
        Request(b"%d %d" % (number, place), np.array(prompt, np.uint32), None, want)
        for number, prompt in enumerate(PROMPTS)
        for place, want in enumerate([Hidden(), Row(), Top(3), Hidden()])
    ]
    asked.append(Request(b"text", np.array(PROMPTS[3], np.uint32), None, Score(1)))
    for _ in range(2):
        for request, outcome in zip(asked, ask(engine, asked), strict=True):
            assert outcome.error is None
            if not isinstance(request.want, Hidden):
                continue
            ids = torch.from_numpy(request.tokens.astype(np.int64))[None]
            with torch.inference_mode():
                right = model.base_model(ids).last_hidden_state[0, -1]
            np.testing.assert_allclose(np.asarray(outcome.answer), right.numpy(), atol=5e-4)
    engine.close()


def test_an_adapter_of_the_trunk(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "untied")
    engine = MLXEngine(folder)
    path = write_adapter(tmp_path / "trunk", folder, seed=1, targets=("q_proj", "down_proj"))
    engine.add_adapter("trunk", path)
    assert np.abs(states_of(engine, adapter="trunk") - states_of(engine)).max() > 0.1
    check_states(engine, adapter="trunk", within=1e-3)
    check_states(engine)
    engine.close()


def test_a_state_that_overflows_fails_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path, "untied")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    model.save_pretrained(folder)
    engine = MLXEngine(folder)
    for _ in range(2):
        outcomes = ask(engine, requests_of([[5, 9], [7], [5, 7], [3]], want=Hidden()))
        assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
        assert all("overflows" in str(o.error) for o in outcomes if o.error is not None)
    engine.close()


def refused(engine: MLXEngine, reason: str) -> None:
    assert engine.info.head is None
    assert reason in engine.info.no_head
    wants = (Hidden(), HeadPart(0), Row())
    asked = [Request(b"%d" % n, np.array([1], np.uint32), None, w) for n, w in enumerate(wants)]
    hidden, part, row = ask(engine, asked)
    assert "no hidden states" in str(hidden.error)
    assert "no hidden states" in str(part.error)
    assert row.error is None
    engine.close()


def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model, quantize_model, save_config
    from mlx_lm.utils import save_model as save_mlx

    folder = tmp_path / "small"
    folder.mkdir()
    model, config = load_model(Path(saved(tmp_path / "model", "untied")))
    model, config = quantize_model(model, config, group_size=32, bits=8)
    save_mlx(folder, model)
    save_config(config, folder / "config.json")
    refused(MLXEngine(str(folder)), "llama: its head is a QuantizedLinear")


def test_a_model_that_does_more_than_its_head_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx
    from mlx_lm.models.llama import Model

    compute = Model.__call__

    def shifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(self, *args, **kwargs) + mx.linspace(0, 1, VOCAB)

    monkeypatch.setattr(Model, "__call__", shifting)
    refused(MLXEngine(saved(tmp_path, "untied")), "llama: its logits differ")
