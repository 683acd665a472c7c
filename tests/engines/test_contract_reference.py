"""The contract's reference against PEFT, for all that an adapter may be made of."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from lmpool.backends.contract import Reference, write_adapter
from lmpool.backends.contract.wants import References
from lmpool.wants import (
    Draw,
    Generate,
    HeadPart,
    Hidden,
    Row,
    Score,
    Stream,
    Tokens,
    Top,
    Want,
)
from tests.support.models import save_model

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

PROMPTS = [[5, 9, 11], [7], [3, 3, 3, 12], [200, 100]]
SAMPLES: list[Want] = [
    Row(), Top(), Tokens([1]), Score(), Draw(), Generate(1), Stream(1), Hidden(), HeadPart(0),
]  # fmt: skip
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "rslora": {"target_modules": LINEAR, "use_rslora": True, "r": 6},
    "patterns": {
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 5},
        "alpha_pattern": {"v_proj": 3, r"model\.layers\.0\..*": 20},
    },
    "the head": {"target_modules": ["lm_head", "q_proj"]},
    "the embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "a bias of the adapter": {"target_modules": ["c_attn"], "lora_bias": True},
    "the model's biases": {"target_modules": ["c_attn", "c_fc"], "bias": "all"},
    "biases of its layers": {"target_modules": ["c_attn"], "bias": "lora_only"},
    "layers of GPT-2": {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
    "a module that was trained": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_adapters_are_as_peft_computes_them(case: str, tmp_path: Path) -> None:
    """A head or an embedding that the model ties to the other is changed alone."""
    options = CASES[case]
    name = "gpt2" if "c_attn" in options["target_modules"] else "llama"
    tied = {"tie_word_embeddings": True}
    folder = str(save_model(tmp_path / "model", name, num_hidden_layers=2, **tied))
    reference = Reference(folder)
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **options})
    model = peft.get_peft_model(copy.deepcopy(reference.model), config).eval()
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    adapter = str(tmp_path / "adapter")
    model.save_pretrained(adapter)
    # As it is loaded: PEFT sorts patterns when it writes them, and the first that fits counts.
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(reference.model), adapter).eval()
    with torch.no_grad():
        logits = [loaded(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    right = torch.log_softmax(torch.stack(logits), -1).numpy()
    base = reference.rows(PROMPTS)
    rows = reference.rows(PROMPTS, adapter)
    assert np.abs(rows - base).max() > 0.05, "an adapter that does nothing"
    assert np.abs(rows - right).max() < 5e-5
    assert np.array_equal(reference.rows([[1, 2]]), Reference(folder).rows([[1, 2]]))


def test_more_than_matrices_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, "tiny", seed=1)
    files = importlib.import_module("safetensors.numpy")
    weights = tmp_path / "adapter_model.safetensors"
    strange = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    files.save_file({**files.load_file(weights), strange: np.ones(3, np.float32)}, weights)
    with pytest.raises(ValueError, match="lora_magnitude_vector"):
        Reference.of("tiny").rows([[1]], folder)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head", "q_proj"]])
def test_adapters_to_test_with_are_of_any_layer(tmp_path: Path, targets: list[str]) -> None:
    folder = write_adapter(tmp_path, "tiny", seed=1, targets=targets)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == targets
    moved = Reference.of("tiny").rows([[1, 2]], folder) - Reference.of("tiny").rows([[1, 2]])
    assert 0.05 < np.abs(moved).max() < 20


def test_the_model_is_bare_whatever_was_asked_before(tmp_path: Path) -> None:
    reference = Reference(str(save_model(tmp_path / "model", "llama", num_hidden_layers=1)))
    bare = {name: value.clone() for name, value in reference.model.state_dict().items()}
    folder = write_adapter(tmp_path / "adapter", str(tmp_path / "model"), seed=1)
    reference.rows([[1, 2]], folder)
    assert all(torch.equal(bare[name], v) for name, v in reference.model.state_dict().items())


def test_every_want_has_its_reference() -> None:
    """What the type checker sees as well: `References.of` knows each."""
    references = References()
    assert [type(want) for want in SAMPLES] == [*get_args(Want)], "add a sample of the new want"
    known = {references.of(want) for want in SAMPLES[1:]}
    assert known == {*references.others(), *references.of_states(), *references.of_rows()}
