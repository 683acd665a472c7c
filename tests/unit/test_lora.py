"""Folders of LoRA adapters as PEFT writes them, good and bad, without an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors")

from safetensors.numpy import load_file, save_file

from lmpool.backends.lora import Lora, mistaken, read_lora
from lmpool.errors import AdapterError
from lmpool.tensor_files import ModelTensors, StoredTensor, stored_tensors, write_tensors

BACKTRACKING = r"^(([a-z_.0-9])+)+!"
"""A pattern that `re` would try for ages on the name of a module."""


Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"


def pair(module: str, rank: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    return {
        f"base_model.model.{module}.lora_A.weight": np.ones((rank, 6), np.float32),
        f"base_model.model.{module}.lora_B.weight": np.ones((5, rank), np.float32),
    }


def write(
    folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]] | None = None, **config: Any
) -> Path:
    tensors = {**pair(Q), **pair(V)} if tensors is None else tensors
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_modules_ranks_and_scales_follow_from_the_matrices(tmp_path: Path) -> None:
    tensors = {**pair(Q, 2), **pair(V), **pair("lm_head", 7)}
    found = read_lora(
        write(
            tmp_path,
            tensors,
            rank_pattern={"q_proj": 2, "^lm_head$": 7},
            alpha_pattern={r"layers\.1\.self_attn\.v_proj": 2, "k_proj": 5},
        )
    )
    assert {m: (p.rank, p.scale) for m, p in found.pairs.items()} == {
        Q: (2, 4.0),
        V: (4, 0.5),
        "lm_head": (7, 8 / 7),
    }
    assert found.explicit()["r"] in {2, 4, 7}


def test_the_scale_of_rank_stabilized_lora(tmp_path: Path) -> None:
    found = read_lora(write(tmp_path, use_rslora=True))
    assert found.pairs[Q].scale == 4.0


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": BACKTRACKING},
        {"exclude_modules": BACKTRACKING},
        {"rank_pattern": {BACKTRACKING: 9}},
        {"layers_to_transform": [0, 1], "layers_pattern": BACKTRACKING, "target_modules": ["proj"]},
    ],
)
def test_no_pattern_is_run(tmp_path: Path, config: dict[str, Any]) -> None:
    if config.get("target_modules") == ["proj"]:
        config = {**config, "target_modules": ["q_proj", "v_proj"]}
    assert read_lora(write(tmp_path, **config)).pairs.keys() == {Q, V}


NAMES = (
    "lm_head", "model.embed_tokens", "h.0.attn.c_proj", "h.1.c_proj",
    *(f"model.layers.{n}.{part}" for n in range(3) for part in ("q_proj", "mlp.experts.1.w1")),
)  # fmt: skip


def test_the_modules_that_are_asked_for_are_those_of_peft() -> None:
    """By lists of names, whole ones and ends, and by layers."""
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    dice = random.Random(0)
    ends = sorted({".".join(name.split(".")[-n:]) for name in NAMES for n in (1, 2, 3, 9)})
    for _ in range(400):
        config = {
            "target_modules": dice.sample(ends, dice.randint(1, 4)),
            "exclude_modules": dice.choice([None, [], dice.sample(ends, 2)]),
            "layers_to_transform": dice.choice([None, 0, 1, [], [0], [1, 2]]),
        }
        theirs = peft.LoraConfig(**config)
        lora = Lora(Path(), config, {}, {})
        for name in NAMES:
            asked = check_target_module_exists(theirs, name) is True
            assert lora.asks_for(name) is asked, (name, config)


def test_what_only_a_pattern_would_tell_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, alpha_pattern={BACKTRACKING: 9})
    with pytest.raises(AdapterError, match=r"alpha_pattern=.*v_proj|alpha_pattern=.*q_proj"):
        read_lora(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"modules_to_save": [], "target_parameters": [], "eva_config": {}, "exclude_modules": []},
        {"layers_to_transform": [], "rank_pattern": None, "bias": "none"},
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
    ],
)
def test_empty_lists_mean_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    assert len(read_lora(write(tmp_path, **config)).pairs) == 2


def halved(half: str) -> dict[str, np.ndarray[Any, Any]]:
    return {name: t for name, t in pair(Q).items() if f"lora_{half}" in name}


def without_rank() -> dict[str, np.ndarray[Any, Any]]:
    return {name: t[:0] if "lora_A" in name else t[:, :0] for name, t in pair(Q).items()}


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({}, {}, "is empty"),
        ({"base_model.model.lm_head.weight": np.ones((3, 3))}, {}, "is empty"),
        (halved("A"), {}, "lora A of '.*q_proj' without lora B"),
        (halved("B"), {}, "lora B of '.*q_proj' without lora A"),
        (without_rank(), {}, r"A of shape \(0, 6\)"),
        ({n: t * np.nan for n, t in pair(Q).items()}, {}, "q_proj.* no finite numbers"),
        ({n: t.astype(np.int8) for n, t in pair(Q).items()}, {}, "no finite numbers"),
        ({**pair(Q), f"{Q}.lora_magnitude_vector": np.ones(5)}, {}, "lora_magnitude_vector"),
        (None, {"target_modules": ["q_proj"]}, "v_proj.* do not name that module"),
        (None, {"target_modules": ["proj"]}, "do not name that module"),
        (None, {"target_modules": [3]}, "target_modules=.3.: a list of names"),
        (None, {"exclude_modules": ["q_proj"], "target_modules": ["q_proj"]}, "do not name"),
        (
            None,
            {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0},
            r"layers\.1.*do not name",
        ),
        (None, {"r": 5}, "a rank of 5 is expected of r=5"),
        (None, {"r": True}, "a rank of True"),
        (None, {"lora_alpha": "8"}, "lora_alpha of '8'"),
        (None, {"rank_pattern": [4]}, "rank_pattern=.4.: an object"),
        (None, {"modules_to_save": ["lm_head"]}, "modules_to_save="),
        (None, {"use_dora": True}, "use_dora=True: only plain LoRA"),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None,
    config: dict[str, Any],
    said: str,
) -> None:
    folder = write(tmp_path, tensors, **config)
    with pytest.raises(AdapterError, match=said) as error:
        read_lora(folder)
    assert str(folder) in str(error.value)


def test_saved_tensors_of_the_model(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    adapter.mkdir()
    embedding = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    save_file({"model.embed_tokens.weight": embedding}, model / "model.safetensors")
    saved = {
        "base_model.model.model.embed_tokens.weight": embedding,
        "base_model.model.lm_head.base_layer.weight": embedding.astype(np.float16),
    }
    same = ModelTensors(model).same
    read_lora(write(adapter, {**pair("lm_head"), **saved})).check_saved(same)
    saved["base_model.model.lm_head.base_layer.weight"] = embedding + np.float32(0.1)
    found = read_lora(write(adapter, {**pair("lm_head"), **saved}))
    with pytest.raises(AdapterError, match=r"holds lm_head\.weight.*save_embedding_layers=False"):
        found.check_saved(same)


def test_bfloat16_is_compared_with_the_nearest(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    wide = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    save_torch({"wide": wide, "narrow": wide.bfloat16()}, tmp_path / "t.safetensors")
    found = stored_tensors(tmp_path / "t.safetensors", AdapterError)
    assert found["wide"].equals(found["narrow"])
    assert found["narrow"].equals(found["wide"])
    assert not _doubled(tmp_path, wide).equals(found["wide"])


def _doubled(folder: Path, tensor: Any) -> StoredTensor:
    from safetensors.torch import save_file as save_torch

    save_torch({"other": tensor.half() * 2}, folder / "other.safetensors")
    return stored_tensors(folder / "other.safetensors", AdapterError)["other"]


def test_tensors_are_written_under_other_names(tmp_path: Path) -> None:
    found = read_lora(write(tmp_path))
    write_tensors(tmp_path / "t.safetensors", {"x": found.pairs[Q].a, "y": found.pairs[V].b})
    again = load_file(tmp_path / "t.safetensors")
    assert {name: t.shape for name, t in again.items()} == {"x": (4, 6), "y": (5, 4)}
    assert all((t == 1).all() for t in again.values())


def test_names_that_end_like_another() -> None:
    names = ["a.b", "x.a.b", "b", "a.b.c", "xa.b"]
    assert mistaken(["a.b"], names) == ["x.a.b"]
