"""Variants of families: what a configuration may switch on that its default leaves off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.families.small import HEAD_DIM, Limits


@dataclass(frozen=True, slots=True)
class Variant:
    """A family with other fields; a callable among them is given the limits."""

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)


def _window(limits: Limits) -> int:
    return limits.window


def _original(limits: Limits) -> int:
    return limits.original


def _rope(kind: str, **own: Any) -> Callable[[Limits], dict[str, Any]]:
    """Rotary positions of this kind, which change at the limits' `original`."""

    def parameters(limits: Limits) -> dict[str, Any]:
        made = {"rope_type": kind, "rope_theta": 10_000.0, **own}
        if kind != "linear":
            made["original_max_position_embeddings"] = limits.original
        if kind == "dynamic":
            del made["original_max_position_embeddings"]
        return made

    return parameters


_LONG: Final = _rope(
    "longrope",
    factor=2.0,
    short_factor=[1.0] * (HEAD_DIM // 2),
    long_factor=[4.0] * (HEAD_DIM // 2),
)
_MSCALES: Final = {"short_mscale": 1.0, "long_mscale": 1.2}
_YARN: Final = _rope("yarn", factor=4.0)
_LLAMA3: Final = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
_DECODER: Final = {"is_decoder": True}
_ONE_STACK: Final = {"is_encoder_decoder": False, "is_decoder": True}
_SLIDING: Final = {"use_sliding_window": True, "sliding_window": _window, "max_window_layers": 1}
_UNI: Final = {"attn_type": "uni"}

_CHANGES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "windows": {
        "qwen2": _SLIDING,
        "qwen2_moe": _SLIDING,
        "qwen3": _SLIDING,
        "dots1": _SLIDING,
        "mixtral": {"sliding_window": _window},
    },
    "no window": {
        "mistral": {"sliding_window": None},
        "phi3": {"sliding_window": None},
        "starcoder2": {"sliding_window": None},
    },
    "one kind of layers": {
        "gpt_neo": {"attention_types": [[["global"], 2]]},
        "gpt_oss": {"layer_types": ["sliding_attention"] * 2},
        "gemma3_text": {"layer_types": ["sliding_attention"] * 2},
        "olmo3": {"layer_types": ["full_attention"] * 2},
    },
    "wide window": {"gpt_neo": {"window_size": 300}, "mistral": {"sliding_window": 1000}},
    "chunks": {
        "llama4_text": {
            "floor_scale": _original,
            "attn_scale": 0.5,
            "layer_types": ["chunked_attention", "full_attention"],
            "num_hidden_layers": 2,
            "no_rope_layers": [1, 0],
        }
    },
    "longrope": {
        "llama": {"rope_parameters": _LONG, "original_max_position_embeddings": _original},
        "phi3": {"rope_parameters": _LONG, "sliding_window": None},
        "phimoe": {"rope_parameters": lambda limits: {**_LONG(limits), **_MSCALES}},
        "mistral": {"rope_parameters": _LONG},
    },
    "yarn": {
        name: {"rope_parameters": _YARN} for name in ("llama", "qwen2", "qwen3", "deepseek_v3")
    },
    "llama3 rope": {"llama": {"rope_parameters": _LLAMA3}},
    "linear rope": {
        "llama": {"rope_parameters": _rope("linear", factor=4.0)},
        "gemma": {"rope_parameters": _rope("linear", factor=2.0)},
        "falcon": {"rope_parameters": _rope("linear", factor=2.0)},
    },
    "dynamic rope": {
        name: {"rope_parameters": _rope("dynamic", factor=4.0)}
        for name in ("llama", "qwen2", "gpt_neox")
    },
    "dynamic rope beyond its bound": {
        "llama": {
            "rope_parameters": lambda limits: {
                **_rope("dynamic", factor=4.0)(limits),
                "original_max_position_embeddings": limits.original,
            }
        }
    },
    "soft caps": {
        "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        "recurrent_gemma": {"logits_soft_cap": 3.0},
    },
    "scaled": {
        "cohere": {"logit_scale": 0.7, "use_qk_norm": True},
        "granite": {
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
        },
        "falcon_h1": {
            "lm_head_multiplier": 0.5,
            "key_multiplier": 0.5,
            "ssm_in_multiplier": 0.7,
            "mamba_rms_norm": True,
        },
    },
    "tied": {name: {"tie_word_embeddings": True} for name in ("llama", "qwen2", "gpt_neox")},
    "untied": {name: {"tie_word_embeddings": False} for name in ("gemma", "gpt2", "opt")},
    "biases": {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "qwen3": {"attention_bias": True},
        "olmo2": {"attention_bias": True},
    },
    "one key head": {
        "llama": {"num_key_value_heads": 1},
        "starcoder2": {"num_key_value_heads": 1},
    },
    "a key head each": {
        "gpt_bigcode": {"multi_query": False},
        "falcon": {"multi_query": False, "parallel_attn": False},
        "llama": {"num_key_value_heads": 4},
    },
    "new architecture": {"falcon": {"new_decoder_architecture": True, "num_kv_heads": 2}},
    "alibi": {"falcon": {"alibi": True}},
    "no alibi": {"mpt": {"attn_config": {"alibi": False}}},
    "parallel": {
        "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    },
    "sequential": {"gpt_neox": {"use_parallel_residual": False}},
    "normed queries": {"phi": {"qk_layernorm": True}, "persimmon": {"qk_layernorm": False}},
    "norms after": {"opt": {"do_layer_norm_before": False, "word_embed_proj_dim": 32}},
    "scaled by layer": {
        "gpt2": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    },
    "mixed": {
        "qwen3_moe": {"mlp_only_layers": [0], "decoder_sparse_step": 1},
        "qwen2_moe": {"decoder_sparse_step": 2},
        "nemotron_h": {"n_routed_experts": 4},
    },
    "groups of experts": {
        "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        "deepseek_v2": {
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
        },
    },
    "experts": {"doge": {"is_moe": True}},
    "one cache for all loops": {"dory": {"recurrent_kv_cache_mode": "last_loop"}},
    "groups of states": {"mamba2": {"n_groups": 2}},
    "no biases": {"mamba": {"use_conv_bias": False, "use_bias": False}},
    "recurrent alone": {"recurrent_gemma": {"block_types": ["recurrent"]}},
    "attention alone": {
        "granitemoehybrid": {"layer_types": ["attention"] * 2},
        "recurrent_gemma": {"block_types": ["attention"]},
    },
    "looks both ways": {
        "gemma3_text": {"use_bidirectional_attention": True},
        "big_bird": {"attention_type": "original_full"},
    },
    "one way": {"xlnet": _UNI, "xlm": {"causal": True}},
    "block sparse": {"big_bird": {"is_decoder": True, "attention_type": "block_sparse"}},
    "decoder": {
        **dict.fromkeys(
            (
                "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie",
                "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
                "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
            ),
            _DECODER,
        ),
        "big_bird": {"is_decoder": True, "attention_type": "original_full"},
        **dict.fromkeys(
            (
                "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart",
                "mvp", "pegasus", "plbart", "prophetnet", "whisper",
            ),
            _ONE_STACK,
        ),
    },
}  # fmt: skip

VARIANTS: Final[Mapping[str, Variant]] = {
    f"{model_type}: {what}": Variant(model_type, changes)
    for what, families in _CHANGES.items()
    for model_type, changes in families.items()
}
