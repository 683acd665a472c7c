"""What mlx-lm is told of config.json, and what of it mlx-lm does not read.

mlx-lm takes of config.json what its class of a model has names for. Of the rest it has one value
built in, which is mostly what transformers has where config.json says nothing.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from lmpool.backends.mlx.families import laid
from lmpool.backends.model_config import ModelConfig, configuration_of

# mlx comes without types, and the annotations of transformers differ from release to release.
mlx_base: Any = importlib.import_module("mlx_lm.models.base")
mlx_utils: Any = importlib.import_module("mlx_lm.utils")
transformers: Any = importlib.import_module("transformers")

_WEIGHING: Final = frozenset(
    {
        *("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"),
        *("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "logit_scale"),
        *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
        *("layer_types", "no_rope_layers", "rope_interleave", "use_bidirectional_attention"),
        *("query_pre_attn_scalar", "clip_qkv", "scale_attn_weights", "use_parallel_residual"),
        *("scale_attn_by_inverse_layer_idx", "norm_topk_prob", "mamba_hidden_act", "ffn_act_fn"),
        *("moe_normalize_expert_weights", "swiglu_alpha", "swiglu_limit"),
    }
)
"""What rows depend on, and no weight shows."""

_PATTERN: Final = frozenset({"sliding_window_pattern"})
"""What says the kinds of layers in another way, which older releases of transformers wrote."""

_ALIKE: Final = (
    frozenset({"gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh"}),
    frozenset({"silu", "swish"}),
)
"""Names of one activation, computed one way or another."""

EPSILONS: Final = frozenset(
    {
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"),
        *("norm_eps", "norm_epsilon"),
    }
)
"""Names of what norms add to a variance."""

_LONE_EXPERTS: Final = frozenset(
    {
        *("afmoe", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe"),
        *("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "nemotron_h"),
    }
)
"""Families of mlx-lm that do not scale what the router gives an expert to 1 where it is alone."""

_ELSEWHERE: Final = {
    "exaone4": frozenset({"layer_types"}),
    "falcon_h1": frozenset({"embedding_multiplier"}),
}
"""What a family reads by another name, or its weights are multiplied by as mlx-lm converts them."""


_LOADING: Final = threading.Lock()
"""Held while mlx-lm's class of arguments notes what is read of them, for one model at a time."""


def told(config: ModelConfig) -> dict[str, Any]:
    """What is laid over config.json: names of before transformers 5, and those that mlx-lm has no
    value for, or one of its own, which transformers calls otherwise or goes without."""
    full = known(config)
    if full is None or "text_config" in config.config:  # mlx-lm's classes of those have no names
        return config.of_before()
    own = config.config
    try:
        model, arguments = mlx_utils._get_classes({**own})
    except (Exception, SystemExit):  # it is for mlx-lm to say
        return config.of_before()
    found = {**_required(own, arguments, full), **config.of_before()}
    return {**found, **laid(family_of(model), {**own, **found}, full)}


def family_of(model: type) -> str:
    """mlx-lm's name of the family that this class is the model of."""
    return model.__module__.rpartition(".")[2]


def _required(own: Mapping[str, Any], arguments: type, full: Any) -> dict[str, Any]:
    found = {}
    for parameter in inspect.signature(arguments).parameters.values():
        name, needed = parameter.name, parameter.default is parameter.empty
        # Positions are settled once the model is made.
        if name in own or (name.startswith("rope_") and not needed):
            continue
        value = getattr(full, name, None)
        if value is None and name == "head_dim" and parameter.default is not None:
            value = full.hidden_size // full.num_attention_heads
        found[name] = value
    # A configuration in it is of a text that config.json describes without one, as mlx-lm takes it.
    parts = transformers.PretrainedConfig
    return {k: v for k, v in found.items() if v is not None and not isinstance(v, parts)}


def known(config: ModelConfig) -> Any:
    """transformers' configuration of this; None where it has none, or makes none of it."""
    try:
        return configuration_of(config.config)
    except Exception:  # each family has errors of its own for what it cannot be made of
        return None


class _Noted(dict[str, Any]):
    """A part of config.json that notes what is looked up in it."""

    def __init__(self, part: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(part)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)


def noted(config: ModelConfig, told: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
    """What is told, and the parts of config.json that transformers has configurations of their own
    for, whose names are `read` as those beside them."""
    parts = {name: {**config.config, **told}[name] for name in _parts(config.config)}
    return {**told, **{name: _Noted(part, read) for name, part in parts.items()}}


def _parts(said: Mapping[str, Any]) -> list[str]:
    if said.get("model_type") not in transformers.CONFIG_MAPPING:
        return []
    names = transformers.CONFIG_MAPPING[said["model_type"]].sub_configs
    if "text_config" in {*names, *said}:  # the others are of pictures, which are not served
        return []
    return [name for name in sorted(names) if isinstance(said.get(name), dict)]


@contextmanager
def read_meanwhile() -> Iterator[set[str]]:
    """The names of what mlx-lm reads of its arguments of models, as this thread has it read them.

    One thread at a time: another waits.
    """
    read: set[str] = set()
    arguments, thread = mlx_base.BaseModelArgs, threading.get_ident()

    def look_up(own: Any, name: str) -> Any:
        if threading.get_ident() == thread:  # and not in another engine's forward pass
            read.add(name)
        return object.__getattribute__(own, name)

    with _LOADING:
        arguments.__getattribute__ = look_up
        try:
            yield read
        finally:
            del arguments.__getattribute__


def unheeded(family: str, config: ModelConfig, read: set[str]) -> tuple[str, object] | None:
    """The name and the value of what transformers computes by, and mlx-lm's `family` does not,
    which has `read` these.

    None where there is none, or transformers has no such family: who wrote its code says then what
    counts.
    """
    said = dict(config.config)
    if (
        family in _LONE_EXPERTS
        and said.get("num_experts_per_tok") == 1
        and said.get("norm_topk_prob", True)
    ):
        return "num_experts_per_tok", 1
    left = _WEIGHING - read - _ELSEWHERE.get(family, frozenset())
    if not EPSILONS & read:  # where one is, others are of something else
        left |= EPSILONS
    laid = config.of_before()
    before = {k: v for k, v in laid.get("text_config", laid).items() if k in _PATTERN & read}
    parts = _parts(said)
    bare = {name: _without(said[name], left) for name in parts}
    try:
        full = configuration_of(said)
        plain = configuration_of({**_without(said, left), **before, **bare})
    except Exception:  # each family has errors of its own for what it cannot be made of
        return None
    pairs = [(full, plain, said)]
    pairs += [(getattr(full, name), getattr(plain, name), said[name]) for name in parts]
    for own, built_in, written in pairs:
        for name in sorted(left & written.keys() & {*own.__dataclass_fields__}):
            value = getattr(own, name)
            if _meant(value) != _meant(getattr(built_in, name)):
                return name, value
    return None


def _without(said: Mapping[str, Any], left: frozenset[str] | set[str]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name not in left}


def _meant(value: object) -> object:
    """The same for what computes the same, but for a few thousandths."""
    return next((kind for kind in _ALIKE if value in kind), value) if type(value) is str else value
