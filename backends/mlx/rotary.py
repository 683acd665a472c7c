"""Rotary positions as transformers has them, in a model that mlx-lm has made.

mlx-lm reads a part of what config.json says of them, and more of some families than of others.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.mlx.arguments import known
from lmpool.backends.model_config import ModelConfig
from lmpool.backends.rotary import name_longrope_scale
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

# mlx comes without types.
mx: Any = importlib.import_module("mlx.core")
nn: Any = importlib.import_module("mlx.nn")

_LAYER: Final = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_FACTORS: Final = ("mscale", "_scale")
"""What mlx-lm calls by how much it multiplies what it rotates."""

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Positions:
    """How many tokens a radian takes, for each pair of numbers [pairs], and by how much the
    numbers are multiplied."""

    kind: str
    periods: _Numbers
    factor: float = 1.0

    def agrees(self, other: Positions) -> bool:
        """Whether rows by the one are those by the other, but for rounding."""
        return (
            self.periods.shape == other.periods.shape
            and np.allclose(self.periods, other.periods, rtol=1e-4)
            and math.isclose(self.factor, other.factor, rel_tol=1e-5)
        )


def settle_rotary(model: Any, config: ModelConfig) -> str:
    """Have the layers place tokens as transformers does; how they do otherwise, where they cannot.

    Only what config.json says of rotary positions counts, and only kinds that are known here.
    """
    full = known(config)
    kinds = _said(config, full)
    found = [(name, module) for name, module in model.named_modules() if _is_rotary(module)]
    dims, wanted = {_dims(module) for _, module in found}, config.rotary_dims()
    if wanted is not None and found and wanted not in dims:
        if len(dims) > 1 or any(type(module) is not nn.RoPE for _, module in found):
            return f"rotates {max(dims)} numbers of a head, of which the model has {wanted} rotated"
        for _, module in found:
            module.dims = wanted
    for name, module in found:
        expected = [_positions(kind, _dims(module)) for kind in _of_layer(kinds, name, full)]
        known_kinds = [positions for positions in expected if positions is not None]
        if len(known_kinds) < len(expected) or not expected:
            continue
        own = _own(module)
        if any(positions.agrees(own) for positions in known_kinds):
            continue
        if len(known_kinds) > 1 or not _settle(module, known_kinds[0]):
            kind = known_kinds[0].kind
            return f"does not scale rotary positions, as the model does ({kind}), in {name!r}"
    return ""


def within_short(longest: int, wanted: int | None, config: ModelConfig, name: str) -> int:
    """The longest prompt, up to this, whose tokens are placed as those of short ones, as all are
    here, where those of long ones have other places (``longrope``).

    Raises `SettingsError` where more are `wanted`.
    """
    kinds = _said(config, known(config)).values()
    found = [kind for kind in kinds if _kind(kind) == "longrope"]
    differ = [kind for kind in found if kind.get("short_factor") != kind.get("long_factor")]
    originals = [kind.get("original_max_position_embeddings") for kind in differ]
    original = min((each for each in originals if type(each) is int), default=longest)
    if longest <= original:
        return longest
    if wanted is not None:
        raise SettingsError(
            f"max_prompt_tokens={wanted}: {name} does not place the tokens of prompts of more than "
            f"{original} as the model does (longrope), and they would have other rows: write that "
            "or less, or serve it with another engine"
        )
    logger.warning(
        "%s does not place tokens as the model does in prompts of more than %d (longrope): longer "
        "prompts are refused",
        name,
        original,
    )
    return original


def _said(config: ModelConfig, full: Any) -> Mapping[str, Mapping[str, Any]]:
    """What transformers makes of config.json, by kind of layer; by "" for all of them alike."""
    if not {"rope_parameters", "rope_scaling", "rope_theta"} & config.config.keys():
        return {}
    found = getattr(full, "rope_parameters", None)
    if not isinstance(found, dict) or not found:
        return {}
    original = config.config.get("original_max_position_embeddings")
    beside = {} if original is None else {"original_max_position_embeddings": original}
    beside["max_position_embeddings"] = config.config.get("max_position_embeddings")
    kinds = found if all(isinstance(kind, dict) for kind in found.values()) else {"": found}
    return {name: beside | kind for name, kind in kinds.items()}


def _of_layer(
    kinds: Mapping[str, Mapping[str, Any]], name: str, full: Any
) -> list[Mapping[str, Any]]:
    layer, types = _LAYER.search(f".{name}."), getattr(full, "layer_types", None)
    if "" not in kinds and layer is not None and isinstance(types, list):
        number = int(layer[1])
        if number < len(types) and types[number] in kinds:
            return [kinds[types[number]]]
    return [*kinds.values()]


def _is_rotary(module: Any) -> bool:
    named = any(word in type(module).__name__ for word in ("RoPE", "Rotary"))
    return type(module) is nn.RoPE or (named and "_freqs" in module)


def _dims(module: Any) -> int:
    return int(module.dims) if type(module) is nn.RoPE else 2 * int(module["_freqs"].size)


def _own(module: Any) -> Positions:
    if type(module) is nn.RoPE:
        return Positions("", _plain(module.base, module.dims) / module.scale)
    factor = next((getattr(module, name) for name in _FACTORS if hasattr(module, name)), 1.0)
    return Positions("", np.array(module["_freqs"], np.float64), float(factor))


def _settle(module: Any, positions: Positions) -> bool:
    """Have the layer place tokens so; False where it cannot."""
    if type(module) is not nn.RoPE:
        name = next((name for name in _FACTORS if hasattr(module, name)), None)
        if name is None and positions.factor != 1:
            return False
        if name is not None:
            setattr(module, name, positions.factor)
        module["_freqs"] = mx.array(positions.periods.astype(np.float32))
        return True
    # Of these there are only powers of a base, all of them scaled alike.
    scale = 1 / float(positions.periods[0])
    base = (positions.periods[-1] * scale) ** (module.dims / max(module.dims - 2, 1))
    if not positions.agrees(Positions("", _plain(base, module.dims) / scale)):
        return False
    module.base, module.scale = float(base), scale
    return True


def _kind(rope: Mapping[str, Any]) -> str:
    found = rope.get("rope_type", rope.get("type", "default"))
    return "longrope" if found == "su" else str(found)


def _positions(rope: Mapping[str, Any], dims: int) -> Positions | None:
    try:
        return _KINDS[_kind(rope)](rope, dims)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return None  # another kind, or one that lacks a number: it is for mlx-lm to say


def _plain(base: float, dims: int) -> _Numbers:
    return float(base) ** (np.arange(0, dims, 2) / dims)


def _default(rope: Mapping[str, Any], dims: int) -> Positions:
    return Positions("default", _plain(rope["rope_theta"], dims))


def _linear(rope: Mapping[str, Any], dims: int) -> Positions:
    return Positions("linear", _plain(rope["rope_theta"], dims) * rope["factor"])


def _llama3(rope: Mapping[str, Any], dims: int) -> Positions:
    periods = _plain(rope["rope_theta"], dims)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi * periods)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return Positions("llama3", periods / ((1 - smooth) / factor + smooth))


def _yarn(rope: Mapping[str, Any], dims: int) -> Positions:
    theta, original = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / original

    def scaled(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    multiplied = rope.get("attention_factor")
    if multiplied is None:
        own, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        multiplied = scaled(own) / scaled(all_dim) if own and all_dim else scaled(1)

    def dim(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim(rope.get("beta_fast") or 32), dim(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low or 0.001), 0, 1)
    periods = _plain(theta, dims)
    return Positions("yarn", periods / (ramp / factor + 1 - ramp), float(multiplied))


def _longrope(rope: Mapping[str, Any], dims: int) -> Positions:
    """That of short prompts."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / original
    named = {**rope, "factor": factor}
    name_longrope_scale(named)
    periods = _plain(rope["rope_theta"], dims) * np.array(rope["short_factor"], np.float64)
    return Positions("longrope", periods, float(named["short_mscale"]))


_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any], int], Positions]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
