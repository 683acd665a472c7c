"""What mlx-lm is told of config.json, and what of it mlx-lm does not read.

mlx-lm takes of config.json what its class of a model has names for. Of the rest it has one value
built in, which is mostly what transformers has where config.json says nothing.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from lmpool.backends.model_config import ModelConfig

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
        "scale_attn_by_inverse_layer_idx",
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

_LONE_EXPERTS: Final = frozenset(
    {
        *("afmoe", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe"),
        *("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "nemotron_h"),
    }
)
"""Families of mlx-lm that do not scale what the router gives an expert to 1 where it is alone."""


_IN_WEIGHTS: Final = {"falcon_h1": frozenset({"embedding_multiplier"})}
"""What a family's weights are multiplied by as mlx-lm converts them, and is not read thereafter."""


def told(config: ModelConfig) -> dict[str, Any]:
    """What is laid over config.json: names of before transformers 5, and those that mlx-lm has no
    value for, which transformers calls otherwise or goes without."""
    return {**_required(config), **config.of_before()}


def _required(config: ModelConfig) -> dict[str, Any]:
    said = config.config
    if "text_config" in said:  # mlx-lm's classes of those have no such names themselves
        return {}
    try:
        _, arguments = mlx_utils._get_classes({**said})
        known = _known(said)
    except (Exception, SystemExit):  # it is for mlx-lm to say, or nobody knows another name
        return {}
    parameters = inspect.signature(arguments).parameters.values()
    absent = {p.name for p in parameters if p.default is p.empty} - said.keys()
    found = {name: getattr(known, name, None) for name in absent}
    if "head_dim" in absent and found["head_dim"] is None:
        found["head_dim"] = known.hidden_size // known.num_attention_heads
    # A configuration in it is of a text that config.json describes without one, as mlx-lm takes it.
    parts = transformers.PretrainedConfig
    return {k: v for k, v in found.items() if v is not None and not isinstance(v, parts)}


def _known(said: Mapping[str, Any]) -> Any:
    """transformers' configuration of this, which it is made of and would write into."""
    return transformers.CONFIG_MAPPING[said.get("model_type")].from_dict(copy.deepcopy({**said}))


@contextmanager
def read_meanwhile() -> Iterator[set[str]]:
    """The names of what mlx-lm reads of its arguments of models, as it reads them."""
    read: set[str] = set()
    arguments = mlx_base.BaseModelArgs

    def look_up(own: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(own, name)

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
    left = _WEIGHING & said.keys() - read - _IN_WEIGHTS.get(family, frozenset())
    laid = config.of_before()
    before = {k: v for k, v in laid.get("text_config", laid).items() if k in _PATTERN & read}
    try:
        full = _known(said)
        plain = _known({k: v for k, v in said.items() if k not in left} | before)
    except Exception:  # each family has errors of its own for what it cannot be made of
        return None
    for name in sorted(left & {*full.__dataclass_fields__}):
        value, built_in = getattr(full, name), getattr(plain, name)
        if _meant(value) != _meant(built_in):
            return name, value
    return None


def _meant(value: object) -> object:
    """The same for what computes the same, but for a few thousandths."""
    return next((kind for kind in _ALIKE if value in kind), value) if type(value) is str else value
