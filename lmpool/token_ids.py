"""Token ids as callers give them: lists, ranges, arrays of NumPy, tensors of torch."""

from __future__ import annotations

import marshal
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from itertools import islice
from typing import Any, Final, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lmpool.checks import as_integer, is_integer, quoted, said
from lmpool.errors import LmpoolError, PromptError


class Tensor(Protocol):
    """A torch tensor, to type checkers that need not find torch."""

    def detach(self) -> object: ...
    def numel(self) -> int: ...


TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor | Iterable[int]
"""Integers in a list, tuple, numpy array or torch tensor, one-dimensional: a prompt, for one."""

PROMPT = "a prompt"


def listed(
    given: TokenIds,
    most: int,
    what: str = PROMPT,
    of: str = "token ids",
    *,
    any_order: bool = False,
) -> Sequence[int]:
    """Integers in any container, of which at most one more than `most` is read.

    Raises `PromptError` for what has another shape or dtype, and, but where they may come in
    `any_order`, for a set; `what` says what it was given as, and `of` what they are.
    """
    if type(given) is list or type(given) is tuple:
        return given
    kind = type(given).__name__
    if isinstance(given, (str, bytes, bytearray, memoryview)):
        hint = "; write lm.tokenizer.encode(text)" if what == PROMPT else ""
        raise PromptError(f"{what} of type {kind}: {of} are needed{hint}")
    if isinstance(given, Mapping):
        raise PromptError(f"{what} of type {kind}: a list of {of} is needed")
    if isinstance(given, (set, frozenset)) and not any_order:
        raise PromptError(f"{what} of type {kind}, which has no order: write a list of {of}")
    try:
        found = _as_array(given)
        if found is None:
            # One more than may be: there are iterables without end.
            return list(islice(cast(Iterable[int], given), most + 1))
    except LmpoolError:  # of a call that it makes
        raise
    except Exception as error:
        raise PromptError(
            f"{what} of type {kind}: a list of {of} is needed ({said(error)})"
        ) from error
    if found.ndim != 1:
        hint = (
            "; for several prompts call a batch_ method, such as batch_next_token_logprobs"
            if what == PROMPT
            else ""
        )
        raise PromptError(f"{what} of shape {found.shape}: one dimension is needed{hint}")
    if found.size and found.dtype.kind not in "iu":
        raise PromptError(f"{what} of dtype {found.dtype}: integers are needed")
    ids: list[int] = found.tolist()
    return ids


def held(given: Any, most: int, what: str) -> Any:
    """What a caller gave, as it is now, for what may be read again: an iterator is read, one more
    than `most` at most, a list, an array or a tensor is copied, and so are those in a list.

    What else it is stays, to be refused where it is checked. Raises `PromptError` for an iterator
    that fails.
    """
    found = _held_by_itself(given, most, what)
    if type(found) in (list, tuple) and len(found) and not is_integer(found[0]):
        return type(found)([_held_by_itself(each, most, what) for each in found])
    return found


def _held_by_itself(given: Any, most: int, what: str) -> Any:
    if isinstance(given, (set, frozenset)):  # which `listed` is to know
        return frozenset(given)
    if isinstance(given, (list, array, Set, ValuesView)):
        return list(given)
    if isinstance(given, Iterator):
        try:
            return list(islice(given, most + 1))
        except LmpoolError:  # of a call that it makes
            raise
        except Exception as error:
            raise PromptError(
                f"{what} of type {type(given).__name__}: a list of token ids is needed "
                f"({said(error)})"
            ) from error
    if isinstance(given, np.ndarray):
        if given.base is None and not given.flags.writeable:
            return given
        copy = given.copy()
        copy.flags.writeable = False
        return copy
    if hasattr(given, "detach") and hasattr(given, "clone"):
        try:
            return given.detach().clone()
        except Exception:  # of the value's own, which is told where its ids are read
            return given
    return given


def packed(ids: Sequence[int], vocab_size: int, what: str = "") -> bytes:
    """Listed ids as little-endian uint32 bytes.

    Raises `PromptError` for what is no integer in ``[0, vocab_size)``; the message names the first
    such id and its place. `what` is said before it.
    """
    kinds = set(map(type, ids))
    integers = ids if kinds <= {int} else _as_integers(ids, what)
    try:
        found = array("I", integers)
    except OverflowError:  # negative, or no uint32
        found = None
    if found is None or (found and max(found) >= vocab_size):
        place, bad = next((i, t) for i, t in enumerate(integers) if not 0 <= t < vocab_size)
        raise PromptError(
            f"{what}token id {quoted(bad)} at position {place} is outside [0, {vocab_size}): "
            "was it made with this pool's tokenizer?"
        )
    if sys.byteorder != "little":
        found.byteswap()
    return found.tobytes()


_ITEM: Final = np.dtype([("kind", "u1"), ("value", "<u4")])
"""Python's own form of a small integer, and of the beginning of a list or tuple."""
_INTEGER: Final = ord("i")
_RUN: Final = 1 << 18
"""Tokens of prompts that are looked at together, or those of one prompt more."""


def packed_all(prompts: Sequence[TokenIds], vocab_size: int, max_tokens: int) -> list[bytes] | None:
    """Prompts as `packed` gives each, if all are lists or tuples of 1 to `max_tokens` plain
    integers in ``[0, vocab_size)``; None where one is another, or may not be: each is asked alone.

    `marshal` writes many at a time, and these are looked at together. Every item, and the beginning
    of every list, is a byte that says its kind and four of its value: the first that is another is
    seen where it begins, whatever stands in it, as all before it are of one size.
    """
    if not prompts or not set(map(type, prompts)) <= {list, tuple}:
        return None
    lists: Any = prompts if type(prompts) in (list, tuple) else list(prompts)
    sizes = np.array(list(map(len, lists)))
    if sizes.min() < 1 or sizes.max() > max_tokens:
        return None
    packed: list[bytes] = []
    # What is looked at together takes several times its room, and no other thread runs while it is
    # written.
    runs = np.flatnonzero(np.diff(np.cumsum(sizes) // _RUN, prepend=-1)).tolist()
    for start, end in zip(runs, [*runs[1:], len(prompts)], strict=True):
        found = _packed_run(lists[start:end], sizes[start:end], vocab_size)
        if found is None:
            return None
        packed += found
    return packed


def _packed_run(prompts: Any, sizes: npt.NDArray[np.int64], vocab_size: int) -> list[bytes] | None:
    try:
        items = np.frombuffer(marshal.dumps(prompts, 2), _ITEM)
    except ValueError:  # an item without such a form, or of another size
        return None
    begins = np.cumsum(sizes + 1) - sizes
    if items.size != 1 + len(prompts) + sizes.sum():
        return None
    is_integer = np.ones(items.size, bool)
    is_integer[0] = is_integer[begins] = False
    ids = items["value"][is_integer]
    if (items["kind"][is_integer] != _INTEGER).any() or ids.max() >= vocab_size:
        return None
    data = ids.tobytes()
    ends = (4 * np.cumsum(sizes)).tolist()
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _as_array(token_ids: Any) -> npt.NDArray[Any] | None:
    """A numpy array or a torch tensor, on any device, as an array; None for anything else."""
    if isinstance(token_ids, np.ndarray):
        return token_ids
    if not hasattr(token_ids, "detach"):
        return None
    found: npt.NDArray[Any] = token_ids.detach().cpu().numpy()
    return found


def _as_integers(token_ids: Sequence[Any], what: str) -> list[int]:
    """Ids of integer types other than int, as int; bools and floats are refused."""
    ids = []
    for place, token in enumerate(token_ids):
        number = as_integer(token)
        if number is None:
            kind = type(token).__name__
            raise PromptError(
                f"{what}token id {quoted(token)} at position {place} is a {kind}, not an integer"
            )
        ids.append(number)
    return ids
