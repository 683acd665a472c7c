"""What a plan needs to know of a model, from its config.json as transformers writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmpool.checks import quoted
from lmpool.errors import SettingsError
from lmpool.model_info import Encoding
from lmpool.plan.weights import Shape, weights_bytes
from lmpool.wants.top import MAX_K

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_NAMES: Final = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "inner": ("intermediate_size",),
}
"""What config.json calls them, the usual name first."""
_ONE_HEAD: Final = frozenset({"falcon", "gpt_bigcode"})
"""Model types whose queries share one head of keys where config.json has no `multi_query`."""
_ENCODERS: Final = frozenset(
    {
        "albert", "bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text",
        "deberta", "deberta-v2", "distilbert", "electra", "ernie", "megatron-bert", "modernbert",
        "mpnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm",
        "xlm-roberta", "xlm-roberta-xl", "xlnet",
    }
)  # fmt: skip
"""Model types whose rows depend on what follows, whatever head they have, but as decoders."""
_OF_SEVERAL_KINDS: Final = (
    "attn_layer_indices", "attn_layer_period", "attn_type_list", "block_types",
    "full_attention_interval", "full_attn_idxs", "hybrid_override_pattern", "lru_width",
    "num_kv_shared_layers", "sliding_window_pattern", "_sliding_window_pattern",
)  # fmt: skip
"""What configs without `layer_types` say of layers that keep no keys and values, others' or those
of a window alone."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model as far as a plan needs it; None is unknown, and `unknown` says why."""

    name: str
    vocab_size: int
    dtype: str
    hidden_size: int | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    weights_bytes: int | None = None
    weights_from: str = ""
    """How the bytes of its weights are known."""
    unknown: tuple[str, ...] = ()

    @property
    def encoding(self) -> Encoding:
        """The smallest lossless one of its rows."""
        return "bf16" if self.dtype == "bfloat16" else "f32"

    @property
    def dtype_bytes(self) -> int:
        """Of a number that it computes with."""
        return DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int | None:
        """Of the keys and values of one token."""
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            return None
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


def read_model(name: str) -> PlannedModel:
    """Read a model's config.json: ``tiny``, a folder, the file itself, or a hub id from the cache.

    Nothing is downloaded. Raises `SettingsError` where there is none, or it is none.
    """
    file = _config_file(name)
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:  # it may have a null character
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"model={quoted(name)}: {quoted(str(file))} cannot be read: {reason}; name a folder "
            "with a config.json, or the file"
        ) from None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"model={quoted(name)}: {file} is no JSON ({error}); name the config.json of a model"
        ) from None
    if not isinstance(found, dict):
        raise SettingsError(f"model={quoted(name)}: {file} is no JSON object, so no model's config")
    text = found.get("text_config")
    return _of_config(name, {**found, **text} if isinstance(text, dict) else found, file.parent)


def _config_file(name: str) -> Path:
    if name == "tiny":
        return Path(__file__).parents[1] / "backends" / "tiny" / "model" / "config.json"
    try:
        path = Path(os.path.expanduser(name))
        if path.is_dir():
            return path / "config.json"
        if path.exists() or name.startswith((".", "~", "/")) or name.count("/") != 1:
            return path
    except (OSError, ValueError):  # too long for a path, or a null character
        raise SettingsError(f"model={quoted(name)} is no path: name a folder or file") from None
    return _cached(name)


def _cached(name: str) -> Path:
    """Of a hub id that was downloaded before."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):
        found = None
    if not isinstance(found, str):
        raise SettingsError(
            f"model={quoted(name)}: there is no such folder, and no hub model of that name in this "
            "machine's cache; nothing is downloaded for a plan: name a config.json, which the "
            "model's page on the hub has among its files"
        )
    return Path(found)


def _of_config(name: str, config: Mapping[str, Any], folder: Path) -> PlannedModel:
    vocab_size = _number(config, ("vocab_size",))
    if vocab_size is None or vocab_size > MAX_K:
        shown = quoted(config.get("vocab_size"))
        raise SettingsError(
            f"model={quoted(name)}: its config.json has vocab_size={shown}, so the size "
            "of a row is not known; name the config.json of a language model"
        )
    unknown: list[str] = []
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype not in DTYPE_BYTES:
        unknown.append(f"dtype: config.json says {quoted(dtype)}; float32 is taken")
        dtype = "float32"
    known = {field: _number(config, names) for field, names in _NAMES.items()}
    layers, heads, hidden = known["layers"], known["heads"], known["hidden"]
    kv_heads = _kv_heads(config, known["kv_heads"] or heads)
    head_dim = _number(config, ("head_dim",))
    if head_dim is None and hidden is not None and heads is not None:
        head_dim = hidden // heads
    reason = _unusual(config)
    if reason:
        unknown.append(f"keys and values of a token: {reason}")
        layers = None
    elif None in (layers, kv_heads, head_dim):
        unknown.append("keys and values of a token: config.json does not name layers and heads")
    shape = Shape(vocab_size, known["layers"], hidden, known["inner"], heads, kv_heads, head_dim)
    weights, how = weights_bytes(config, folder, shape, DTYPE_BYTES[dtype])
    if weights is None:
        unknown.append(f"bytes of the weights: {how}")
    return PlannedModel(
        name, vocab_size, dtype, hidden, layers, kv_heads, head_dim, weights, how, tuple(unknown)
    )


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        found = config.get(name)
        if type(found) is int and found > 0:
            return found
    return None


def _kv_heads(config: Mapping[str, Any], named: int | None) -> int | None:
    """Heads of keys and values: those that are named, unless all queries share one."""
    one = config.get("multi_query", config.get("model_type") in _ONE_HEAD)
    return 1 if one and not config.get("new_decoder_architecture") else named


def _unusual(config: Mapping[str, Any]) -> str:
    """Why 2 x layers x kv heads x head dim does not hold; nothing where it does."""
    if config.get("is_encoder_decoder"):
        return "a model with an encoder, which no engine of lmpool's serves"
    made_for = config.get("architectures")
    masked = isinstance(made_for, list) and any("MaskedLM" in str(each) for each in made_for)
    encodes = masked or config.get("model_type") in _ENCODERS
    if encodes and not config.get("is_decoder"):  # with that, transformers has it look back alone
        return (
            "an encoder, whose rows depend on what follows, so that none are kept; no engine of "
            "lmpool's serves it"
        )
    if config.get("kv_lora_rank"):
        return "multi-head latent attention (kv_lora_rank), of which each engine keeps its own form"
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list) and any("full" not in str(k) and k != "attention" for k in kinds):
        return f"layers of several kinds ({', '.join(sorted({*map(str, kinds)}))})"
    for name in _OF_SEVERAL_KINDS:
        if config.get(name) not in (None, 0, 1, []):
            return f"layers of several kinds ({name})"
    if config.get("new_decoder_architecture"):
        return (
            "Falcon's new architecture, of which each engine keeps its own form: hf keeps the keys "
            "and values of every head"
        )
    if any(name in config for name in ("mamba_d_state", "state_size", "ssm_cfg")):
        return "a state-space model, whose states do not grow with the prompt"
    return ""
