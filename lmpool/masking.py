"""What is shown of settings that may hold secrets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from lmpool.server_url import mask_url

SECRET: Final = {"token", "password", "passwd", "secret", "key", "apikey", "credentials"}
"""The words in the names of engines' options that nobody is shown: `hf_token` has one, and
`max_num_batched_tokens` and `tokenizer` none."""
_SECRETS: Final = {f"{word}s" for word in SECRET}
"""Names of several."""


def mask_secrets(value: Any, *, secret: bool = False) -> Any:
    """A value of settings as JSON has it, without what is secret in it.

    Below a name that says so, and where it is `secret` itself, no text is shown: tokens may be in a
    list. Numbers are none.
    """
    match value:
        case dict():
            return {
                name: mask_secrets(each, secret=secret or _is_secret(str(name)))
                for name, each in value.items()
            }
        case tuple() | list():
            return [mask_secrets(each, secret=secret) for each in value]
        case None | bool() | int() | float():
            return value
        case _ if secret:
            return "***"
        case str() if "://" in value:
            return " ".join(map(mask_url, value.split(" ")))
        case Path():
            return str(value)
        case _:
            return value


def mask_text(text: str) -> str:
    """Options as they are written, of which it is not known what is secret: all or nothing."""
    names = re.findall(r"[\w-]+", text)
    return "***" if "://" in text or any(map(_is_secret, names)) else text


def _is_secret(name: str) -> bool:
    name = name.lower()
    return name in _SECRETS or not SECRET.isdisjoint(re.split(r"[^a-z0-9]+", name))
