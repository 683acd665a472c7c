"""Every model that tests build: small ones of random weights, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers

VOCAB: Final = 211
LONGEST: Final = 96
WINDOW: Final = 12
"""How far layers see that do not see all."""

ORIGINAL: Final = 40
"""From how many tokens on the longrope models place them otherwise."""
FLOOR: Final = 64
"""How many positions a llama4 scales alike."""
SELECTED: Final = 8
"""How many positions the models that select them attend to."""

_LONG: Final = {"original_max_position_embeddings": ORIGINAL}
_LATENT: Final = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "index_topk": SELECTED,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "pad_token_id": 0,
}


_TWO_KINDS: Final = ["sliding_attention", "full_attention"]


def _llama_like(hidden: int, **changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3 // 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LONGEST,
    }
    return {**sizes, **changes}


def _gpt2(hidden: int, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "n_embd": hidden, "n_layer": 2, "n_head": 2}
    return transformers.GPT2Config(**{**sizes, "n_positions": LONGEST, **changes})


def _mamba(hidden: int, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    return transformers.MambaConfig(**{**sizes, **changes})


def _gpt_neo(hidden: int, **changes: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
        "max_position_embeddings": LONGEST,
    }
    return transformers.GPTNeoConfig(**{**sizes, **changes})


def _reformer(hidden: int, **changes: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "feed_forward_size": hidden,
        "attn_layers": ["local", "lsh"],
        "num_attention_heads": 2,
        "attention_head_size": hidden // 2,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [hidden // 2, hidden // 2],
        "max_position_embeddings": 256,
        "is_decoder": True,
    }
    return transformers.ReformerConfig(**{**sizes, **changes})


def _t5(hidden: int, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "d_model": hidden, "d_kv": hidden // 2, "d_ff": hidden}
    return transformers.T5Config(**{**sizes, "num_layers": 1, "num_heads": 2, **changes})


def _longrope(hidden: int) -> dict[str, Any]:
    dims = hidden // 4
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * dims,
        "long_factor": [4.0] * dims,
        "factor": 2.0,
        "original_max_position_embeddings": ORIGINAL,
    }


def _bloom(hidden: int, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "n_layer": 2, "n_head": 2}
    return transformers.BloomConfig(**{**sizes, **changes})


def _named(config: str, **own: Any) -> Callable[..., Any]:
    """A configuration in a Llama's terms; a callable among `own` is given the hidden size."""

    def make(hidden: int, **changes: Any) -> Any:
        given = {name: v(hidden) if callable(v) else v for name, v in own.items()}
        sizes = _llama_like(hidden, **{**given, **changes})
        return getattr(transformers, f"{config}Config")(**sizes)

    return make


def _half(hidden: int) -> int:
    return hidden // 2


def _same(hidden: int) -> int:
    return hidden


_MAKE: Final[dict[str, Callable[..., Any]]] = {
    "llama": _named("Llama"),
    "qwen2": _named("Qwen2"),
    "qwen3": _named("Qwen3", head_dim=_half),
    "mistral": _named("Mistral", sliding_window=None),
    "gemma": _named("Gemma", head_dim=_half),
    "glm": _named("Glm", head_dim=_half, pad_token_id=0),
    "helium": _named("Helium", head_dim=_half, pad_token_id=0),
    "mixtral": _named("Mixtral", num_local_experts=2, sliding_window=None),
    "nemotron": _named("Nemotron"),
    "qwen3_moe": _named("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "ernie4_5_moe": _named(
        "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, pad_token_id=0
    ),
    # Every second layer sees a window, and the others place no tokens.
    "cohere2": _named(
        "Cohere2", sliding_window=WINDOW, layer_types=_TWO_KINDS, logit_scale=1.0, pad_token_id=0
    ),
    "gpt2": _gpt2,
    "gpt_neox": _named("GPTNeoX", num_key_value_heads=2),
    "phi": _named("Phi", num_key_value_heads=2),
    "windowed mistral": _named("Mistral", sliding_window=WINDOW),
    # All layers but the first see no further than the window.
    "windowed qwen2": _named(
        "Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "windowed qwen3": _named(
        "Qwen3",
        head_dim=_half,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    # Every second layer sees a window; soft caps on attention and on logits, so that the head is
    # not the last thing computed.
    "gemma2": _named(
        "Gemma2",
        head_dim=_half,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    # Five layers of six see a window, with rotary positions of their own.
    "gemma3": _named("Gemma3Text", num_hidden_layers=7, head_dim=_half, sliding_window=WINDOW),
    # Queries come to rotary positions by head.
    "lfm2": _named(
        "Lfm2",
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        block_dim=_same,
        conv_dim=_same,
        block_multiple_of=1,
        block_ffn_dim_multiplier=1.0,
    ),
    "cohere": _named("Cohere"),
    # Recurrent states beside attention.
    "falcon_h1": _named(
        "FalconH1",
        head_dim=_half,
        mamba_d_ssm=256,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_state=16,
        mamba_n_groups=1,
        pad_token_id=0,
    ),
    # An activation with numbers of its own.
    "apertus": _named("Apertus", pad_token_id=0),
    "olmoe": _named("Olmoe", num_experts=2, num_experts_per_tok=1),
    "phi3": _named("Phi3", sliding_window=WINDOW, pad_token_id=0),
    "starcoder2": _named("Starcoder2", sliding_window=WINDOW),
    # Three layers of four see the chunk that they are in.
    "llama4": _named(
        "Llama4Text",
        num_hidden_layers=4,
        head_dim=_half,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
    ),
    # Rotary positions that depend on the longest prompt of a forward pass.
    "dynamic_rope": _named(
        "Llama",
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10_000.0},
    ),
    # A recurrent state and no position ids: padding on the left would be part of every prompt.
    "mamba": _mamba,
    # A causal mask of its own, by the places of keys in the cache.
    "gpt_neo": _gpt_neo,
    # Positions by the attention mask.
    "bloom": _bloom,
    "global gpt_neo": lambda hidden, **changes: _gpt_neo(
        hidden, num_layers=4, num_heads=4, attention_types=[[["global"], 4]], **changes
    ),
    "wide gpt_neo": lambda hidden, **changes: _gpt_neo(
        hidden,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=256,
        **changes,
    ),
    # Rotary positions by whether the longest prompt of a forward pass exceeds a limit.
    "longrope llama": _named("Llama", **_LONG, rope_parameters=_longrope),
    "longrope phi3": _named("Phi3", **_LONG, pad_token_id=0, rope_parameters=_longrope),
    "longrope phimoe": _named(
        "Phimoe",
        **_LONG,
        num_local_experts=4,
        rope_parameters=lambda hidden: {
            **_longrope(hidden),
            "short_mscale": 1.0,
            "long_mscale": 1.2,
        },
    ),
    # Attention scaled by a position that it counts from the length of the cache.
    "scaled llama4": _named(
        "Llama4Text",
        num_hidden_layers=4,
        head_dim=_half,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        floor_scale=FLOOR,
        attn_scale=0.5,
    ),
    # Positions are selected by a score, with exact ties.
    "deepseek_v32": _named("DeepseekV32", **_LATENT),
    "glm_moe_dsa": _named("GlmMoeDsa", **_LATENT, indexer_types=["full", "full"]),
    # Hashes at random.
    "reformer": _reformer,
    # Later tokens change earlier rows.
    "bert": _named("Bert", num_key_value_heads=2),
    "t5": _t5,
}

CONFIGURATIONS: Final = tuple(_MAKE)
"""All that there are."""

SERVED: Final = ("gpt2", "llama")
"""Models whose layers see all that is before a position; tests.families has the others."""
WINDOWED: Final = ("gemma2", "gemma3", "llama4", "windowed mistral", "windowed qwen2")
"""Models with layers that see less."""
UNFIT: Final = ("bloom", "gpt_neo", "mamba")
"""Models whose states cannot be kept and shared by position."""


def configuration(name: str, *, hidden: int = 32, **changes: Any) -> Any:
    """The configuration called `name`, of a hidden size, with `changes`."""
    return _MAKE[name](hidden, **changes)


def save_model(
    folder: Path,
    name: str,
    *,
    hidden: int = 32,
    scale: float = 3.0,
    least_dims: int = 0,
    **changes: Any,
) -> str:
    """Write a model of random weights, times `scale` so that rows differ by nats; the folder.

    Only weights of at least `least_dims` dimensions are scaled.
    """
    torch.manual_seed(0)
    config = configuration(name, hidden=hidden, **changes)
    two = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if two else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    if name != "mamba":  # whose state would overflow
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= least_dims:
                    parameter.mul_(scale)
    model.save_pretrained(folder)
    return str(folder)


def without_prefix(folder: str, prefix: str) -> str:
    """The same folder, its weights named without `prefix`."""
    from safetensors.torch import load_file, save_file

    file = Path(folder) / "model.safetensors"
    plain = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    save_file(plain, file, metadata={"format": "pt"})
    return folder
