"""Tokenizer and vocabulary of a pool's model, from what its workers published."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, cast

from lmpool.checks import check_working_directory, is_text, quoted, said
from lmpool.errors import PoolError, PromptError
from lmpool.model_info import ModelInfo
from lmpool.vocabulary import Vocabulary


class ByteToken(Protocol):
    """A token: its bytes, as which it may be used, and its id.

    genlm-backend's `Token` where that is installed, else lmpool's own.
    """

    @property
    def token_id(self) -> int:
        """Its place in the vocabulary."""
        ...

    @property
    def byte_string(self) -> bytes:
        """Its bytes as plain bytes."""
        ...

    # What bytes has and needs no words: `b"".join(tokens)`, `len(token)`, `token.decode()`.
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __bytes__(self) -> bytes: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str: ...


class Tokenizer(Protocol):
    """What a pool's tokenizer surely can. It is a transformers tokenizer, which can more: say
    ``cast(PreTrainedTokenizerBase, lm.tokenizer)`` where a type checker has to know.
    """

    name_or_path: str

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...

    def __len__(self) -> int: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> list[int]:
        """Text as token ids. With `verbose` a text that is longer than prompts is warned of."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids as text."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> str:
        """A token as the vocabulary spells it."""
        ...

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """The id of a token as the vocabulary spells it."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
    ) -> str:
        """A conversation as the model was taught to read it; `encode` it without special tokens."""
        ...


class Token(bytes):
    """lmpool's own `ByteToken`. Two are equal when their ids are."""

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


def byte_tokens(tokens: Sequence[bytes]) -> list[ByteToken]:
    """Tokens by id: genlm-backend's own `Token` where it is installed, else ours."""
    make: Callable[[int, bytes], ByteToken] = Token
    try:
        from genlm.backend.tokenization import Token as GenlmToken

        make = GenlmToken
    except ImportError:
        pass
    return [make(i, token) for i, token in enumerate(tokens)]


def string_tokens(tokens: Sequence[bytes], tokenizer: Tokenizer) -> list[str]:
    """Tokens as text; those that are no UTF-8 as the tokenizer spells them."""
    strings = []
    for i, token in enumerate(tokens):
        try:
            strings.append(token.decode("utf-8"))
        except UnicodeDecodeError:
            strings.append(tokenizer.convert_ids_to_tokens(i))
    return strings


def encode_conversation(
    tokenizer: Tokenizer,
    info: ModelInfo,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool,
) -> list[int]:
    """The ids of a conversation by the model's chat template; see `BaseLM.encode_chat`."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise PoolError(f"{info.model} has no chat template: encode a text instead")
    try:
        if not all(is_text(message["content"]) for message in messages):
            raise TypeError("a content that is no text in UTF-8")
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=bool(add_generation_prompt)
        )
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    except Exception as error:  # of its template, which is a program of its own
        raise PromptError(
            f"messages={quoted(messages)}: the model's chat template does not take them: write a "
            f"list of {{'role': ..., 'content': ...}} ({said(error)})"
        ) from None


def load_tokenizer(vocabulary: Vocabulary, info: ModelInfo) -> Tokenizer:
    """The model's tokenizer (a transformers tokenizer), from the published files.

    Raises `PoolError` where the pool published none, or transformers is not installed, and
    `SettingsError` where the working directory was deleted.
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
    except FileNotFoundError:
        check_working_directory()
        raise
    try:
        with tempfile.TemporaryDirectory(prefix="lmpool-tokenizer-") as folder:
            for name, content in vocabulary.files.items():
                (Path(folder) / name).write_bytes(content)
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # no room for its files, or files of another transformers
        raise PoolError(
            f"the tokenizer of {info.model} cannot be loaded ({said(error)}): see whether there is "
            "room in the temporary folder, and whether this transformers knows it"
        ) from error
    tokenizer.name_or_path = info.model
    return cast(Tokenizer, tokenizer)
