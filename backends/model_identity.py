"""What of a model's files changes its numbers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO, Final

from lmpool.errors import SettingsError

FULL_HASH_BYTES: Final = 256 << 20
"""Weights up to this size in total are hashed whole; larger ones are sampled."""

SAMPLE_BYTES: Final = 64 << 10
SAMPLES: Final = 64
TENSOR_SAMPLE_BYTES: Final = 4 << 10
MAX_HEADER_BYTES: Final = 100 << 20  # safetensors' own bound

TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
"""Files that each are enough for a tokenizer."""

# In this order, the first kind that is there is what engines load.
_WEIGHTS: Final = (
    ("model.safetensors", "model.safetensors.index.json", "*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "*.bin"),
)


def model_identity(folder: str | os.PathLike[str], *, code: bool = False) -> dict[str, str]:
    """What of a model's files changes its numbers: file name -> ``<bytes>:<hash>``, sorted.

    That is config.json, the weights that engines load and their index, and the tokenizer, which
    gives the token ids their meaning; with `code`, the Python files too. Equal files give an equal
    identity in a plain folder, in a hub snapshot and on another machine: no time and no path is
    part of it.

    The hash is blake2b of the whole file. Of weights beyond 256 MiB in total it covers 64 evenly
    spaced pieces of 64 KiB a file and, in safetensors files, the header and 4 KiB from the middle
    of every tensor: seconds instead of minutes, and no tensor can be exchanged unseen.

    Raises `SettingsError` where weights are missing.
    """
    root = Path(folder)
    weights, index = weight_files(root)
    missing = [name for name in weights if not (root / name).is_file()]
    if missing or not weights:
        what = f"lacks {', '.join(missing)}" if missing else "has no weights (*.safetensors, *.bin)"
        raise SettingsError(f"the model folder {str(root)!r} {what}: copy or download it again")
    sampled = sum((root / name).stat().st_size for name in weights) > FULL_HASH_BYTES
    others = ["config.json", *index, *_token_meanings(root)]
    if code:
        others.extend(path.name for path in root.glob("*.py"))
    identity = {name: _describe(root / name, sampled=sampled) for name in weights}
    identity.update({name: _describe(root / name, sampled=False) for name in others})
    return dict(sorted(identity.items()))


def weight_files(root: Path) -> tuple[list[str], list[str]]:
    """The names of the weights in a folder that engines load, and of their index."""
    for single, index, pattern in _WEIGHTS:
        if (root / single).is_file():
            return [single], []
        if (root / index).is_file():
            try:
                shards = set(json.loads((root / index).read_bytes())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError):
                raise SettingsError(
                    f"{str(root / index)!r} is no index of weights: download the model again"
                ) from None
            return sorted(map(str, shards)), [index]
        if found := sorted(path.name for path in root.glob(pattern)):
            return found, []
    return [], []


def _token_meanings(root: Path) -> list[str]:
    if (root / "tokenizer.json").is_file():
        return ["tokenizer.json"]
    return [name for name in (*TOKENIZERS, "merges.txt") if (root / name).is_file()]


def _describe(path: Path, *, sampled: bool) -> str:
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if sampled:
            for start, length in _samples(file, size, path.suffix == ".safetensors"):
                file.seek(start)
                digest.update(file.read(length))
        else:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return f"{size}:{digest.hexdigest()}"


def _samples(file: BinaryIO, size: int, safetensors: bool) -> list[tuple[int, int]]:
    """Which parts of a weights file to hash, as (start, length)."""
    last = max(0, size - SAMPLE_BYTES)
    parts = [(last * i // (SAMPLES - 1), SAMPLE_BYTES) for i in range(SAMPLES)]
    return parts + _tensor_samples(file, size) if safetensors else parts


def _tensor_samples(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    header_size = int.from_bytes(file.read(8), "little")
    if header_size > min(size, MAX_HEADER_BYTES):
        return []
    try:
        header = json.loads(file.read(header_size))
        ends = [t["data_offsets"] for name, t in header.items() if name != "__metadata__"]
        middles = sorted({(int(start) + int(end)) // 2 for start, end in ends})
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # no safetensors file; the engine that loads it will say so
    data = 8 + header_size
    half = TENSOR_SAMPLE_BYTES // 2
    return [(0, data), *((max(data, data + m - half), TENSOR_SAMPLE_BYTES) for m in middles)]
