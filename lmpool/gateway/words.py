"""A model's words: text to token ids and back, by what its pool has published."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Final

from lmpool.checks import is_text
from lmpool.errors import LmpoolError, PoolError
from lmpool.gateway.errors import ApiError
from lmpool.producer import NumpyRows, PooledLM
from lmpool.prompt_text import encoder, read_vocabulary
from lmpool.vocabulary import Vocabulary

SHORT: Final = 2000
"""Characters of a text that is encoded at once; a longer one leaves the event loop to others."""


class Words:
    """The tokens of a model, and its tokenizer's files."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        vocab_size: int,
        special: Iterable[int] = (),
        encode: Callable[[str, bool], list[int]] | None = None,
        files: dict[str, bytes] | None = None,
    ) -> None:
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.special = frozenset(special)
        self.files = files or {}
        self._encode = encode

    @classmethod
    def read(cls, lm: PooledLM[NumpyRows]) -> Words:
        """Those of a pool's model; blocking. A pool that published none has ids alone."""
        size = lm.info.vocab_size
        try:
            vocabulary = read_vocabulary(lm)
        except PoolError:
            return cls([], size)
        try:
            encode = _encode_with(lm, vocabulary)
        except (LmpoolError, ImportError, OSError):
            encode = None
        special = _special_ids(vocabulary)
        return cls(vocabulary.tokens, size, special, encode, dict(vocabulary.files))

    async def encode(self, text: str, special: bool = True, param: str = "prompt") -> list[int]:
        """A text's ids; with `special` those around it, as its tokenizer has them.

        Where the text begins with the BOS token there is no second one.
        """
        if not is_text(text):
            raise ApiError(400, "a text that is no UTF-8", param=param)
        if self._encode is None:
            raise ApiError(400, "this pool has no tokenizer: send token ids", param=param)
        if len(text) <= SHORT:
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for."""
        return self.tokens[token] if token < len(self.tokens) else b""

    def text(self, token: int) -> str:
        """One token as text; bytes that are no characters alone are U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    @cached_property
    def texts(self) -> list[str]:
        """Every token as text, by id."""
        return [self.text(token) for token in range(self.vocab_size)]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of ids."""
        hidden = self.special if skip_special else frozenset[int]()
        parts = (self.token_bytes(token) for token in ids if token not in hidden)
        return b"".join(parts).decode("utf-8", "replace")

    @property
    def has_text(self) -> bool:
        """Whether there are tokens as text at all."""
        return bool(self.tokens)


def _encode_with(
    lm: PooledLM[NumpyRows], vocabulary: Vocabulary
) -> Callable[[str, bool], list[int]]:
    """Text to ids, with what is around it or without."""
    if not vocabulary.files:
        plain = encoder(lm, vocabulary)
        return lambda text, special: plain(text)
    bos = lm.info.bos_token_id
    spelled = vocabulary.tokens[bos] if bos is not None and bos < len(vocabulary.tokens) else b""

    def encode(text: str, special: bool) -> list[int]:
        ids = lm.encode(text, bos=None if special else False)
        # A text that says BOS itself, which the tokenizer puts before it once more.
        twice = special and bos is not None and ids[:2] == [bos, bos]
        return ids[1:] if twice and text.encode().startswith(spelled) else ids

    encode("a", True)  # loads the tokenizer, or says why it cannot be
    return encode


def _special_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """The ids of tokens that are no text, as the tokenizer's files say."""
    found: set[int] = set()
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "")):
        data = vocabulary.files.get(name)
        if data is None:
            continue
        try:
            read: Any = json.loads(data)
            if key:
                found |= {token["id"] for token in read[key] if token.get("special")}
            else:
                added = read.get("added_tokens_decoder") or {}
                found |= {int(i) for i, token in added.items() if token.get("special")}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # files of a form of their own: its tokens count as text
    return frozenset(i for i in found if isinstance(i, int))
