"""What a model's JSON files say of it, for engines that have no transformers model to ask."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lmpool.backends.model_files import tokenizer_files
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

_LONGEST_PROMPT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len")


class ConfigFiles:
    """config.json and generation_config.json of a model's folder.

    Raises `SettingsError` where config.json is no JSON object.
    """

    def __init__(self, folder: Path) -> None:
        self._generation = _read(folder / "generation_config.json")
        outer = _read(folder / "config.json")
        if not outer:
            raise SettingsError(f"{str(folder / 'config.json')!r} is no JSON object")
        text = outer.get("text_config")
        # Of a model of text and pictures, only the text is served.
        self.config: Mapping[str, Any] = {**outer, **text} if isinstance(text, dict) else outer

    @property
    def dtype(self) -> str | None:
        """The dtype that the model was saved for."""
        found = self.config.get("dtype", self.config.get("torch_dtype"))
        return found if isinstance(found, str) else None

    def rope_of_before(self) -> dict[str, Any]:
        """``rope_theta`` and ``rope_scaling``, where config.json has ``rope_parameters`` instead.

        transformers 5 writes those; who reads the old names only would take a default for them.
        """
        found = self.config.get("rope_parameters")
        if not isinstance(found, dict) or "rope_theta" not in found or "rope_theta" in self.config:
            return {}
        rope: dict[str, Any] = {"rope_theta": found["rope_theta"]}
        if found.get("rope_type", "default") != "default":
            rope["rope_scaling"] = {k: v for k, v in found.items() if k != "rope_theta"}
        return rope

    def longest_prompt(self, wanted: int | None) -> int:
        """The longest prompt to serve: the model's own bound, or fewer tokens where `wanted`."""
        if wanted is not None and (type(wanted) is not int or wanted < 1):
            raise SettingsError(f"max_prompt_tokens={wanted!r}: a positive integer expected")
        known = [self.config.get(name) for name in _LONGEST_PROMPT_NAMES]
        bounds = [bound for bound in known if type(bound) is int and bound > 0]
        if not bounds:
            if wanted is None:
                raise SettingsError(
                    "the model's config.json names no longest prompt: write one as "
                    "max_prompt_tokens"
                )
            return wanted
        if wanted is not None and wanted > bounds[0]:
            raise SettingsError(
                f"max_prompt_tokens={wanted}: the model takes {bounds[0]} tokens; write that or "
                "less"
            )
        return wanted or bounds[0]

    def special_tokens(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """The ids called `name` (``eos_token_id``), by the first file that knows one."""
        for source in (self._generation, self.config):
            value = source.get(name)
            found = value if isinstance(value, list) else [value]
            ids = [token for token in found if type(token) is int and 0 <= token < vocab_size]
            if ids:
                return tuple(dict.fromkeys(ids))
        return ()

    def special_token(self, name: str, vocab_size: int) -> int | None:
        """The first of them."""
        return next(iter(self.special_tokens(name, vocab_size)), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SettingsError(f"{str(path)!r} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in `folder`, or None where there is none that loads."""
    if not tokenizer_files(folder):
        return None
    transformers: Any = importlib.import_module("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # rows can be served without one
        logger.warning("the tokenizer of %s cannot be loaded: %s", folder, error)
        return None
