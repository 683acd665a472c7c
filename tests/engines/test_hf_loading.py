"""Folders that transformers would load as something else than what they hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from lmpool.errors import SettingsError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from lmpool.backends.contract import Reference, ask  # noqa: E402
from lmpool.backends.hf import HFEngine  # noqa: E402
from tests.support.engines import requests_of  # noqa: E402
from tests.support.hf_texts import save_adapter  # noqa: E402
from tests.support.models import save_model  # noqa: E402

Weights = dict[str, Any]
PROJECTION = "model.layers.0.self_attn.q_proj"
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


@pytest.fixture
def folder(llama: str, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(llama, tmp_path / "model")


@pytest.mark.parametrize(("named", "is_told"), [("0,1", True), ("-1", False), ("", False)])
def test_gpus_that_are_named_and_not_there_are_told(
    llama: str,
    named: str,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    HFEngine(llama).close()
    assert ("CUDA_VISIBLE_DEVICES=0,1 names GPUs" in caplog.text) == is_told
    assert ("computes on the CPU" in caplog.text) == is_told


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, **change(weights)}, file, metadata={"format": "pt"})


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def scaled(weights: Weights, dtype: Any = FP8) -> Weights:
    """The projections as they are quantized, each by one scale."""
    found: Weights = {}
    for name, weight in weights.items():
        if "proj" in name:
            scale = weight.abs().max() / 100
            found[name] = (weight / scale).to(dtype)
            found[f"{name}_scale"] = scale.reshape(1)
    return found


def test_a_quantization_that_transformers_does_not_know_is_named(folder: Path) -> None:
    change_weights(folder, scaled)
    change_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(SettingsError, match="is quantized by 'modelopt', which transformers does"):
        HFEngine(str(folder))


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("without", ["", "model."])
def test_quantized_weights_without_a_word_of_it_are_refused(
    folder: Path, dtype: Any, without: str
) -> None:
    change_weights(folder, lambda weights: scaled(weights, dtype))
    weights = {
        k.removeprefix(without): v for k, v in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"14 tensors that belong.*_proj.weight_scale for one"):
        HFEngine(str(folder))
    kept = {name: weight for name, weight in weights.items() if not name.endswith("_scale")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"are quantized .*_proj.weight is of [FI]8"):
        HFEngine(str(folder))


@pytest.mark.parametrize(
    "name",
    [
        "weight_scale_inv",
        "weight.absmax",
        "weight_quantizer._amax",
        "input_scale",
        "pre_quant_scale",
        "qzeros",
        "g_idx",
        "SCB",
        "bias",
        "lora_A.weight",
    ],
)
def test_what_belongs_to_a_weight_is_not_left_out(folder: Path, name: str) -> None:
    change_weights(folder, lambda _: {f"{PROJECTION}.{name}": torch.ones(1)})
    with pytest.raises(SettingsError, match=rf"1 tensors that belong.* {PROJECTION}.{name} for"):
        HFEngine(str(folder))


def test_what_does_not_matter_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = (
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.bias",
        "model.layers.0.self_attn.masked_bias",
        "model.layers.0.self_attn.k_scale",
        f"{PROJECTION}._extra_state",
        f"{PROJECTION}.output_scale",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.eh_proj.weight_scale_inv",
        "model.visual.blocks.0.attn.qkv.bias",
        "mtp.fc.weight",
    )
    eights = {"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2).to(FP8)}
    masks = {"model.layers.1.self_attn.bias": torch.ones(2, 2, dtype=torch.uint8)}
    plain = {n: torch.ones(2, 2) for n in names}
    plain["lm_head.weight"] = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, lambda _: {**plain, **eights, **masks})
    HFEngine(str(folder))
    assert "has no place for " in caplog.text


def test_a_failure_without_words_is_told_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    said = r"cannot be loaded: .* without words, of 'raise AssertionError' .*another engine"
    with pytest.raises(SettingsError, match=said):
        HFEngine("tiny")


def test_an_adapter_beside_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    adapter = Path(save_adapter(str(folder), tmp_path / "adapter"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, folder)
    with pytest.raises(SettingsError, match="holds an adapter beside the model"):
        HFEngine(str(folder))
    (folder / "adapter_config.json").unlink()
    HFEngine(str(folder)).add_adapter("own", str(adapter))


@pytest.mark.parametrize("kwargs", [{}, {"ignore_mismatched_sizes": True}])
def test_a_weight_of_another_shape_is_named(folder: Path, kwargs: dict[str, object]) -> None:
    change_config(folder, intermediate_size=40)
    said = r"mlp.down_proj.weight is \[32, 48\], and \[32, 40\] is expected"
    with pytest.raises(SettingsError, match=said):
        HFEngine(str(folder), model_kwargs=kwargs)


def test_what_is_wrong_with_a_config_is_said(folder: Path) -> None:
    change_config(folder, hidden_size="many")
    with pytest.raises(SettingsError, match=r"'hidden_size': TypeError: .* expected int, got str"):
        HFEngine(str(folder))


def test_soft_caps_on_attention_are_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "capped", "gemma2", attn_logit_softcapping=0.05, pad_token_id=0)
    prompts = [np.arange(3, 3 + n, dtype=np.uint32) for n in (5, 20)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        ids = [torch.from_numpy(prompt.astype(np.int64))[None] for prompt in prompts]
        rows = [model(each).logits[0, -1].log_softmax(-1).numpy() for each in ids]
    # As before transformers 5.24, which passed over them by default.
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert np.abs(Reference(folder).rows([p.tolist() for p in prompts]) - rows).max() < 1e-5
    outcomes = ask(HFEngine(folder, device="cpu"), requests_of(prompts))
    assert max(np.abs(o.logprobs() - r).max() for o, r in zip(outcomes, rows, strict=True)) < 1e-5
    with pytest.raises(SettingsError, match=r"='sdpa': it .* attn_logit_softcapping=0\.05 .*eager"):
        HFEngine(folder, device="cpu", model_kwargs={"attn_implementation": "sdpa"})
