"""Prompts from text, with what a pool has published: no copy of the model is needed.

::

    vocabulary = read_vocabulary(lm)
    ids = encoder(lm, vocabulary)("The capital of")
    row = lm.next_token_logprobs_sync(ids)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmpool.checks import quoted
from lmpool.errors import PromptError
from lmpool.vocabulary import Vocabulary

if TYPE_CHECKING:
    from lmpool.producer import PooledLM

Encode = Callable[[str], list[int]]


def read_vocabulary(lm: PooledLM[object]) -> Vocabulary:
    """Tokens and tokenizer files of the pool's model, as its workers published them.

    Raises `PoolError` where they published none.
    """
    return lm._read_vocabulary()


def encoder(lm: PooledLM[object], vocabulary: Vocabulary, *, quick: bool = False) -> Encode:
    """Text to token ids: transformers' tokenizer where it is installed, else tokenizers'.

    `quick` prefers tokenizers, which needs no seconds to import. A model whose tokens begin with
    the 256 bytes takes bytes. What is no text in UTF-8 (a lone surrogate) is a `PromptError`.
    """
    encode = _encoder(lm, vocabulary, quick)

    def encode_text(text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PromptError(
                f"{quoted(text)}: the prompt is no text in UTF-8: write it without lone "
                "surrogates; where it came from a command line, set PYTHONUTF8=1 or LC_ALL=C.UTF-8"
            ) from None
        return encode(text)

    return encode_text


def _encoder(lm: PooledLM[object], vocabulary: Vocabulary, quick: bool) -> Encode:
    if not vocabulary.files and [*vocabulary.tokens[:256]] == [bytes([i]) for i in range(256)]:
        return lambda text: [*text.encode()]
    tokenizer = vocabulary.files.get("tokenizer.json")
    have = importlib.util.find_spec
    if tokenizer is not None and have("tokenizers") and (quick or not have("transformers")):
        from tokenizers import Tokenizer

        fast = Tokenizer.from_buffer(tokenizer)
        return lambda text: [*fast.encode(text).ids]
    return lm.encode


def decode(tokens: Sequence[bytes], ids: Sequence[int]) -> str:
    """The text of token ids."""
    return b"".join(tokens[i] for i in ids if i < len(tokens)).decode("utf-8", "replace")
