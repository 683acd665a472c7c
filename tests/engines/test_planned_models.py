"""What a plan says of a model is so of the model that transformers makes of its config.json."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from lmpool.backends.hf.packed import LayerShape
from lmpool.backends.hf.packed_fit import _slots
from lmpool.backends.hf.packed_layout import RESERVED_SLOTS
from lmpool.plan import Demand, PlannedModel, plan, read_model
from lmpool.plan.weights import MATRICES, TIED
from tests.families.small import FAMILIES, Limits, small_configuration

transformers: Any = importlib.import_module("transformers")

LIMITS: Final = Limits(window=40, selected=12, original=64, longest=130)
TOKENS: Final = 9
UNSAID: Final = ("tie_word_embeddings", "multi_query", "new_decoder_architecture")
"""What a config.json may leave out where it is as the model type has it."""


def read_of(config: Any, folder: Path) -> tuple[PlannedModel, PlannedModel]:
    """What a plan reads of a config as it is saved, and where nothing usual is said."""
    config.save_pretrained(folder)
    file = folder / "config.json"
    said = {**json.loads(file.read_text()), "dtype": "float32"}
    usual = type(config)()
    short = {
        name: it
        for name, it in said.items()
        if name not in UNSAID or it != getattr(usual, name, None)
    }
    if "multi_query" in said:
        short.pop("num_key_value_heads", None)  # which transformers adds
    found = []
    for fields in (said, short):
        file.write_text(json.dumps(fields))
        found.append(read_model(str(file)))
    return found[0], found[1]


def made(config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def state_bytes(model: Any) -> float | None:
    """Of the keys and values of a token in its cache; None where it keeps none."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        try:
            found = model(input_ids=torch.arange(1, 1 + TOKENS)[None], use_cache=True)
        except Exception:  # it takes more than tokens
            return None
    layers = getattr(found.get("past_key_values"), "layers", None)
    if layers is None:
        return None
    kept = [getattr(layer, part, None) for layer in layers for part in ("keys", "values")]
    return sum(part.numel() * part.element_size() for part in kept if part is not None) / TOKENS


def check(config: Any, folder: Path) -> PlannedModel:
    """That a plan says of this model what is so, or that it does not know."""
    said, short = read_of(config, folder)
    assert (short.state_bytes, short.weights_bytes) == (said.state_bytes, said.weights_bytes)
    model = made(config)
    if said.weights_bytes is not None:
        numbers = sum(it.numel() for it in model.parameters())
        assert said.weights_bytes == pytest.approx(4 * numbers, rel=0.03)
    kept = state_bytes(model)
    if said.state_bytes is not None and kept is not None:
        assert said.state_bytes == kept
    whys = " ".join(said.unknown)
    assert (said.state_bytes is None) == ("keys and values" in whys)
    assert (said.weights_bytes is None) == ("bytes of the weights" in whys)
    return said


PROMPT_BESIDE: Final = {"cpmant"}
"""It puts tokens of its own before a prompt."""


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - PROMPT_BESIDE))
def test_of_each_family_a_plan_is_right_or_says_that_it_does_not_know(
    model_type: str, tmp_path: Path
) -> None:
    try:
        config = small_configuration(model_type, LIMITS)
        made(config)
        config.save_pretrained(tmp_path)
        type(config)()
    except Exception as error:
        pytest.skip(f"cannot be built small: {type(error).__name__}")
    found = check(config, tmp_path)
    assert (found.weights_bytes is not None) == (model_type in MATRICES)


SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "heads"),
    [
        ("falcon", {"multi_query": True}, 1),
        ("falcon", {"multi_query": False}, 8),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, None),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}, None),
        ("gpt_bigcode", {"multi_query": True}, 1),
        ("gpt_bigcode", {"multi_query": False, "n_head": 8}, 8),
        ("llama", {"num_key_value_heads": 2, "intermediate_size": 128}, 2),
    ],
)
def test_heads_of_keys_and_values_are_those_of_the_cache(
    model_type: str, fields: dict[str, Any], heads: int | None, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(
        model_type, **SIZES, **fields, bos_token_id=1, eos_token_id=2
    )
    found = check(config, tmp_path)
    assert found.state_bytes == (None if heads is None else 2 * 3 * heads * 8 * 4)


@pytest.mark.parametrize("model_type", sorted(MATRICES))
def test_what_is_tied_by_default_is_known(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    usual = transformers.AutoConfig.for_model(model_type)
    assert usual.tie_word_embeddings == (model_type in TIED)


@pytest.mark.parametrize(("layers", "gib"), [(32, 80), (32, 24), (1, 80)])
def test_states_of_hf_are_those_that_it_has_places_for(
    layers: int, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, heads, dim = 1 << 34, 8, 128
    model = PlannedModel("m", 1000, "bfloat16", None, layers, heads, dim, weights)
    kept = plan(Demand(model, 1.0, gpu_memory=gib << 30, engine="hf"))["gpu_states"].value
    free = (gib << 30) - weights
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, gib << 30))
    shapes = [LayerShape(heads, dim, dim, torch.bfloat16)] * layers
    assert kept == _slots(shapes, torch.device("cuda"), None) + RESERVED_SLOTS
