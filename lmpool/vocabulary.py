"""A pool's vocabulary as its workers publish it: clients need no copy of the model."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from lmpool.errors import WireError

MAX_BYTES = 256 << 20
MAX_TOKENS = 1 << 24

TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "merges.txt",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
"""The only files a client takes from a pool: data, no code."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens` are the bytes of each token id; `files` the tokenizer's files by name."""

    tokens: Sequence[bytes]
    files: Mapping[str, bytes]

    def pack(self) -> bytes:
        """Compressed msgpack."""
        return zlib.compress(
            msgpack.packb({"v": 1, "tokens": list(self.tokens), "files": dict(self.files)}), 6
        )

    @classmethod
    def unpack(cls, data: bytes) -> Vocabulary:
        """Read what `pack` wrote. Raises `WireError` for anything else."""
        inflate = zlib.decompressobj()
        try:
            plain = inflate.decompress(data, MAX_BYTES)
            if inflate.unconsumed_tail:
                raise WireError(f"a vocabulary of more than {MAX_BYTES} bytes")
            if not inflate.eof:
                raise WireError("a vocabulary that was cut short")
            found: Any = msgpack.unpackb(plain, strict_map_key=True, max_array_len=MAX_TOKENS)
            tokens, files = found["tokens"], found["files"]
            sound = (
                found["v"] == 1
                and type(tokens) is list
                and type(files) is dict
                and all(type(token) is bytes for token in tokens)
                and all(type(content) is bytes for content in files.values())
                and TOKENIZER_FILES.issuperset(files)
            )
        except (zlib.error, ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            if isinstance(error, WireError):
                raise
            raise WireError(f"no vocabulary: {error}") from None
        if not sound:
            raise WireError("a vocabulary of another version, or with files we do not take")
        return cls(tokens, files)
