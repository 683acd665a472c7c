"""Prompts are checked before anything is sent."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lmpool.errors import PromptError


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
        token_ids = _as_sequence(token_ids)
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
            f"token id {bad} at position {place} is outside [0, {vocab_size}): "
            "was the prompt tokenized with this pool's tokenizer?"
        )
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _as_sequence(token_ids: Any) -> Sequence[int]:
    """Any container of ids as a list, refusing what has another shape or dtype."""
    if isinstance(token_ids, (str, bytes)):
        raise PromptError(
            f"a prompt of type {type(token_ids).__name__}: token ids are needed; "
            "write lm.tokenizer.encode(text)"
        )
    if hasattr(token_ids, "detach"):  # a torch tensor, on any device
        token_ids = token_ids.detach().cpu().numpy()
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1:
            raise PromptError(
                f"a prompt of shape {token_ids.shape}: one dimension is needed; "
                "for several prompts call batch_next_token_logprobs"
            )
        if token_ids.size and token_ids.dtype.kind not in "iu":
            raise PromptError(f"a prompt of dtype {token_ids.dtype}: integers are needed")
        ids: list[int] = token_ids.tolist()
        return ids
    try:
        return list(token_ids)
    except TypeError:
        raise PromptError(
            f"a prompt of type {type(token_ids).__name__}: a list of token ids is needed"
        ) from None


def _as_integers(token_ids: Sequence[Any]) -> list[int]:
    """Ids of integer types other than int, as int; bools and floats are refused."""
    ids = []
    for place, token in enumerate(token_ids):
        # A 0-d tensor or numpy bool answers __index__ too: look at the value's own kind.
        kind = getattr(getattr(token, "dtype", None), "kind", "i")
        if (
            isinstance(token, (bool, np.bool_))
            or kind == "b"
            or "bool" in str(getattr(token, "dtype", ""))
        ):
            raise PromptError(f"token id {token!r} at position {place} is a bool, not an integer")
        try:
            ids.append(operator.index(token))
        except TypeError:
            raise PromptError(
                f"token id {token!r:.60} at position {place} is a {type(token).__name__}, "
                "not an integer"
            ) from None
    return ids
