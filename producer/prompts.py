"""Prompts are checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from lmpool.checks import said
from lmpool.errors import LmpoolError, PromptError
from lmpool.token_ids import TokenIds, listed, packed


def prompt_bytes(token_ids: TokenIds, vocab_size: int, max_prompt_tokens: int) -> bytes:
    """The prompt as little-endian uint32 bytes.

    Raises `PromptError` for an empty or too long prompt, and for ids that are not integers in
    ``[0, vocab_size)``; the message names the first such id and its place.
    """
    ids = listed(token_ids, max_prompt_tokens)
    length = len(ids)
    if not length:
        raise PromptError("empty prompt: at least one token id is needed, such as BOS")
    if length > max_prompt_tokens:
        raise PromptError(
            f"a prompt of {length} tokens: this pool takes at most {max_prompt_tokens}; "
            "shorten it, or serve the model with a larger max_prompt_tokens"
        )
    return packed(ids, vocab_size)


def several(prompts: object) -> Iterable[TokenIds]:
    """The prompts of a batch, one after another, of whatever can be gone through.

    Raises `PromptError` for what cannot be, also midway.
    """
    if type(prompts) is list or type(prompts) is tuple:
        return prompts
    return _read(prompts)


def _read(prompts: object) -> Iterator[TokenIds]:
    kind = type(prompts).__name__
    if isinstance(prompts, (str, bytes, bytearray, memoryview, Mapping)):
        raise PromptError(f"prompts of type {kind}: a list of prompts is needed")
    try:
        yield from cast(Iterable[TokenIds], prompts)
    except LmpoolError:  # of a call that it makes
        raise
    except Exception as error:
        raise PromptError(
            f"prompts of type {kind}: a list of prompts is needed ({said(error)})"
        ) from error
