"""Where vLLM computes a model otherwise than transformers has it: what makes it the same, and the
models that are refused, as nothing does.

All of it was found by trial of every family that both know. `OTHERS` is of the releases in
`internals.SUPPORTED`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Final

from lmpool.backends.rotary import name_longrope_scale
from lmpool.errors import SettingsError

_ONE_MORE: Final = frozenset({"cohere2", "cohere2_moe"})
"""Model types whose windows are a token wider in vLLM than config.json says."""


_NO_BIAS: Final[Mapping[str, object]] = {"attention_bias": False}
_TIED: Final[Mapping[str, object]] = {"tie_word_embeddings": True}
_UNTIED: Final[Mapping[str, object]] = {"tie_word_embeddings": False}

OTHERS: Final[Mapping[str, Mapping[str, object] | str]] = {
    "CohereForCausalLM": {**_NO_BIAS, **_TIED},
    "Cohere2ForCausalLM": {**_NO_BIAS, **_TIED},
    "DeepseekV2ForCausalLM": {**_NO_BIAS, **_UNTIED, "mlp_bias": False, "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": {**_NO_BIAS, **_UNTIED, "rope_interleave": True},
    "Ernie4_5ForCausalLM": {"use_bias": False},
    "GPT2LMHeadModel": {"scale_attn_weights": True},
    "Gemma3ForCausalLM": {"use_bidirectional_attention": False},
    "GemmaForCausalLM": _NO_BIAS,
    "Glm4MoeForCausalLM": _UNTIED,
    "GptOssForCausalLM": {**_UNTIED, "attention_bias": True, "rms_norm_eps": 1e-5},
    "GraniteMoeForCausalLM": _NO_BIAS,
    "GraniteMoeSharedForCausalLM": _NO_BIAS,
    "HrmTextForCausalLM": "lets the tokens of a prompt see those behind them",
    "Lfm2ForCausalLM": _TIED,
    "Lfm2MoeForCausalLM": _TIED,
    "OlmoeForCausalLM": {
        **_NO_BIAS,
        **_UNTIED,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    },
    "Qwen2MoeForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": _NO_BIAS,
    "Qwen3MoeForCausalLM": _NO_BIAS,
}
"""vLLM's own classes that compute otherwise, by architecture: why, or the fields of config.json
for whose values they do, and those for which they compute the same."""

ON_CPU: Final[Mapping[str, str]] = {
    "Ernie4_5_MoeForCausalLM": "chooses experts without their correction bias on a CPU",
}
"""Those of them that do so on a CPU alone."""

BY_TRANSFORMERS: Final[Mapping[str, str]] = {
    "DogeForCausalLM": "attends without the model's own mask",
    "JetMoeForCausalLM": "does not compute the model's mixture of attention heads",
    "MoshiForCausalLM": "does not heed windows as the model does",
    "RecurrentGemmaForCausalLM": "does not heed windows as the model does",
    "ZayaForCausalLM": "does not compute the model's mixture of experts",
}
"""Those that it takes from transformers, and computes otherwise."""


def as_transformers(config: Any) -> Any:
    """The same configuration of transformers, changed so that vLLM computes what transformers does.

    What it is given as `hf_overrides`, and so at times a configuration that says nothing.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if type(window) is int and _passes_over_windows(text):
        text.sliding_window = None
    elif type(window) is int and window > 1 and text.model_type in _ONE_MORE:
        text.sliding_window = window - 1
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict):
        kinds = [kind for kind in rope.values() if isinstance(kind, dict)]
        for kind in kinds or [rope]:
            _place(kind)
        if not kinds and _is_plain(rope) and _rotates_all(text):
            rope["partial_rotary_factor"] = 1.0
    return config


def _kind(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _is_plain(rope: Mapping[str, Any]) -> bool:
    """Whether a part of each head is said to be rotated, and no more."""
    return _kind(rope) == "default" and rope.get("partial_rotary_factor", 1) != 1


def _place(rope: dict[str, Any]) -> None:
    """Have vLLM place tokens as transformers does by these ``rope_parameters``."""
    if _kind(rope) == "dynamic" and not rope.get("alpha"):
        # It begins beyond the model's positions, where vLLM would take prompts and has no places.
        for name in rope.keys() - {"rope_theta", "partial_rotary_factor"}:
            del rope[name]
        rope["rope_type"] = "default"
    elif _kind(rope) in ("longrope", "su"):
        name_longrope_scale(rope)


def _modeling(text: Any) -> Any:
    """transformers' module of a model's layers; None for code that is not its own."""
    package, _, name = type(text).__module__.rpartition(".configuration_")
    if not package.startswith("transformers.models."):
        return None
    try:
        return importlib.import_module(f"{package}.modeling_{name}")
    except ModuleNotFoundError:
        return None


def _passes_over_windows(text: Any) -> bool:
    modeling = _modeling(text)
    return modeling is not None and "sliding_window" not in inspect.getsource(modeling)


def _rotates_all(text: Any) -> bool:
    """Whether transformers rotates whole heads, whatever config.json says of a part of them."""
    for name, found in vars(_modeling(text) or object).items():
        if name.endswith("RotaryEmbedding") and hasattr(found, "compute_default_rope_parameters"):
            frequencies, _ = found.compute_default_rope_parameters(text)
            width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            return bool(2 * len(frequencies) == width)
    return False


def bind(config: Any, *, on_cpu: bool) -> None:
    """Have vLLM compute the model of a `VllmConfig` as transformers does.

    Raises `SettingsError` for one that it computes otherwise, whatever it is told.
    """
    model, text = config.model_config, config.model_config.hf_text_config
    for name in model.hf_config.architectures or ():
        if model.using_transformers_backend():
            said: Mapping[str, object] | str = BY_TRANSFORMERS.get(name, "")
        else:
            said = (ON_CPU.get(name) if on_cpu else None) or OTHERS.get(name, "")
        if not isinstance(said, str):
            own = {field: getattr(text, field, value) for field, value in said.items()}
            # What is absent is as good as false.
            others = [f"{f}={own[f]!r}" for f in own if (own[f] or None) != (said[f] or None)]
            said = f"computes otherwise for {', '.join(others)} of config.json" if others else ""
        if said:
            raise SettingsError(
                f"vLLM's {name} {said}: rows would be others; serve it with another engine"
            )
    operations = config.compilation_config.custom_ops
    if on_cpu and "-rotary_embedding" not in operations:
        # The kernel for CPUs rotates queries wrong that come by head, as LFM2's and DeepSeek's.
        operations[:] = [o for o in operations if o != "+rotary_embedding"] + ["-rotary_embedding"]
