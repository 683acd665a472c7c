"""Where SGLang computes a model otherwise than transformers has it: what it is told of config.json
so that it computes the same, and the models that are refused, as nothing helps.

All of it was found by trial of every family that both know, field by field. `OTHERS` is of the
releases in `arguments.VERSIONS`.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from lmpool.backends.model_config import ModelConfig
from lmpool.backends.rotary import name_longrope_scale
from lmpool.errors import SettingsError

_BEFORE: Final = frozenset({"cohere2"})
"""Families whose window SGLang takes for the number of tokens that are seen before one."""

_NAMES_OF_BEFORE: Final = frozenset({"olmo3"})
"""Families of whose config.json SGLang reads what it had before transformers 5, and no more."""

_GELU: Final = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast", "gelu_python")
"""Names of one activation, computed one way or another: but for a few thousandths the same."""
_SILU: Final = ("silu", "swish")
_NO_BIAS: Final[Mapping[str, object]] = {"attention_bias": False}
_NO_BIASES: Final[Mapping[str, object]] = {**_NO_BIAS, "mlp_bias": False}
_TIED: Final[Mapping[str, object]] = {"tie_word_embeddings": True}
_UNTIED: Final[Mapping[str, object]] = {"tie_word_embeddings": False}


def _each_its_own(text: Any) -> object:
    return text.num_attention_heads


def _shared(text: Any) -> object:
    return text.hidden_size // text.num_attention_heads


def _unscaled(text: Any) -> object:
    return {k: v for k, v in (text.rope_parameters or {}).items() if k != "mscale_all_dim"}


OTHERS: Final[Mapping[str, Mapping[str, object]]] = {
    "ArceeForCausalLM": {**_UNTIED, "mlp_bias": False},
    "CohereForCausalLM": {**_TIED, **_NO_BIAS, "hidden_act": _SILU},
    "Cohere2ForCausalLM": {**_TIED, **_NO_BIAS, "hidden_act": _SILU},
    "Cohere2MoeForCausalLM": {
        **_TIED,
        **_NO_BIAS,
        "hidden_act": _SILU,
        "norm_topk_prob": True,
        "rms_norm_eps": None,
    },
    "GPT2LMHeadModel": {**_TIED, "activation_function": _GELU, "scale_attn_weights": True},
    "GPTBigCodeForCausalLM": {**_TIED, "scale_attn_weights": True, "multi_query": True},
    "Gemma2ForCausalLM": {**_TIED, "use_bidirectional_attention": False},
    "Gemma3ForCausalLM": _TIED,
    "GemmaForCausalLM": {
        **_TIED,
        **_NO_BIAS,
        "hidden_act": _GELU,
        "use_bidirectional_attention": False,
    },
    "Glm4MoeForCausalLM": _UNTIED,
    "GraniteForCausalLM": _NO_BIASES,
    "GraniteMoeForCausalLM": {**_NO_BIAS, "hidden_act": _SILU},
    "GraniteMoeSharedForCausalLM": _NO_BIAS,
    "LlamaForCausalLM": {"mlp_bias": False},
    "MiniCPM3ForCausalLM": {
        **_NO_BIASES,
        "rms_norm_eps": (1e-6, 1e-5),
        "rope_parameters": _unscaled,
    },
    "MixtralForCausalLM": {**_UNTIED, "hidden_act": _SILU, "head_dim": _shared},
    "OPTForCausalLM": {"activation_function": ("relu", "gelu", "sigmoid")},
    "Olmo2ForCausalLM": {"hidden_act": _SILU},
    "OlmoForCausalLM": {"hidden_act": _SILU, "num_key_value_heads": _each_its_own},
    "OlmoeForCausalLM": {
        **_UNTIED,
        **_NO_BIAS,
        "hidden_act": _SILU,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    },
    "PersimmonForCausalLM": {**_UNTIED, "layer_norm_eps": 1e-5},
    "PhiForCausalLM": {
        **_UNTIED,
        "qk_layernorm": False,
        "num_key_value_heads": _each_its_own,
    },
    "Qwen3MoeForCausalLM": {**_UNTIED, "hidden_act": _SILU, "decoder_sparse_step": 1},
    # What computes all families that SGLang has no class of its own for, and no more than layers.
    "TransformersForCausalLM": {"logits_scaling": 1.0},
    "TransformersMoEForCausalLM": {"logits_scaling": 1.0, "hidden_act": _SILU},
    "StableLmForCausalLM": {**_UNTIED, "hidden_act": _SILU, "use_parallel_residual": False},
}
"""SGLang's classes that compute otherwise, by name: the fields of config.json for whose values they
do, and the value, or the several, for which they compute the same; a callable has it of the text's
configuration."""

_BY_CACHE: Final = frozenset({"torch_native", "flex_attention"})
"""Attention that looks at what is in the cache alone. Most layers whose cache has latent states in
the place of keys and values hand those over beside it, for prompts whose beginning is not kept."""

_OF_CACHE: Final = frozenset({"MiniCPM3ForCausalLM"})
"""Classes whose layers attend to the latent states of the cache itself."""


def told(config: ModelConfig) -> dict[str, Any]:
    """What is laid over config.json for SGLang to compute the same."""
    before = config.of_before() if config.config.get("model_type") in _NAMES_OF_BEFORE else {}
    changes = {
        **config.rotary_part,
        # It would scale at any length what is scaled beyond the model's.
        **config.undone_scaling(),
        **_named_scale(config),
        **config.activation_of_before,
        **config.tied_as_a_whole,
        **windows_of_sglang(config),
    }
    return before | config.within_text({**before.get("text_config", {}), **changes})


def windows_of_sglang(config: ModelConfig) -> dict[str, Any]:
    """The window of config.json as SGLang takes it for this model: in most families it is less by
    one there, which counts the tokens before another."""
    window = config.window
    if window is None or config.config.get("model_type") not in _BEFORE:
        return {}
    return {"sliding_window": window - 1}


def _named_scale(config: ModelConfig) -> dict[str, Any]:
    """``rope_parameters`` with the scale of queries and keys in words that SGLang reads."""
    said = config.rope_everywhere()
    rope = dict(said)
    kind, scale = rope.get("rope_type"), rope.get("attention_factor")
    if kind == "longrope":
        name_longrope_scale(rope)
    elif kind == "yarn" and scale is not None and rope.get("factor") is not None:
        rope["attn_factor"] = scale / _scale_of_yarn(rope)
    return {} if rope == said else {"rope_parameters": rope}


def _scale_of_yarn(rope: Mapping[str, Any]) -> float:
    """SGLang's own, times ``attn_factor``."""

    def scale(of: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * of * math.log(rope["factor"]) + 1

    if rope.get("mscale") is None or rope.get("mscale_all_dim") is None:
        return scale(1)
    return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])


def check_latent(settings: Any) -> None:
    """Raise `SettingsError` where SGLang attends to latent states otherwise than transformers.

    It is told by the `settings` (its `ServerArgs`), before anything is loaded.
    """
    overrides: Any = importlib.import_module("sglang.srt.arg_groups.overrides")
    models: Any = importlib.import_module("sglang.srt.configs.model_config")
    attention, _ = overrides.attention_backends_of(settings)
    if attention not in _BY_CACHE:
        return
    config = models.ModelConfig.from_server_args(settings)
    name = (config.hf_config.architectures or ["model"])[0]
    if config.attention_arch == models.AttentionArch.MLA and name not in _OF_CACHE:
        given = "attention_backend"
        if settings.prefill_attention_backend:
            given = f"prefill_{given}"
        if settings.device == "cpu":
            why, remedy = ", all that there is on a CPU", "serve it on a GPU, or with"
        else:
            why, remedy = "", f"leave {given} out of server_args, or serve it with"
        raise SettingsError(
            f"SGLang's {name} attends to latent states (kv_lora_rank={config.kv_lora_rank} of "
            f"config.json), and otherwise than the model with {given}={attention!r}{why}: rows "
            f"would be others; {remedy} engine='hf' or engine='vllm'"
        )


def check(model: torch.nn.Module, text: Any, said: Mapping[str, Any]) -> None:
    """Raise `SettingsError` where SGLang's `model` computes otherwise than transformers, whatever
    it is told.

    `text` is the text's configuration as SGLang has it; `said` is that of config.json, with what
    its user laid over it.
    """
    # The text's class may be a part of another.
    names = [type(module).__name__ for module in model.modules()]
    others = {field: same for name in names for field, same in OTHERS.get(name, {}).items()}
    own = {field: getattr(text, field, None) for field in others}
    wrong = [f"{f}={v!r}" for f, v in own.items() if not _is_same(v, others[f], text)]
    why = f"computes otherwise for {', '.join(wrong)} of config.json" if wrong else ""
    # Where the model has none, SGLang's may be of memory that nothing was loaded into.
    if not why and getattr(text, "lm_head_bias", True) and _has_bias(model):
        why = "leaves out the bias of the model's head (lm_head.bias)"
    if not why and not _places_alike(model, said):
        rope = said.get("rope_scaling") or said.get("rope_parameters")
        why = f"places tokens otherwise than the model by rope_parameters={rope!r} of config.json"
    if why:
        raise SettingsError(
            f"SGLang's {type(model).__name__} {why}: rows would be others; serve it with another "
            "engine"
        )


def _is_same(value: object, same: object, text: Any) -> bool:
    """What is absent is as good as false, and as what is the same."""
    same = same(text) if callable(same) else same
    known = same if isinstance(same, tuple) else (same,)
    return value is None or value in known


def _has_bias(model: torch.nn.Module) -> bool:
    head = getattr(model, "lm_head", None)
    bias = getattr(getattr(head, "base_layer", head), "bias", None)
    return isinstance(bias, torch.Tensor) and bool(bias.any())


def _places_alike(model: torch.nn.Module, said: Mapping[str, Any]) -> bool:
    """Whether all that rotates in SGLang's `model` turns as fast as what does in transformers', as
    far as that is known."""
    turning, known = [*_turning(model)], [*_known(said)]
    alike = [[_is_alike(cache, *one) for one in known] for cache in turning]
    if not turning or not known:
        return True
    return all(map(any, alike)) and all(map(any, zip(*alike, strict=True)))


def _turning(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """By how much each module of SGLang's turns: cosines and sines [positions, rotated dims].

    Of two kinds of ``longrope`` it is the one for short prompts, which are all that is served.
    """
    own = [m for m in model.modules() if not type(m).__module__.startswith("transformers.")]
    speeds = [one for module in own for one in _speeds(module)]
    if speeds:  # as in Gemma 3, whose layers have others besides, and do not use them
        yield from (_turned(torch.arange(64), *one) for one in speeds)
        return
    # What looks at pictures turns otherwise, and does not attend by this.
    attending = [m for m in own if any(type(c).__name__ == "RadixAttention" for c in m.children())]
    for module in (child for each in attending for child in each.children()):
        names = ("short_cos_sin_cache", "cos_sin_cache")
        caches = [getattr(module, name, None) for name in names]
        cache = next((c for c in caches if isinstance(c, torch.Tensor)), None)
        if cache is not None and cache.dim() == 2:
            yield cache


def _known(said: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, float]]:
    """How fast transformers turns, by kind of layers, and by how much it scales that."""
    transformers: Any = importlib.import_module("transformers")
    configurations: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    try:
        # SGLang puts classes of its own in the place of some.
        cls = getattr(transformers, configurations.CONFIG_MAPPING_NAMES[said["model_type"]])
        text = cls.from_dict(copy.deepcopy({**said})).get_text_config()
        modeling = importlib.import_module(
            type(text).__module__.replace(".configuration_", ".modeling_")
        )
        kinds = [
            kind(text)
            for name, kind in vars(modeling).items()
            if name.endswith("RotaryEmbedding") and hasattr(kind, "compute_default_rope_parameters")
        ]
    except Exception:  # each family has errors of its own for what it cannot be made of
        return
    if len(kinds) == 1:
        rope = getattr(text, "rope_parameters", None) or {}
        for speeds, scale in _speeds(kinds[0]):
            # PhiMoE scales by this as it computes, which its module does not keep.
            own = rope.get("short_mscale", scale) if text.model_type == "phimoe" else scale
            yield speeds, own


def _speeds(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, float]]:
    """What a module turns by that is made as transformers makes them."""
    for name, speeds in module.named_buffers(recurse=False):
        scale = getattr(module, name.replace("inv_freq", "attention_scaling"), None)
        if name.endswith("inv_freq") and "original" not in name and scale is not None:
            yield speeds, scale


def _turned(positions: torch.Tensor, speeds: torch.Tensor, scale: float) -> torch.Tensor:
    angles = positions[:, None] * speeds[None].float().cpu()
    return torch.cat([angles.cos(), angles.sin()], -1) * scale


def _is_alike(cache: torch.Tensor, speeds: torch.Tensor, scale: float) -> bool:
    positions = torch.tensor([p for p in (0, 1, 7, 50) if p < len(cache)])
    made = _turned(positions, speeds, scale)
    found = cache[positions.to(cache.device)].float().cpu()
    error = 1e-4 if cache.dtype == torch.float32 else 2e-2
    return found.shape == made.shape and bool(((found - made).abs() < error).all())
