"""Tokenizer and vocabulary of a pool's model, from what its workers published."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmpool.errors import PoolError
from lmpool.model_info import ModelInfo
from lmpool.vocabulary import Vocabulary


class Token(bytes):
    """A token: its bytes, and its id. Two tokens are equal when their ids are."""

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        token = super().__new__(cls, byte_string)
        token.token_id = token_id
        return token

    @property
    def byte_string(self) -> bytes:
        """The token's bytes as plain bytes."""
        return bytes(self)

    def __eq__(self, other: object) -> bool:
        return self.token_id == other.token_id if isinstance(other, Token) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return self.token_id != other.token_id if isinstance(other, Token) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={bytes(self)!r})"

    def __reduce__(self) -> tuple[type[Token], tuple[int, bytes]]:
        return Token, (self.token_id, bytes(self))


def byte_tokens(tokens: Sequence[bytes]) -> list[Any]:
    """Tokens by id: genlm-backend's own `Token` where it is installed, else ours."""
    kind: Any = Token
    try:
        from genlm.backend.tokenization import Token as GenlmToken

        kind = GenlmToken
    except ImportError:
        pass
    return [kind(token_id=i, byte_string=token) for i, token in enumerate(tokens)]


def string_tokens(tokens: Sequence[bytes], tokenizer: Any) -> list[str]:
    """Tokens as text; those that are no UTF-8 as the tokenizer spells them."""
    strings = []
    for i, token in enumerate(tokens):
        try:
            strings.append(token.decode("utf-8"))
        except UnicodeDecodeError:
            strings.append(tokenizer.convert_ids_to_tokens(i))
    return strings


def load_tokenizer(vocabulary: Vocabulary, info: ModelInfo) -> Any:
    """The model's tokenizer (a transformers tokenizer), from the published files.

    Raises `PoolError` where the pool published none, or transformers is not installed.
    """
    if not vocabulary.files:
        raise PoolError(f"the {info.engine} engine of this pool has no tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise PoolError(
            "the tokenizer needs transformers: pip install transformers. Token ids, rows and "
            "byte_vocab work without it"
        ) from None
    with tempfile.TemporaryDirectory(prefix="lmpool-tokenizer-") as folder:
        for name, content in vocabulary.files.items():
            (Path(folder) / name).write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.name_or_path = info.model
    return tokenizer
