"""What transformers 5 saves of some families otherwise than mlx-lm's code of them takes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from lmpool.errors import SettingsError

# mlx comes without types.
mx: Any = importlib.import_module("mlx.core")

_Said = Mapping[str, Any]
_Weights = dict[str, Any]


def laid(family: str, said: _Said, full: Any) -> dict[str, Any]:
    """What is laid over config.json, which has `said` this, of which transformers makes `full`."""
    lay = _LAID.get(family)
    return {} if lay is None else lay(said, full)


def taken(family: str, weights: _Weights, said: _Said) -> _Weights:
    """The weights beside config.json, which has `said` this, as mlx-lm's `family` takes them."""
    take = _TAKEN.get(family)
    return weights if take is None else take(weights, said)


def _gpt2(said: _Said, full: Any) -> dict[str, Any]:
    return {"n_ctx": full.n_positions}


def _lfm2(said: _Said, full: Any) -> dict[str, Any]:
    return {"block_dim": full.hidden_size}


def _apertus(said: _Said, full: Any) -> dict[str, Any]:
    built_in = {"mlp_bias": False, "post_norm": False, "qk_norm": True}
    return {name: value for name, value in built_in.items() if name not in said}


def _exaone4(said: _Said, full: Any) -> dict[str, Any]:
    kinds = "".join("L" if "sliding" in kind else "G" for kind in full.layer_types)
    return {"sliding_window_pattern": kinds if full.sliding_window else None}


def _mamba2(said: _Said, full: Any) -> dict[str, Any]:
    return {"intermediate_size": int(full.expand * full.hidden_size)}


def _granitemoehybrid(said: _Said, full: Any) -> dict[str, Any]:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    return {
        "layer_types": [names.get(kind, kind) for kind in full.layer_types],
        "position_embedding_type": full.position_embedding_type or "nope",
    }


def _unscaled_yarn(said: _Said, full: Any) -> dict[str, Any]:
    return {} if said.get("rope_scaling") else {"rope_scaling": {"type": "yarn", "factor": 1.0}}


def _minicpm3(said: _Said, full: Any) -> dict[str, Any]:
    untied = {"tie_word_embeddings": False}  # whose logits alone are scaled
    if said.get("rope_scaling"):
        return untied
    longest = {"original_max_position_embeddings": full.max_position_embeddings}
    return {**untied, "rope_scaling": {"type": "longrope", **longest}}


def _dbrx(said: _Said, full: Any) -> dict[str, Any]:
    attention = said.get("attn_config") or {}
    theta = said.get("rope_theta", attention.get("rope_theta"))
    clip = attention.get("clip_qkv")
    own = {"rope_theta": theta, "clip_qkv": float("inf") if clip is None else clip}
    return {"attn_config": {**attention, **own}}


_LAID: Final[Mapping[str, Callable[[_Said, Any], dict[str, Any]]]] = {
    "apertus": _apertus,
    "dbrx": _dbrx,
    "deepseek_v2": _unscaled_yarn,
    "exaone4": _exaone4,
    "gpt2": _gpt2,
    "granitemoehybrid": _granitemoehybrid,
    "lfm2": _lfm2,
    "mamba2": _mamba2,
    "minicpm3": _minicpm3,
}


def _without_transformer(weights: _Weights, said: _Said) -> _Weights:
    return {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}


def _gpt_oss_experts(weights: _Weights, said: _Said) -> _Weights:
    """Experts that are not quantized: each number of inputs comes first there."""
    if not any(name.endswith("experts.gate_up_proj") for name in weights):
        return weights
    found: _Weights = {}
    for name, tensor in weights.items():
        place, _, last = name.rpartition(".")
        match last:
            case "gate_up_proj":
                turned = tensor.swapaxes(-1, -2)
                found[f"{place}.gate_proj.weight"] = mx.contiguous(turned[..., ::2, :])
                found[f"{place}.up_proj.weight"] = mx.contiguous(turned[..., 1::2, :])
            case "gate_up_proj_bias":
                found[f"{place}.gate_proj.bias"] = mx.contiguous(tensor[..., ::2])
                found[f"{place}.up_proj.bias"] = mx.contiguous(tensor[..., 1::2])
            case "down_proj":
                found[f"{place}.down_proj.weight"] = mx.contiguous(tensor.swapaxes(-1, -2))
            case "down_proj_bias":
                found[f"{place}.down_proj.bias"] = tensor
            case _:
                found[name] = tensor
    return found


def _multiplied_falcon(weights: _Weights, said: _Said) -> _Weights:
    """What mlx-lm forgets as it multiplies the weights of a Falcon-H1.

    Raises `SettingsError` for weights whose convolutions are turned: others were multiplied then,
    and whether these were nothing tells.
    """
    keys, values = said.get("key_multiplier", 1), said.get("attention_in_multiplier", 1)
    conv = weights.get("model.layers.0.mamba.conv1d.weight")
    if conv is None or (keys == values == 1):
        return weights
    if conv.shape[-1] <= conv.shape[1]:
        raise SettingsError(
            f"these weights were converted by mlx-lm, which leaves out key_multiplier={keys!r} and "
            f"attention_in_multiplier={values!r} of config.json: rows would be others; take the "
            "model as it is on the hub"
        )
    names = {"k_proj.weight": keys, "k_proj.bias": keys, "v_proj.weight": values}
    found = {**weights}
    for name in weights:
        factor = names.get(".".join(name.split(".")[-2:]))
        if factor is not None:
            found[name] = weights[name] * factor
    return found


def _untied(weights: _Weights, said: _Said) -> _Weights:
    embedding, head = "model.embed_tokens.", "lm_head."
    own = {name: tensor for name, tensor in weights.items() if name.startswith(embedding)}
    return {head + name.removeprefix(embedding): tensor for name, tensor in own.items()} | weights


_TAKEN: Final[Mapping[str, Callable[[_Weights, _Said], _Weights]]] = {
    "falcon_h1": _multiplied_falcon,
    "gpt2": _without_transformer,
    "gpt_oss": _gpt_oss_experts,
    "minicpm3": _untied,
}
