"""A model's files: where they are, what identifies them, and what they say."""

from __future__ import annotations

import importlib
import json
import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from lmpool.backends.model_config import ModelConfig
from lmpool.backends.model_identity import TOKENIZERS, model_identity
from lmpool.backends.vocabulary import served_byte_vocabulary
from lmpool.errors import SettingsError
from lmpool.vocabulary import TOKENIZER_FILES

logger = logging.getLogger(__name__)

_DOWNLOADED: Final = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.jinja",
    "*.model",
    "*.py",
)
_NOT_DOWNLOADED: Final = ("*/*", "consolidated*")


class ModelFiles:
    """The files of the model `name`, which is ``tiny``, a folder, or a Hugging Face hub id.

    What an engine asks of them before it loads the model, or without. With `trust_remote_code` the
    Python files among them count, and may be run. Raises `SettingsError` where there is no such
    model.
    """

    def __init__(
        self, name: str, revision: str | None = None, *, trust_remote_code: bool = False
    ) -> None:
        self.folder = resolve_model(name, revision)
        self._code = trust_remote_code

    def identity(self) -> dict[str, str]:
        """What of them changes the model's numbers: see `model_identity`."""
        return model_identity(self.folder, code=self._code)

    @cached_property
    def config(self) -> ModelConfig:
        """What config.json and generation_config.json say. Raises `SettingsError`."""
        return ModelConfig(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer of transformers, or None where there is none that loads."""
        if not self.tokenizer_files():
            return None
        transformers: Any = importlib.import_module("transformers")
        try:
            return transformers.AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=self._code
            )
        except Exception as error:  # rows can be served without one
            logger.warning("the tokenizer of %s cannot be loaded: %s", self.folder, error)
            return None

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name, and what else a client needs to load it."""
        return tokenizer_files(self.folder)

    def byte_vocabulary(self) -> list[bytes] | None:
        """The bytes of each token id; None without a tokenizer that tells them."""
        return served_byte_vocabulary(self.tokenizer)


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of the model `name`: ``tiny``, a folder, or a Hugging Face hub id.

    A hub id is downloaded, or found in the hub's local cache, at `revision` (a branch, tag or
    commit). Raises `SettingsError` where there is no such model.
    """
    if name == "tiny":
        from lmpool.backends import tiny

        return _checked(Path(tiny.path()), name, revision)
    folder = Path(os.path.expanduser(name))
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


def tokenizer_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """The contents of the folder's tokenizer files, by name, and what else a tokenizer needs.

    transformers finds the tokenizer's class by way of config.json, so a config.json with the
    model's type alone is among them. Empty where the folder has no tokenizer.
    """
    root = Path(folder)
    names = sorted(TOKENIZER_FILES - {"config.json"})
    files = {name: (root / name).read_bytes() for name in names if (root / name).is_file()}
    if not files.keys() & set(TOKENIZERS):
        return {}
    config = json.loads((root / "config.json").read_bytes())
    kept = {key: config[key] for key in ("model_type", "tokenizer_class") if key in config}
    return {**files, "config.json": json.dumps(kept).encode()}
