"""Where vLLM computes a model otherwise than transformers has it: what makes it the same, and the
models that are refused, as nothing does.

All of it was found by trial of every family that both know. `OTHERS` is of the releases in
`internals.SUPPORTED`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lmpool.backends.model_config import ModelConfig
from lmpool.backends.rotary import name_longrope_scale
from lmpool.errors import SettingsError

_ONE_MORE: Final = frozenset({"cohere2", "cohere2_moe"})
"""Model types whose windows are a token wider in vLLM than config.json says."""

_NARROWED: Final = "lmpool_sliding_window"
"""Where a configuration keeps the window that was made of its own, for who comes again."""

_NO_BIAS: Final[Mapping[str, object]] = {"attention_bias": False}
_TIED: Final[Mapping[str, object]] = {"tie_word_embeddings": True}
_UNTIED: Final[Mapping[str, object]] = {"tie_word_embeddings": False}
_NO_BIASES: Final[Mapping[str, object]] = {**_NO_BIAS, "mlp_bias": False}
_SILU: Final[Mapping[str, object]] = {"hidden_act": ("silu", "swish")}
_INTERLEAVED: Final[Mapping[str, object]] = {"rope_interleave": True}
_INNER: Final[Mapping[str, object]] = {"rms_norm_eps": (1e-6, 1e-5)}
"""What latent states are normalized by, too: in transformers it is 1e-6 there, whatever is said. A
little more is within rounding."""

OTHERS: Final[Mapping[str, Mapping[str, object] | str]] = {
    "AXK1ForCausalLM": {**_NO_BIAS, **_INTERLEAVED, **_INNER},
    "CohereForCausalLM": {**_NO_BIAS, **_TIED, **_SILU},
    "Cohere2ForCausalLM": {**_NO_BIAS, **_TIED, **_SILU},
    "Cohere2MoeForCausalLM": {**_NO_BIAS, **_TIED, **_SILU},
    "DeepseekV2ForCausalLM": {**_NO_BIASES, **_UNTIED, **_INNER, "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": {**_NO_BIAS, **_UNTIED, **_INTERLEAVED, **_INNER},
    "DeepseekV32ForCausalLM": _INNER,
    "Ernie4_5ForCausalLM": {"use_bias": False},
    "FalconForCausalLM": {"activation": "gelu"},
    "FalconH1ForCausalLM": _NO_BIASES,
    "GPT2LMHeadModel": {"scale_attn_weights": True},
    "Gemma3ForCausalLM": {"use_bidirectional_attention": False},
    "GemmaForCausalLM": _NO_BIAS,
    "Glm4MoeForCausalLM": _UNTIED,
    "Glm4MoeLiteForCausalLM": {**_INTERLEAVED, **_INNER},
    "GlmMoeDsaForCausalLM": _INNER,
    "GptOssForCausalLM": {**_UNTIED, "attention_bias": True, "rms_norm_eps": 1e-5},
    "GraniteMoeForCausalLM": _NO_BIAS,
    "GraniteMoeSharedForCausalLM": _NO_BIAS,
    "HYV3ForCausalLM": _NO_BIASES,
    "HrmTextForCausalLM": "lets the tokens of a prompt see those behind them",
    "Lfm2ForCausalLM": _TIED,
    "Lfm2MoeForCausalLM": _TIED,
    "LongcatFlashForCausalLM": {**_NO_BIAS, **_INNER},
    "MiniCPM3ForCausalLM": {**_NO_BIASES, **_INNER},
    "MiniMaxM2ForCausalLM": _SILU,
    "MixtralForCausalLM": _SILU,
    "OlmoHybridForCausalLM": {**_NO_BIAS, **_SILU},
    "OlmoeForCausalLM": {
        **_NO_BIAS,
        **_UNTIED,
        **_SILU,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    },
    "Qwen2MoeForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": _NO_BIAS,
    "Qwen3MoeForCausalLM": _NO_BIAS,
    "Qwen3NextForCausalLM": _NO_BIAS,
    "StableLmForCausalLM": _SILU,
}
"""vLLM's own classes that compute otherwise, by architecture: why, or the fields of config.json
for whose values they do, and the value, or the several, for which they compute the same."""

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

_BY_HEAD: Final = frozenset(
    {
        "AXK1ForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "MiniCPM3ForCausalLM",
    }
)
"""Those whose queries come to rotary positions by head, which the kernel for CPUs rotates wrong."""

_ON_GPUS: Final = frozenset({"JambaForCausalLM", "MambaForCausalLM"})
"""Those of vLLM's own whose layers have no kernel for CPUs: their first prompt would end it."""

_STATES: Final = ("mamba_d_state", "ssm_state_size", "state_size")
"""Where families say how large the recurrent states of their Mamba layers are."""

_NO_KERNEL: Final = "-rotary_embedding"
"""What of `custom_ops` has them rotated without it."""


def as_transformers(config: Any) -> Any:
    """The same configuration of transformers, changed so that vLLM computes what transformers does.

    What it is given as `hf_overrides`, and so at times a configuration that says nothing. One that
    was changed before stays as it is.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if type(window) is int and _passes_over_windows(text):
        text.sliding_window = None
    elif (
        type(window) is int
        and window > 1
        and text.model_type in _ONE_MORE
        and window != getattr(text, _NARROWED, None)
    ):
        text.sliding_window = window - 1
        setattr(text, _NARROWED, window - 1)
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
    for name in _ON_GPUS.intersection(config.model_config.hf_config.architectures or ()):
        if on_cpu:
            raise SettingsError(f"vLLM's {name} runs on GPUs alone; serve it with another engine")
    for reason in _otherwise(config.model_config, on_cpu=on_cpu):
        raise SettingsError(f"{reason}: rows would be others; serve it with another engine")
    operations = config.compilation_config.custom_ops
    if on_cpu and _NO_KERNEL not in operations:
        operations[:] = [o for o in operations if o != "+rotary_embedding"] + [_NO_KERNEL]


def mixes_states(config: Any, *, on_cpu: bool) -> bool:
    """Whether recurrent states that a `VllmConfig` has kept for prefixes would be other prompts'.

    The scan for CPUs gives out a state a prompt, and is taken to give one a chunk.
    """
    text = config.model_config.hf_text_config
    scans = any(getattr(text, name, None) is not None for name in _STATES)
    return bool(on_cpu and scans and config.cache_config.enable_prefix_caching)


def _otherwise(model: Any, *, on_cpu: bool) -> Iterator[str]:
    """What vLLM computes otherwise of the model of a `ModelConfig`, whatever it is told."""
    text = model.hf_text_config
    for name in model.hf_config.architectures or ():
        if model.using_transformers_backend():
            said: Mapping[str, object] | str = BY_TRANSFORMERS.get(name, "")
        else:
            said = (ON_CPU.get(name) if on_cpu else None) or OTHERS.get(name, "")
        if not isinstance(said, str):
            meant = {f: v if isinstance(v, tuple) else (v,) for f, v in said.items()}
            own = {field: getattr(text, field, known[0]) for field, known in meant.items()}
            # What is absent is as good as false.
            others = [f"{f}={own[f]!r}" for f in own if (own[f] or None) not in _plain(meant[f])]
            said = f"computes otherwise for {', '.join(others)} of config.json" if others else ""
        if said:
            yield f"vLLM's {name} {said}"


def _plain(known: tuple[object, ...]) -> list[object]:
    return [value or None for value in known]


def _apart(found: object, meant: object) -> tuple[object, object]:
    """Both, without what is the same in them."""
    if not isinstance(found, dict) or not isinstance(meant, dict):
        return found, meant
    names = [n for n in {**found, **meant} if found.get(n) != meant.get(n)]
    kept = ({n: each[n] for n in names if n in each} for each in (found, meant))
    return next(kept), next(kept)


def deviations(config: Any, *, on_cpu: bool) -> Iterator[str]:
    """What vLLM computes otherwise than transformers by a `VllmConfig` that is somebody's own, and
    what helps."""
    model = config.model_config
    yield from _otherwise(model, on_cpu=on_cpu)
    text = model.hf_text_config
    told = as_transformers(copy.deepcopy(model.hf_config)).get_text_config()
    for field in ("sliding_window", "rope_parameters"):
        found, meant = _apart(getattr(text, field, None), getattr(told, field, None))
        if found != meant:
            yield (
                f"{field}={found!r} would have to be {meant!r}: start it with "
                "hf_overrides=as_transformers, of lmpool.backends.vllm.faithful"
            )
    bound = ModelConfig.of(text.to_dict()).longrope_bound
    if bound is not None and model.max_model_len > bound:
        yield (
            f"max_model_len={model.max_model_len}, with which it places all tokens as those of "
            f"long prompts (longrope): start it with max_model_len={bound}"
        )
    if mixes_states(config, on_cpu=on_cpu):
        yield (
            "recurrent states that it keeps for prefixes, which are other prompts' on a CPU: start "
            "it with enable_prefix_caching=False"
        )
    operations = config.compilation_config.custom_ops
    by_kernel = {"all", "+rotary_embedding"} & {*operations} and _NO_KERNEL not in operations
    if on_cpu and by_kernel and _BY_HEAD & {*(model.hf_config.architectures or ())}:
        yield (
            "a kernel for CPUs that rotates this model's queries wrong: start it with "
            f"compilation_config={{'custom_ops': [{_NO_KERNEL!r}]}}"
        )
