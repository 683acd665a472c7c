"""What SGLang is told of config.json, and what it computes otherwise whatever it is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lmpool.backends.model_config import ModelConfig  # noqa: E402
from lmpool.backends.sglang.faithful import OTHERS, check, told  # noqa: E402
from lmpool.errors import SettingsError  # noqa: E402


def told_of(folder: Path, **config: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return told(ModelConfig(folder))


@pytest.mark.parametrize(("model_type", "window"), [("cohere2", 39), ("gemma2", None)])
def test_a_window_that_sglang_counts_otherwise(
    tmp_path: Path, model_type: str, window: int | None
) -> None:
    config = {"model_type": model_type, "sliding_window": 40}
    expected = {} if window is None else {"sliding_window": window}
    assert told_of(tmp_path, **config) == expected
    assert told_of(tmp_path, **config, layer_types=["full_attention"]) == {}


_ORIGINAL = {"original_max_position_embeddings": 40}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, **_ORIGINAL}
_LONG = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0], "long_factor": [2.0]}
_OWN = 1.138629436111989
"""What SGLang scales queries and keys by for a yarn of 4: 0.1 ln 4 + 1."""


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        (_YARN, None),
        ({**_YARN, "attention_factor": 2 * _OWN}, 2.0),
        ({**_YARN, "attention_factor": 2 * _OWN, "mscale": 1.0}, 2.0),
        ({**_YARN, "attention_factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 2.0),
        ({**_YARN, "attention_factor": 1.5, "factor": 1.0}, 1.5),
        ({**_YARN, "attention_factor": 1.5, "factor": None}, None),
    ],
)
def test_the_scale_of_yarn_by_the_name_that_sglang_reads(
    tmp_path: Path, rope: dict[str, Any], scale: float | None
) -> None:
    found = told_of(tmp_path, rope_parameters=rope)
    if scale is None:
        assert found == {}
    else:
        assert found["rope_parameters"].pop("attn_factor") == pytest.approx(scale)
        assert found == {"rope_parameters": rope}


def test_the_scale_of_longrope_is_named(tmp_path: Path) -> None:
    named = {"short_mscale": 1.5, "long_mscale": 1.5}
    rope = {**_LONG, **_ORIGINAL, "attention_factor": 1.5}
    assert told_of(tmp_path, rope_parameters=rope) == {"rope_parameters": {**rope, **named}}
    # As it was before transformers 5, and is in Phi-3.
    before = {k: v for k, v in rope.items() if k not in {"rope_theta", "rope_type", *_ORIGINAL}}
    config = {"rope_scaling": {**before, "type": "su"}, "rope_theta": 500.0, **_ORIGINAL}
    assert told_of(tmp_path, **config) == {"rope_parameters": {**rope, **named}}


def test_a_family_that_is_read_as_before_transformers_5(tmp_path: Path) -> None:
    kinds = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 7.0}}
    found = told_of(tmp_path, model_type="olmo3", rope_parameters=kinds)
    assert found["rope_theta"] == 7.0
    assert told_of(tmp_path, model_type="llama", rope_parameters=kinds) == {}


@pytest.mark.parametrize("whole", [True, False])
def test_a_head_is_tied_by_the_whole_of_a_model(tmp_path: Path, whole: bool) -> None:
    name = "tie_word_embeddings"
    found = told_of(tmp_path, **{name: whole}, text_config={name: not whole})
    assert found == {"text_config": {name: whole}}
    assert told_of(tmp_path, **{name: whole}, text_config={name: whole}) == {}
    assert told_of(tmp_path, text_config={name: whole}) == {}
    assert told_of(tmp_path, **{name: whole}) == {}


def model_of(name: str, **parts: Any) -> Any:
    model = type(name, (torch.nn.Module,), {})()
    for part, value in parts.items():
        setattr(model, part, value)
    return model


def text_of(**fields: Any) -> Any:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": {}}
    return SimpleNamespace(**{**sizes, **fields})


@pytest.mark.parametrize(("name", "field"), [(n, f) for n in OTHERS for f in OTHERS[n]])
def test_what_is_computed_otherwise_is_refused_by_name_and_value(name: str, field: str) -> None:
    same = OTHERS[name][field]
    value = same(text_of()) if callable(same) else same[0] if isinstance(same, tuple) else same
    check(model_of(name), text_of(**{field: value}), {})
    check(model_of(name), text_of(), {})
    other: Any = {"mscale_all_dim": 1.0} if field == "rope_parameters" else "other"
    with pytest.raises(SettingsError, match=rf"SGLang's {name} computes otherwise for {field}="):
        check(model_of(name), text_of(**{field: other}), {})
    # And as a part of another.
    with pytest.raises(SettingsError, match=rf"SGLang's Whole computes otherwise for {field}="):
        check(model_of("Whole", part=model_of(name)), text_of(**{field: other}), {})


def test_a_bias_of_the_head_is_refused() -> None:
    head = torch.nn.Linear(4, 4)
    with pytest.raises(SettingsError, match=r"Any leaves out the bias .* \(lm_head\.bias\)"):
        check(model_of("Any", lm_head=head), text_of(), {})
    with torch.no_grad():
        head.bias.zero_()
    check(model_of("Any", lm_head=head), text_of(), {})


def turning(theta: float, part: float = 1.0, scale: float = 1.0) -> Any:
    """A layer of SGLang's that rotates heads of 16 numbers."""
    dims = int(16 * part)
    speeds = theta ** -(torch.arange(0, dims, 2).float() / dims)
    angles = torch.arange(96)[:, None] * speeds
    cache = torch.cat([angles.cos(), angles.sin()], -1) * scale
    attends = model_of("RadixAttention")
    return model_of("Attention", rotary=model_of("Rotary", cos_sin_cache=cache), attn=attends)


@pytest.mark.parametrize(
    ("kinds", "right"),
    [
        ([], True),
        ([turning(500.0)], True),
        ([turning(600.0)], False),
        ([turning(500.0, part=0.5)], False),
        ([turning(500.0, scale=1.1)], False),
        ([turning(500.0), turning(600.0)], False),
    ],
    ids=["none", "alike", "faster", "in part", "scaled", "beside another"],
)
def test_what_turns_otherwise_is_refused(kinds: list[Any], right: bool) -> None:
    pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_parameters": rope,
    }
    pictures = turning(700.0)
    del pictures.attn
    model = model_of("Any", layers=torch.nn.ModuleList([*kinds, pictures]))
    text = text_of(rope_parameters=rope)
    check(model, text, {**config, "model_type": "nobody's"})
    if right:
        check(model, text, config)
        return
    with pytest.raises(SettingsError, match=r"Any places tokens .* rope_parameters=.*500\.0"):
        check(model, text, config)


def test_each_kind_of_layers_turns_as_it_does_in_the_model() -> None:
    pytest.importorskip("transformers")
    kinds = {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in {"full_attention": 500.0, "sliding_attention": 70.0}.items()
    }
    config = {"model_type": "gemma3_text", "head_dim": 16, "rope_parameters": kinds}
    both = torch.nn.ModuleList([turning(500.0), turning(70.0)])
    check(model_of("Any", layers=both), text_of(), config)
    # SGLang's Gemma 3 has them twice, and turns by those that it made as transformers does.
    speeds = [theta ** -(torch.arange(0, 16, 2) / 16) for theta in (500.0, 70.0)]
    used = [model_of("Rotary", inv_freq=torch.nn.Buffer(s), attention_scaling=1.0) for s in speeds]
    scaled = torch.nn.ModuleList([turning(600.0), *used])
    check(model_of("Any", layers=scaled), text_of(), config)
    used[0].attention_scaling = 1.1
    with pytest.raises(SettingsError, match="places tokens otherwise"):
        check(model_of("Any", layers=scaled), text_of(), config)
    with pytest.raises(SettingsError, match="places tokens otherwise"):
        check(model_of("Any", layers=both[:1]), text_of(), config)
