"""A model's words: text to token ids and back, by what its pool has published."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

from lmpool.checks import is_text
from lmpool.errors import LmpoolError, PoolError
from lmpool.gateway.aside import aside
from lmpool.gateway.errors import CONTEXT_LENGTH, ApiError
from lmpool.producer import NumpyRows, PooledLM
from lmpool.prompt_text import encoder, read_vocabulary
from lmpool.vocabulary import Vocabulary

SHORT: Final = 2000
"""Characters that are encoded at once; more of them leave the event loop to others."""
TOGETHER: Final = 1 << 16
"""Characters of short texts that are encoded in one go."""
MAX_CHARACTERS: Final = 4 << 20
"""Of a text that nothing else bounds: seconds of a processor."""


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

    async def encode(
        self, text: str, special: bool = True, param: str = "prompt", most: int | None = None
    ) -> list[int]:
        """A text's ids, as `encode_all` has them."""
        (found,) = await self.encode_all([text], special, param, most)
        return found

    async def encode_all(
        self,
        texts: Sequence[str],
        special: bool = True,
        param: str = "prompt",
        most: int | None = None,
    ) -> list[list[int]]:
        """The ids of texts; with `special` those around each, as its tokenizer has them.

        Where a text begins with the BOS token there is no second one. One that is longer than
        `most` of the longest tokens, and one that is only scored, is refused before it is read.
        Raises `ApiError`.
        """
        encode = self._encode
        if encode is None:
            raise ApiError(400, "this pool has no tokenizer: send token ids", param=param)
        for text in texts:
            error = self.refused(text, param, most)
            if error is not None:
                raise error
        found: list[list[int]] = []
        for group in _groups(texts):
            if sum(map(len, group)) <= SHORT:
                found += [encode(text, special) for text in group]
            else:
                found += await aside(lambda texts: [encode(text, special) for text in texts], group)
        return found

    def refused(self, text: str, param: str = "prompt", most: int | None = None) -> ApiError | None:
        """Why a text is not read, if it is not; see `encode_all`."""
        if most is None and len(text) > MAX_CHARACTERS:
            return ApiError(
                400, f"a text of {len(text)} characters: send at most {MAX_CHARACTERS}", param=param
            )
        if most is not None and len(text) > (most + 1) * self._longest:
            return ApiError(
                400,
                f"This model's maximum context length is {most} tokens. However, a text of "
                f"{len(text)} characters has more: no token has more than {self._longest}.",
                param=param,
                code=CONTEXT_LENGTH,
            )
        if not is_text(text):
            return ApiError(400, "a text that is no UTF-8", param=param)
        return None

    @cached_property
    def _longest(self) -> int:
        """The bytes of the longest token, and so its characters at most."""
        return max(map(len, self.tokens), default=1)

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


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts, in their order, as many together as are encoded in one go."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > TOGETHER:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text) + 1
    if group:
        yield group


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
