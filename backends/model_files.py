"""A model's files: where they are, and what of them changes its numbers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO, Final

from lmpool.errors import SettingsError
from lmpool.vocabulary import TOKENIZER_FILES

FULL_HASH_BYTES: Final = 256 << 20
"""Weights up to this size in total are hashed whole; larger ones are sampled."""

SAMPLE_BYTES: Final = 64 << 10
SAMPLES: Final = 64
TENSOR_SAMPLE_BYTES: Final = 4 << 10
MAX_HEADER_BYTES: Final = 100 << 20  # safetensors' own bound

_DOWNLOADED: Final = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.jinja",
    "*.model",
    "*.py",
)
_NOT_DOWNLOADED: Final = ("*/*", "consolidated*")
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
# In this order, the first kind that is there is what engines load.
_WEIGHTS: Final = (
    ("model.safetensors", "model.safetensors.index.json", "*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "*.bin"),
)


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of the model `name`: ``tiny``, a folder, or a Hugging Face hub id.

    A hub id is downloaded, or found in the hub's local cache, at `revision` (a branch, tag or
    commit). Raises `SettingsError` where there is no such model.
    """
    if name == "tiny":
        from lmpool.backends import tiny

        return _checked(Path(tiny.path()), name, revision)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder, name, revision)
    if folder.exists():
        raise SettingsError(f"model={name!r} is a file: name the folder that holds config.json")
    if name.startswith((".", "~")) or folder.is_absolute() or name.count("/") > 1:
        raise SettingsError(f"model={name!r}: there is no such folder")
    return _downloaded(name, revision)


def _checked(folder: Path, name: str, revision: str | None) -> Path:
    if revision is not None:
        raise SettingsError(
            f"revision={revision!r}: model={name!r} is a folder, which has none; leave it out"
        )
    if not (folder / "config.json").is_file():
        raise SettingsError(f"model={name!r}: this folder has no config.json, so it is no model's")
    return folder


def _downloaded(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ModuleNotFoundError:
        raise SettingsError(
            f"model={name!r}: there is no such folder, and models of the Hugging Face hub need "
            "huggingface_hub: pip install 'lmpool[hf]'"
        ) from None

    def download(*patterns: str) -> Path:
        found = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_NOT_DOWNLOADED),
        )
        return Path(found)

    at = "" if revision is None else f" at revision={revision!r}"
    try:
        folder = download(*_DOWNLOADED)
        if not any(folder.glob("*.safetensors")):
            folder = download(*_DOWNLOADED, "*.bin")
    except errors.HFValidationError as error:
        raise SettingsError(
            f"model={name!r} is neither a folder nor a Hugging Face id: {error}"
        ) from None
    except errors.GatedRepoError:
        raise SettingsError(
            f"model={name!r} is gated: ask for access on its Hugging Face page, then set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise SettingsError(f"model={name!r} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise SettingsError(
            f"model={name!r}: no such folder, and no such model on the Hugging Face hub; for a "
            "private one set HF_TOKEN"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise SettingsError(
            f"model={name!r}{at}: no such folder, not in the Hugging Face cache, and the hub "
            "cannot be reached; connect this machine, or name the folder of a copy"
        ) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"model={name!r}{at} cannot be downloaded: {reason}") from error
    if not (folder / "config.json").is_file():
        raise SettingsError(
            f"model={name!r}{at} has no config.json: it is no model for transformers, or its "
            "download was broken off; connect this machine and try again"
        )
    return folder


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
    weights, index = _weights(root)
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


def _weights(root: Path) -> tuple[list[str], list[str]]:
    """The names of the weights that engines load, and of their index."""
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
    return [name for name in (*_TOKENIZERS, "merges.txt") if (root / name).is_file()]


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


def tokenizer_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """The contents of the folder's tokenizer files, by name, and what else a tokenizer needs.

    transformers finds the tokenizer's class by way of config.json, so a config.json with the
    model's type alone is among them. Empty where the folder has no tokenizer.
    """
    root = Path(folder)
    names = sorted(TOKENIZER_FILES - {"config.json"})
    files = {name: (root / name).read_bytes() for name in names if (root / name).is_file()}
    if not files.keys() & set(_TOKENIZERS):
        return {}
    config = json.loads((root / "config.json").read_bytes())
    kept = {key: config[key] for key in ("model_type", "tokenizer_class") if key in config}
    return {**files, "config.json": json.dumps(kept).encode()}
