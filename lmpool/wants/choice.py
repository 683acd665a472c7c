"""Which tokens may be drawn: as callers say it, and in one form for each set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lmpool.errors import JobFormatError, PromptError
from lmpool.token_ids import TokenIds, listed, packed

TokenSet: TypeAlias = TokenIds | npt.NDArray[np.int32]
"""Token ids; or, where it is an array or tensor of int32, a packed mask, [ceil(vocab_size / 32)] or
[1, ceil(vocab_size / 32)]: bit i of word i // 32 stands for token i, as xgrammar has it."""

Form = Literal["only", "but", "mask"]
MAX_IDS: Final = 1 << 20
"""Ids of a set that are read before the vocabulary's size is known."""
MAX_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of tokens, in the smallest of three forms: ``only`` these ids, all ``but`` these, or a
    ``mask`` of a bit a token. Ids are ascending little-endian uint32, words little-endian int32."""

    form: Form
    data: bytes

    @classmethod
    def of(cls, allowed: TokenSet | None, excluded: TokenSet | None, size: int) -> Choice | None:
        """What is allowed and not excluded, of a vocabulary of `size`; None is every token.

        Raises `PromptError` for what are no ids of it, and where nothing is left.
        """
        may = np.ones(size, bool) if allowed is None else _members(allowed, size, "allowed")
        if not may.any():
            raise PromptError("allowed: at least one token is needed")
        if excluded is not None:
            may &= ~_members(excluded, size, "excluded")
            if not may.any():
                raise PromptError("excluded: every token that is allowed is excluded, none is left")
        return cls._of_members(may)

    @classmethod
    def _of_members(cls, may: npt.NDArray[np.bool_]) -> Choice | None:
        """The one form of a set that is not empty."""
        size, few, many = may.size, np.flatnonzero(may), np.flatnonzero(~may)
        if not many.size:
            return None
        if min(few.size, many.size) * 32 > size:
            bits = np.packbits(may, bitorder="little").tobytes()
            return cls("mask", bits.ljust(_mask_bytes(size), b"\0"))
        if few.size <= many.size:
            return cls("only", few.astype("<u4").tobytes())
        return cls("but", many.astype("<u4").tobytes())

    @classmethod
    def read(cls, form: object, data: object) -> Choice | None:
        """As it travels: ``None, None`` for every token. Raises `JobFormatError`."""
        if form is None and data is None:
            return None
        if form not in ("only", "but", "mask"):
            raise JobFormatError(f"unknown form {form!r:.40} of a set of tokens")
        if not isinstance(data, bytes) or not 0 < len(data) <= MAX_BYTES or len(data) % 4:
            raise JobFormatError("a set of tokens is not a positive number of uint32")
        return cls(form, data)

    def checked(self, size: int) -> Choice | None:
        """Of a vocabulary of `size`, in the one form of each set. Raises `PromptError`."""
        try:
            known = Choice.read(self.form, self.data)
        except JobFormatError as error:
            raise PromptError(f"allowed: {error}") from None
        if known is None:
            return None
        wrong = known.misfit(size)
        if wrong is not None:
            raise PromptError(f"allowed: {wrong}")
        return self._of_members(known.members(size))

    def misfit(self, size: int) -> str | None:
        """Why it is no set of tokens of a vocabulary of `size`, or an empty one."""
        if self.form == "mask":
            if len(self.data) != _mask_bytes(size):
                return f"a mask of {len(self.data)} bytes: {_mask_bytes(size)} expected"
        elif int(np.frombuffer(self.data, "<u4").max()) >= size:
            largest = int(np.frombuffer(self.data, "<u4").max())
            return f"token id {largest}: below {size} expected"
        return None if self.members(size).any() else "no token may be drawn"

    def members(self, size: int) -> npt.NDArray[np.bool_]:
        """Which tokens are in it, bool [size]."""
        if self.form == "mask":
            return _bits(np.frombuffer(self.data, np.uint8), size)
        found = np.full(size, self.form == "but")
        found[np.frombuffer(self.data, "<u4")] = self.form == "only"
        return found


def _mask_bytes(size: int) -> int:
    return (size + 31) // 32 * 4


def _bits(words: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.bool_]:
    # A last word may be longer than the vocabulary, and have anything there.
    return np.unpackbits(words, count=size, bitorder="little").view(bool)


def _members(given: TokenSet, size: int, name: str) -> npt.NDArray[np.bool_]:
    """What a caller gave as bool [size]. Raises `PromptError`."""
    words = _mask_words(given)
    if words is not None:
        shape = ((size + 31) // 32,)
        if words.shape not in (shape, (1, *shape)):
            raise PromptError(
                f"{name} of shape {words.shape}, int32: a packed mask of this pool's vocabulary "
                f"has the shape {shape}; token ids are a list, or int64"
            )
        if words.ndim == 1 and _may_be_ids(words, size):
            raise PromptError(
                f"{name} of shape {words.shape}, int32, may be token ids or a packed mask: write "
                f"ids as a list, or int64, and a mask as mask[None], of shape {(1, *shape)}"
            )
        return _bits(np.ascontiguousarray(words, "<i4").view(np.uint8), size)
    ids = listed(given, size, name, any_order=True)
    if len(ids) > size:
        raise PromptError(f"{name} of more than {size} ids: the vocabulary has no more")
    found = np.zeros(size, bool)
    found[np.frombuffer(packed(ids, size, f"{name}: "), "<u4")] = True
    return found


def _may_be_ids(words: npt.NDArray[np.int32], size: int) -> bool:
    """Whether these could be ids that some answer has, of which there happen to be as many.

    Of a mask most words are 0, or some are larger than any id, or negative; of ids one may be 0.
    """
    count = int(np.count_nonzero(words))
    some = 2 * count > words.size or count + 1 == words.size
    return some and bool(words.min() >= 0 and words.max() < size)


def _mask_words(given: Any) -> npt.NDArray[np.int32] | None:
    """An array or tensor of int32; None for anything else."""
    try:
        found = given.detach().cpu().numpy() if hasattr(given, "detach") else given
    except Exception:  # of the value's own, which is told where its ids are read
        return None
    if not isinstance(found, np.ndarray) or found.dtype.kind != "i" or found.dtype.itemsize != 4:
        return None
    return found
