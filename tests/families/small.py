"""Small configurations of every family that transformers knows, made from its own classes.

What a field means is told by its name, so that a family which is new to transformers builds without
a line here. `OVERRIDES` has what does not follow from names.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.families.overrides import OVERRIDES
from tests.support.models import VOCAB

# Untyped on purpose: its annotations differ from release to release.
transformers: Any = importlib.import_module("transformers")
auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
configurations: Any = importlib.import_module("transformers.models.auto.configuration_auto")

FAMILIES: Final[Mapping[str, str]] = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The class of each model type that transformers counts among the causal language models."""

HIDDEN: Final = 64
LAYERS: Final = 2
HEADS: Final = 4
HEAD_DIM: Final = 16
SMALL: Final = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a model begins to compute otherwise: how far its layers see, what it selects of that,
    where it places tokens otherwise, and its longest prompt."""

    window: int
    selected: int
    original: int
    longest: int

    @property
    def all(self) -> tuple[int, ...]:
        """In ascending order."""
        return tuple(sorted({self.window, self.selected, self.original, self.longest}))


SCALES: Final = (Limits(8, 5, 20, 44), Limits(40, 12, 64, 130), Limits(72, 33, 120, 260))

_RULES: Final[tuple[tuple[str, int | str], ...]] = (
    (r"type_vocab_size|decoder_start_token_id", "keep"),
    (r"(.*_)?vocab_size(_.*)?|encoder_hash_byte_group_vocab", VOCAB),
    (
        r"hidden_size|d_model|n_embd|emb_dim|(input_|output_)?embedding_size|backbone_hidden_size",
        HIDDEN,
    ),
    (r"block_dim|router_hidden_size", HIDDEN),
    (r".*intermediate_size.*|(.*_)?ffn_dim|dff|d_inner|n_inner|feed_forward_size|dim_ff", HIDDEN),
    (r"(expert_)?ffn_hidden_size|mamba_d_ssm", HIDDEN),
    (r"(.*_)?num_key_value_heads|num_key_value_groups|linear_num_key_heads", 2),
    (
        r"((swa|encoder|decoder|num|num_encoder|num_decoder)_)?attention_heads|n_heads?|num_heads",
        HEADS,
    ),
    (r".*num_attention_heads|linear_num_(value_)?heads|index_n_heads", HEADS),
    (r"(num_)?((hidden|encoder|decoder)_)?layers|n_layers?", LAYERS),
    (r"qk_rope_head_dim|rotary_dim", SMALL // 2),
    (r".*head_dim|dim_head|kv_channels|attention_head_size|hidden_size_per_layer_input", HEAD_DIM),
    (r".*_lora_rank|laurel_rank|hc_lowrank|gated_norm_rank|.*_embed_dim|prompt_mid_dim", SMALL),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|o_groups", 2),
    (r"n_group|topk_group|n_groups|mamba_n_?groups", 1),
    (r"(moe_num_|n_|num_)shared_experts|first_k_dense_replace|num_dense_layers", "one"),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions",
        "longest",
    ),
    (r"context_length|rel_extent|position_bias_max_distance", "longest"),
    (r"original_max_position_embeddings|floor_scale|log_scaling_n_floor", "original"),
    (
        r"(sliding|attention|keep)_window(_size)?|attention_chunk_size|window_size|local_attention",
        "window",
    ),
    (r"local_attention_window_len|.*_attn_chunk_length|block_size|(mamba_)?chunk_size", "window"),
    (r"index_topk|index_block_size", "selected"),
    (r"state_size|ssm_state_size|mamba_d_state", SMALL // 2),
    (r"(prompt_types|segment_types|prompt_length)", 4),
)
_RULE: Final = [(re.compile(pattern), value) for pattern, value in _RULES]


def small_configuration(model_type: str, limits: Limits, **changes: Any) -> Any:
    """A configuration of this model type so small that its model takes kilobytes."""
    return _small(configurations.CONFIG_MAPPING[model_type], limits, changes)


def _small(cls: Any, limits: Limits, changes: Mapping[str, Any]) -> Any:
    changes = {**OVERRIDES.get(cls.model_type, {}), **changes}
    default = _default(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    inherited = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for name in names:
        if name not in inherited or name.endswith("token_id"):
            value = _shrunk(name, defaults[name], limits)
            if value is not None:
                given[name] = value
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        given["num_key_value_heads"] = HEADS  # of a common latent state: there are no groups
    own = {n: v(limits) if callable(v) else v for n, v in changes.items() if n not in _parts(cls)}
    given |= own
    if default is not None:
        given |= _kinds(default, names, given) | own
        for name in _parts(cls):
            part = getattr(default, name, None)
            if dataclasses.is_dataclass(part):
                given[name] = _small(type(part), limits, changes.get(name, {}))
    for name in _parts(cls):
        if name not in given and name in changes:
            model_type = changes[name]["model_type"]
            own = {key: value for key, value in changes[name].items() if key != "model_type"}
            given[name] = _small(configurations.CONFIG_MAPPING[model_type], limits, own)
    return cls(**given)


def _parts(cls: Any) -> Mapping[str, Any]:
    """The configurations that are parts of this one, by name."""
    found: Mapping[str, Any] = getattr(cls, "sub_configs", {})
    return found


def _default(cls: Any) -> Any:
    try:
        return cls()
    except Exception:
        return None


_LAYER_NAMES: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_MOST_KINDS: Final = 6
_NEEDED: Final = re.compile(
    r"head_dim|num_key_value_heads|num_experts_per_tok|n_routed_experts|moe_topk|n_group|"
    r"topk_group|.*_head_dim|linear_num_.*_heads"
)
"""Fields that are shrunk although their default is nothing."""


def _shrunk(name: str, default: object, limits: Limits) -> int | None:
    if default is None and _NEEDED.fullmatch(name):
        default = 1 << 30
    if type(default) is not int:
        return None
    if re.fullmatch(r".*token_(id|index)", name):
        known = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        return None if default < VOCAB else known.get(name, VOCAB - 1)
    for pattern, value in _RULE:
        if pattern.fullmatch(name):
            match value:
                case "keep":
                    return None
                case "one":
                    return min(default, 1)
                case str():
                    return int(getattr(limits, value))
                case _:
                    return value
    return None


def _kinds(config: Any, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers of a configuration, each of them once at least, and how many layers."""
    counts = {name: _get(config, name) for name in _LAYER_NAMES if name in names}
    lists: dict[str, list[Any]] = {}
    for name in names:
        value = _get(config, name)
        if isinstance(value, list) and name not in given and len(value) in counts.values():
            kinds = [x for i, x in enumerate(value) if x not in value[:i]]
            if len(kinds) <= _MOST_KINDS:
                lists[name] = kinds
    fewest = max((given.get(name, LAYERS) for name in counts), default=LAYERS)
    layers = max([fewest, *map(len, lists.values())])
    found = {name: [kinds[i % len(kinds)] for i in range(layers)] for name, kinds in lists.items()}
    return {**dict.fromkeys(counts, layers), **found} if lists else found


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:
        return None  # one that differs from layer to layer
