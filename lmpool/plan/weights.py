"""The bytes of a model's weights: of its files, or estimated from its config.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmpool.checks import quoted

INDEX: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"-\d+-of-\d+$")

MATRICES: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        (
            "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
            "glm4", "granite", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral",
            "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
        ),
        3,
    ),
    **dict.fromkeys(
        ("apertus", "arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2"), 2
    ),
}  # fmt: skip
"""Of the model types whose layers are attention and one MLP, all alike: the matrices of that, with
a gate or without."""
TIED: Final = frozenset(
    {"cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3", "starcoder2"}
)
"""Those of them whose output matrix is the input's where config.json does not say. What is as a
type has it by default is often left out there."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a decoder's layers and tables; None is unknown."""

    vocab_size: int
    layers: int | None
    hidden: int | None
    inner: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None


def weights_bytes(
    config: Mapping[str, Any], folder: Path, shape: Shape, dtype_bytes: int
) -> tuple[int | None, str]:
    """The bytes of a model's weights and how they are known, or why they are not."""
    found = _of_index(folder) or _of_files(folder)
    if found is not None:
        return found
    numbers, why = _parameters(config, shape)
    if numbers is None:
        return None, f"{why}, and no *.safetensors of one model beside config.json"
    return numbers * dtype_bytes, "estimated from config.json"


def _of_index(folder: Path) -> tuple[int, str] | None:
    """As the index of several files has them: their sum, or the files that it names."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(index, dict):
        return None
    metadata, files = index.get("metadata"), index.get("weight_map")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some tools write it as a float.
    if isinstance(total, int | float) and total is not True and 0 < total < math.inf:
        return round(total), INDEX
    if not isinstance(files, dict) or not files:
        return None
    try:
        size = sum((folder / str(name)).stat().st_size for name in {*map(str, files.values())})
    except (OSError, ValueError):  # one is missing, or no name
        return None
    return size, f"the files of {INDEX}"


def _of_files(folder: Path) -> tuple[int, str] | None:
    """Without an index: of ``model.safetensors``, or of the one model that there is.

    Some folders have the same weights a second time, as ``consolidated.safetensors``, or in parts.
    """
    sizes: dict[str, int] = {}
    for file in filter(Path.is_file, folder.glob("*.safetensors")):
        name = _SHARD.sub(" in parts", file.stem)
        if not name.startswith("adapter"):
            sizes[name] = sizes.get(name, 0) + file.stat().st_size
    first = ("model", "model in parts", *(sizes if len(sizes) == 1 else ()))
    size = next((sizes[name] for name in first if name in sizes), None)
    return None if size is None else (size, "*.safetensors")


def _parameters(config: Mapping[str, Any], shape: Shape) -> tuple[int | None, str]:
    """How many numbers its matrices have, or why that is not known; norms and biases are few."""
    if config.get("quantization_config"):
        return None, "quantized"
    if any("expert" in key and config[key] for key in config):
        return None, "a mixture of experts"
    parts = [name for name, it in config.items() if name.endswith("_config") and it]
    if parts:
        return None, f"a model of several parts ({', '.join(sorted(parts))})"
    model_type = config.get("model_type")
    matrices = MATRICES.get(model_type) if isinstance(model_type, str) else None
    if matrices is None:
        return None, f"model_type={quoted(model_type)}, whose layers this does not know"
    known = (shape.layers, shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.head_dim)
    if None in known:
        return None, "config.json does not name layers, heads and sizes"
    layers, hidden, inner, heads, kv_heads, head_dim = (each or 0 for each in known)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    tied = config.get("tie_word_embeddings")
    tables = 1 if (model_type in TIED if tied is None else tied) else 2
    numbers = tables * shape.vocab_size * hidden
    return numbers + layers * (attention + matrices * hidden * inner), ""
