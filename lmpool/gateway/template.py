"""Chat templates: a conversation as the text that a model was taught to read.

A template is a program of the model's maker, and what it is given are words of strangers: it runs
in Jinja's sandbox, as transformers runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from lmpool.checks import said
from lmpool.errors import SettingsError
from lmpool.gateway.errors import ApiError

MAX_TEMPLATE_BYTES: Final = 4 << 20
_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
        *_SPECIAL,
    }
)
"""Names that a caller's own arguments do not take."""


_render: Final[Callable[..., Any]] = render_jinja_template


class ChatTemplate:
    """A template, and the special tokens of a model. Raises `SettingsError` for what is none."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source = source
        self._special = dict(special)
        try:
            self.render([{"role": "user", "content": "?"}])
        except ApiError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise SettingsError(f"no chat template: {said(error.__cause__)}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. Raises `ApiError` for what the template does not take."""
        own = {k: v for k, v in (arguments or {}).items() if k not in RESERVED}
        try:
            rendered, _ = _render(
                [messages],
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **self._special,
                **own,
            )
        except Exception as error:  # whatever a program may come to
            raise ApiError(
                400, f"the chat template does not take it: {said(error)}", param="messages"
            ) from error
        text: str = rendered[0]
        return text


def model_template(files: Mapping[str, bytes]) -> str | None:
    """The template of a model's tokenizer files, if it has one."""
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        data = files.get(name)
        if data is None:
            continue
        try:
            text = data.decode()
            found: Any = text if name.endswith(".jinja") else json.loads(text).get("chat_template")
            if isinstance(found, list):  # several, by name
                found = {each["name"]: each["template"] for each in found}.get("default")
        except (ValueError, AttributeError, TypeError, KeyError):
            continue
        if isinstance(found, str):
            return found
    return None


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """A model's special tokens by the names that templates know."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            read: Any = json.loads(files.get(file, b"{}"))
            for name in _SPECIAL:
                value = read.get(name)
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found[name] = text
        except (ValueError, AttributeError):
            continue
    return found


def read_template(path: Path) -> str:
    """The template of a file. Raises `SettingsError`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(data) > MAX_TEMPLATE_BYTES:
            raise SettingsError(
                f"chat_template={str(path)!r}: more than {MAX_TEMPLATE_BYTES} bytes"
            )
        source = data.decode("utf-8-sig")
        ChatTemplate(source, {})
    except (OSError, UnicodeDecodeError, SettingsError) as error:
        reason = error if isinstance(error, SettingsError) else said(error)
        raise SettingsError(
            f"chat_template={str(path)!r} cannot be used ({reason}): write the path of a file "
            "with a Jinja template"
        ) from None
    return source
