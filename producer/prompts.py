"""Prompts are checked before anything is sent."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lmpool.checks import as_integer, quoted, said
from lmpool.errors import LmpoolError, PromptError


class Tensor(Protocol):
    """A torch tensor, to type checkers that need not find torch."""

    def detach(self) -> object: ...
    def numel(self) -> int: ...


TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor | Iterable[int]
"""A prompt: integers in a list, tuple, numpy array or torch tensor, one-dimensional."""


def prompt_bytes(token_ids: TokenIds, vocab_size: int, max_prompt_tokens: int) -> bytes:
    """The prompt as little-endian uint32 bytes.

    Raises `PromptError` for an empty or too long prompt, and for ids that are not integers in
    ``[0, vocab_size)``; the message names the first such id and its place.
    """
    if type(token_ids) is not list and type(token_ids) is not tuple:
        token_ids = _as_sequence(token_ids, max_prompt_tokens)
    length = len(token_ids)
    if not length:
        raise PromptError("empty prompt: at least one token id is needed, such as BOS")
    if length > max_prompt_tokens:
        raise PromptError(
            f"a prompt of {length} tokens: this pool takes at most {max_prompt_tokens}; "
            "shorten it, or serve the model with a larger max_prompt_tokens"
        )
    kinds = set(map(type, token_ids))
    ids = token_ids if kinds == {int} else _as_integers(token_ids)
    try:
        packed = array("I", ids)
    except OverflowError:  # negative, or no uint32
        packed = None
    if packed is None or max(packed) >= vocab_size:
        place, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise PromptError(
            f"token id {quoted(bad)} at position {place} is outside [0, {vocab_size}): "
            "was the prompt tokenized with this pool's tokenizer?"
        )
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


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


def _as_sequence(token_ids: object, most: int) -> Sequence[int]:
    """Any container of ids as a list, refusing what has another shape or dtype."""
    kind = type(token_ids).__name__
    if isinstance(token_ids, (str, bytes, bytearray, memoryview)):
        raise PromptError(
            f"a prompt of type {kind}: token ids are needed; write lm.tokenizer.encode(text)"
        )
    if isinstance(token_ids, Mapping):
        raise PromptError(f"a prompt of type {kind}: a list of token ids is needed")
    try:
        found = _as_array(token_ids)
        if found is None:
            # One more than may be: there are iterables without end.
            return list(islice(token_ids, most + 1))  # type: ignore[call-overload]
    except LmpoolError:  # of a call that it makes
        raise
    except Exception as error:
        raise PromptError(
            f"a prompt of type {kind}: a list of token ids is needed ({said(error)})"
        ) from error
    if found.ndim != 1:
        raise PromptError(
            f"a prompt of shape {found.shape}: one dimension is needed; "
            "for several prompts call batch_next_token_logprobs"
        )
    if found.size and found.dtype.kind not in "iu":
        raise PromptError(f"a prompt of dtype {found.dtype}: integers are needed")
    ids: list[int] = found.tolist()
    return ids


def _as_array(token_ids: Any) -> npt.NDArray[Any] | None:
    """A numpy array or a torch tensor, on any device, as an array; None for anything else."""
    if isinstance(token_ids, np.ndarray):
        return token_ids
    if not hasattr(token_ids, "detach"):
        return None
    found: npt.NDArray[Any] = token_ids.detach().cpu().numpy()
    return found


def _as_integers(token_ids: Sequence[Any]) -> list[int]:
    """Ids of integer types other than int, as int; bools and floats are refused."""
    ids = []
    for place, token in enumerate(token_ids):
        number = as_integer(token)
        if number is None:
            kind = type(token).__name__
            raise PromptError(
                f"token id {quoted(token)} at position {place} is a {kind}, not an integer"
            )
        ids.append(number)
    return ids
