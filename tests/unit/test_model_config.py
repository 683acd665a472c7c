"""What a model's files say, without loading the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lmpool.backends import tiny
from lmpool.backends.model_config import ModelConfig, longest_prompt, special_tokens
from lmpool.backends.model_files import ModelFiles
from lmpool.backends.model_identity import model_identity
from lmpool.backends.sglang.arguments import joined
from lmpool.cache_memory import default_cache_bytes
from lmpool.errors import SettingsError


def written(folder: Path, config: object, generation: object = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig(folder)


def test_one_object_knows_a_models_files() -> None:
    files = ModelFiles("tiny")
    assert files.folder == Path(tiny.path())
    assert files.identity() == model_identity(files.folder)
    assert files.config.longest_prompt(None) == 512
    assert files.config.dtype == "float32"
    special = files.config.special_tokens(2000)
    assert (special.bos, special.eos, special.pad) == (1, (2,), 0)
    assert "tokenizer.json" in files.tokenizer_files()


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"hidden_size": 8}, None),
        ({"sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 40}, 40),
        ({"text_config": {"model_type": "gemma2", "sliding_window": 40}}, 40),
        ({"sliding_window": 40, "layer_types": ["full_attention"] * 2}, None),
        ({"sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"]}, 40),
        ({"model_type": "qwen2", "sliding_window": 40}, None),
        ({"model_type": "qwen2", "sliding_window": 40, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 40, "use_sliding_window": True}, 40),
        (
            {
                "model_type": "qwen2", "sliding_window": 40, "use_sliding_window": True,
                "max_window_layers": 28, "num_hidden_layers": 28,
            },
            None,
        ),
    ],
)  # fmt: skip
def test_the_window_that_layers_see(
    tmp_path: Path, config: dict[str, Any], window: int | None
) -> None:
    assert written(tmp_path, config).window == window


_LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("rope", "before"),
    [
        (None, {}),
        ({"rope_type": "default"}, {}),
        (
            {"rope_theta": 500.0, "rope_type": "default"},
            {"rope_theta": 500.0, "rotary_emb_base": 500.0, "rope_scaling": None},
        ),
        (
            {"rope_theta": 500.0, "partial_rotary_factor": 0.5, **_LINEAR},
            {
                "rope_theta": 500.0, "rotary_emb_base": 500.0,
                "partial_rotary_factor": 0.5, "rotary_pct": 0.5,
                "rope_scaling": {"type": "linear", **_LINEAR},
            },
        ),
        (
            {
                "full_attention": {"rope_theta": 500.0, **_LINEAR},
                "sliding_attention": {"rope_theta": 70.0, "rope_type": "default"},
            },
            {
                "rope_theta": 500.0, "rotary_emb_base": 500.0, "rope_local_base_freq": 70.0,
                "rope_scaling": {"type": "linear", **_LINEAR},
            },
        ),
    ],
)  # fmt: skip
def test_rotary_positions_by_the_names_of_before(
    tmp_path: Path, rope: object, before: dict[str, Any]
) -> None:
    config = {"hidden_size": 8, "rope_parameters": rope}
    assert written(tmp_path, config).of_before() == before
    # What stands beside them counts for less, as transformers has it, but for this.
    assert written(tmp_path, {**config, **dict.fromkeys(before, "x")}).of_before() == (
        {} if "rope_scaling" in before else before
    )
    found = written(tmp_path, {**config, **before, "rope_scaling": None}).of_before()
    assert set(found) <= {"rope_scaling"}
    found = written(tmp_path, {"text_config": config}).of_before()
    assert found == ({"text_config": {**config, **before}} if before else {})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"hidden_size": 8}, None),
        ({"partial_rotary_factor": 0.5}, None),
        ({"rope_parameters": {"rope_theta": 1.0}}, None),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.75}}, 0.75),
        (
            {
                "rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.75},
                "partial_rotary_factor": 0.5,  # as transformers writes it of Phi
            },
            0.75,
        ),
        (
            {
                "rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.75},
                "partial_rotary_factor": 0.75,
            },
            None,
        ),
        (
            {
                "rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.75},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            None,
        ),
    ],
)
def test_the_part_of_a_head_that_is_rotated(
    tmp_path: Path, config: dict[str, Any], told: float | None
) -> None:
    expected = {} if told is None else {"partial_rotary_factor": told}
    assert written(tmp_path, config).rotary_part == expected


_HEADS = {"hidden_size": 64, "num_attention_heads": 4}
_PART = {"rope_theta": 1.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("config", "dims"),
    [
        (_HEADS, None),
        ({**_HEADS, "partial_rotary_factor": 0.5}, 8),
        ({**_HEADS, "rotary_pct": 0.25}, 4),
        ({**_HEADS, "rope_parameters": _PART, "partial_rotary_factor": 0.25}, 8),
        ({**_HEADS, "head_dim": 32, "rope_parameters": _PART}, 16),
        ({**_HEADS, "partial_rotary_factor": 1.0}, None),
        ({**_HEADS, "partial_rotary_factor": "half"}, None),
        ({**_HEADS, "rope_parameters": {"full_attention": _PART}}, None),
        ({"partial_rotary_factor": 0.5}, None),
        ({"hidden_size": 64, "num_attention_heads": 0, "partial_rotary_factor": 0.5}, None),
    ],
)
def test_how_much_of_a_head_is_rotated(
    tmp_path: Path, config: dict[str, Any], dims: int | None
) -> None:
    assert written(tmp_path, config).rotary_dims() == dims


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (_HEADS, None),
        ({"rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_theta": 1.0, **_LINEAR}}, "linear"),
        ({"rope_parameters": {"rope_theta": 1.0, **_LINEAR, "factor": 1.0}}, None),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0, **_LINEAR}}}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 1.0}}, "yarn"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, None),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, None),
        ({"rope_scaling": {"type": 5}}, None),
        ({"rope_scaling": None, "hidden_size": 8}, None),
    ],
)
def test_how_rotary_positions_are_scaled(
    tmp_path: Path, config: dict[str, Any], kind: str | None
) -> None:
    assert written(tmp_path, config).rope_scaling() == kind


_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (_HEADS, None),
        ({"rope_parameters": {"rope_theta": 500.0, **_LINEAR}}, None),
        ({"rope_parameters": _DYNAMIC}, {"rope_theta": 500.0}),
        (
            {"rope_parameters": {**_DYNAMIC, "partial_rotary_factor": 0.5}},
            {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_theta": 7.0},
            {"rope_theta": 7.0},
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, {}),
        # Hunyuan's: it scales all positions.
        ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}, None),
        ({"rope_parameters": {**_DYNAMIC, "alpha": 1000.0}}, None),
    ],
)
def test_a_scaling_that_begins_beyond_all_prompts_is_undone(
    tmp_path: Path, config: dict[str, Any], told: dict[str, Any] | None
) -> None:
    expected = {} if told is None else {"rope_parameters": {"rope_type": "default", **told}}
    assert written(tmp_path, config).undone_scaling() == expected


_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0],
    "long_factor": [2.0],
}
_ORIGINAL = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"rope_parameters": {**_LONGROPE, **_ORIGINAL}}, 63),
        ({"rope_parameters": _LONGROPE, **_ORIGINAL}, 63),
        ({"rope_scaling": {**_LONGROPE, "rope_type": "su"}, **_ORIGINAL}, 63),
        ({"rope_parameters": {**_LONGROPE, **_ORIGINAL}, "max_position_embeddings": 48}, 47),
        ({"rope_parameters": {**_LONGROPE, **_ORIGINAL, "long_factor": [1.0]}}, None),
        ({"rope_parameters": _LONGROPE}, None),
        ({"rope_parameters": {**_DYNAMIC, **_ORIGINAL}}, None),
        (_HEADS, None),
    ],
)
def test_of_two_kinds_of_longrope_the_short_one_bounds_prompts(
    tmp_path: Path, config: dict[str, Any], longest: int | None
) -> None:
    found = written(tmp_path, {"max_position_embeddings": 160, **config})
    assert found.within_longrope(None, "a library") == longest
    assert found.within_longrope(40, "a library") == 40
    if longest == 63:
        with pytest.raises(SettingsError, match=r"max_prompt_tokens=64: a library .* 63 or less"):
            found.within_longrope(64, "a library")
    elif longest is None:
        assert found.within_longrope(150, "a library") == 150


def test_numbers_without_end_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    limits = [0.0, {"__float__": "Infinity"}]
    found = written(tmp_path, {"time_step_limit": limits, "text_config": {"a": 1}})
    assert found.config["time_step_limit"] == [0.0, math.inf]
    assert found.config["a"] == 1


def test_how_fast_positions_rotate_may_stand_beside_the_rest(tmp_path: Path) -> None:
    """As transformers reads it, where ``rope_parameters`` have no ``rope_theta``."""
    found = written(tmp_path, {"rope_theta": 500.0, "rope_parameters": _LINEAR})
    assert found.rope_scaling() == "linear"
    before = found.of_before()
    assert before == {"rotary_emb_base": 500.0, "rope_scaling": {"type": "linear", **_LINEAR}}
    own = {"full_attention": {**_LINEAR, "rope_theta": 70.0}, "sliding_attention": {}}
    found = written(tmp_path, {"rope_theta": 500.0, "rope_parameters": own})
    before = found.of_before()
    assert (before["rope_theta"], before["rope_local_base_freq"]) == (70.0, 500.0)


def test_a_tokenizer_is_loaded_once_and_not_before_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    files = ModelFiles("tiny")
    assert "tokenizer" not in vars(files)
    vocabulary = files.byte_vocabulary()
    assert vocabulary is not None
    assert len(vocabulary) == 2000
    assert files.tokenizer is files.tokenizer
    written(tmp_path, {"model_type": "llama"})
    without = ModelFiles(str(tmp_path))
    assert (without.tokenizer, without.byte_vocabulary()) == (None, None)
    assert without.tokenizer_files() == {}


@pytest.mark.parametrize(
    ("bounds", "wanted", "found"),
    [
        ([512], None, 512),
        ([512], 100, 100),
        ([512], 512, 512),
        ([None, 256.0, 64], None, 256),
        ([None, 10**30], 7, 7),  # a tokenizer without a bound
        ([0, -1, "many", 9], None, 9),
    ],
)
def test_the_longest_prompt(bounds: list[object], wanted: int | None, found: int) -> None:
    assert longest_prompt(bounds, wanted) == found


@pytest.mark.parametrize(
    ("bounds", "wanted", "said"),
    [
        ([512], 513, "max_prompt_tokens=513: the model takes 512 tokens"),
        ([512], 0, "max_prompt_tokens=0: a positive integer"),
        ([512], "9", "max_prompt_tokens='9': a positive integer"),
        ([512], True, "max_prompt_tokens=True: a positive integer"),
        ([None, 10**30], None, "names no longest prompt"),
    ],
)
def test_a_longest_prompt_that_cannot_be(bounds: list[object], wanted: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        longest_prompt(bounds, wanted)


def test_special_tokens_are_those_of_the_first_file_that_knows_them(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 99},
        {"eos_token_id": [7, 2, 7, 50, None, True]},
    )
    special = config.special_tokens(40)
    assert (special.bos, special.eos, special.pad) == (3, (7, 2), None)
    assert special_tokens([], 40).eos == ()


def test_of_a_model_of_text_and_pictures_the_text_counts(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 64, "dtype": "bfloat16"}
    config = written(tmp_path, {"max_position_embeddings": 9, "text_config": text})
    assert config.longest_prompt(None) == 64
    assert config.dtype == "bfloat16"


def test_where_config_json_names_no_longest_prompt_it_is_that_of_transformers(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "rope_scaling": {"factor": 8.0}}
    config = written(tmp_path, {"model_type": "gemma3", "text_config": text})
    assert config.longest_prompt(None) == 131_072
    assert config.longest_prompt(100) == 100
    assert config.config["rope_scaling"] == {"factor": 8.0}
    with pytest.raises(SettingsError, match="the model takes 131072 tokens"):
        config.longest_prompt(131_073)
    for others in ({"model_type": "mamba2"}, {"model_type": "nobodys"}, {"vocab_size": 3}):
        with pytest.raises(SettingsError, match="names no longest prompt"):
            written(tmp_path, others).longest_prompt(None)


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SettingsError, match=r"config\.json.* no JSON"):
        ModelConfig(tmp_path)


def test_a_cache_takes_a_share_of_what_is_free() -> None:
    assert 0 < default_cache_bytes() <= 4 << 30
    assert default_cache_bytes(10 << 30) == 5 << 30
    assert default_cache_bytes(80 << 30) == 32 << 30
    assert default_cache_bytes(0) == 0


@pytest.mark.parametrize(
    ("kinds", "each"),
    [
        ("ssfssf", 3),
        ("ssfs", 3),
        ("sf", 2),
        ("fs", None),
        ("ssff", None),
        ("ffff", None),
        ("ssss", None),
        ("ccf", None),
    ],
)
def test_the_kinds_of_layers_by_the_name_of_before(
    tmp_path: Path, kinds: str, each: int | None
) -> None:
    names = {"s": "sliding_attention", "f": "full_attention", "c": "chunked_attention"}
    config = {"layer_types": [names[kind] for kind in kinds]}
    before = {} if each is None else {"sliding_window_pattern": each}
    assert written(tmp_path, config).of_before() == before
    said = {**config, "sliding_window_pattern": 6}
    assert written(tmp_path, said).of_before() == {}
    found = written(tmp_path, {"text_config": config}).of_before()
    assert found == ({"text_config": {**config, **before}} if before else {})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"hidden_activation": "gelu"}, {"hidden_act": "gelu"}),
        ({"hidden_activation": "gelu", "hidden_act": "silu"}, {}),
        ({"hidden_activation": None}, {}),
        ({"hidden_act": "silu"}, {}),
    ],
)
def test_the_activation_by_the_name_of_before(
    tmp_path: Path, config: dict[str, Any], told: dict[str, Any]
) -> None:
    assert written(tmp_path, config).activation_of_before == told


def test_changes_of_the_text_are_made_where_it_is_described(tmp_path: Path) -> None:
    change = {"partial_rotary_factor": 0.5}
    assert written(tmp_path, {"hidden_size": 8}).within_text(change) == change
    outer = written(tmp_path, {"text_config": {"hidden_size": 8}})
    assert outer.within_text(change) == {"text_config": change}
    assert outer.within_text({}) == {}


def test_what_sglang_is_told_of_the_text_is_joined_with_what_is_given() -> None:
    name = "json_model_override_args"
    own = {name: json.dumps({"text_config": {"a": 1, "b": 2}, "c": 3})}
    given = {name: json.dumps({"text_config": {"b": 4}, "c": {"d": 5}})}
    found = json.loads(joined(own, given)[name])
    assert found == {"text_config": {"a": 1, "b": 4}, "c": {"d": 5}}
