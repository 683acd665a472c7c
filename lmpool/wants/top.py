"""The want of the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from lmpool.checks import as_integer, quoted
from lmpool.errors import PromptError
from lmpool.model_info import ModelInfo
from lmpool.wants import packing
from lmpool.wants.answers import Logprobs, TokenArray, TopLogprobs
from lmpool.wants.of_row import OfRow

MAX_K: Final = 2**24 - 1
_BLOCK: Final = 64
"""Entries of a row of which first the greatest alone is looked at."""


@dataclass(frozen=True, slots=True)
class Top(OfRow[TopLogprobs]):
    """The `k` likeliest next tokens, their log-probabilities, and the mass of all others."""

    kind: ClassVar[str] = "top"
    answer_type: ClassVar[type[TopLogprobs]] = TopLogprobs
    form: ClassVar[int] = 2

    k: int = 20

    def checked(self, info: ModelInfo) -> Top:
        """With `k` as int. Raises `PromptError` where it is not 1 to `vocab_size`."""
        k = as_integer(self.k)
        if k is None or not 1 <= k <= info.vocab_size:
            raise PromptError(
                f"k={quoted(self.k)}: write an integer from 1 to {info.vocab_size}, "
                "the size of this pool's vocabulary"
            )
        return self if type(self.k) is int else Top(k)

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about."""
        return 8 * self.k

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        return [self.k]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Top:
        """Read `fields`. Raises `JobFormatError`."""
        (k,) = packing.expect(cls.kind, fields, 1)
        return cls(packing.expect_integer("k", k, 1, MAX_K))

    def misfit(self, vocab_size: int) -> str | None:
        """Why rows of this size cannot answer it; None where they can."""
        return None if self.k <= vocab_size else f"k={self.k}: at most {vocab_size} expected"

    def of_row(self, logprobs: Logprobs) -> TopLogprobs:
        """That of a row, float32 [vocab_size]."""
        ids = likeliest(logprobs, self.k)
        others = logprobs.copy()
        others[ids] = -np.inf
        return TopLogprobs(ids, logprobs[ids], np.float32(log_mass(others)))

    def pack(self, answer: TopLogprobs, vocab_size: int) -> bytes:
        """An answer as it is stored."""
        return packing.pack(
            self.form,
            packing.floats(answer.rest),
            packing.floats(answer.logprobs),
            packing.ids(answer.token_ids, vocab_size),
        )

    def decode_alike(self, stored: Sequence[bytes], info: ModelInfo) -> list[TopLogprobs] | None:
        """What `decode` reads of several answers to equal wants."""
        middle = 4 + 4 * self.k
        size = middle + self.k * packing.id_bytes(info.vocab_size)
        numbers = packing.alike(self.form, stored, size)
        if numbers is None:
            return None
        found = packing.floats_alike(numbers[:, :middle])
        ids = packing.ids_alike(numbers[:, middle:], info.vocab_size)
        if found is None or ids is None:
            return None
        answers = []
        for mine, values in zip(ids, found, strict=True):
            # Copies: who keeps one answer must not keep the memory of all.
            token_ids, logprobs = mine.copy(), values[1:].copy()
            token_ids.flags.writeable = logprobs.flags.writeable = False
            answers.append(TopLogprobs(token_ids, logprobs, values[0]))
        return answers

    def decode(self, data: bytes, info: ModelInfo) -> TopLogprobs:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""
        numbers, k = packing.unpack(self.form, data, "likeliest tokens"), self.k
        width = packing.id_bytes(info.vocab_size)
        packing.expect_size(numbers, 4 + k * (4 + width), "likeliest tokens")
        found = packing.read_floats(numbers, 0, 1 + k)
        ids = packing.read_ids(numbers, 4 + 4 * k, k, info.vocab_size)
        return TopLogprobs(ids, found[1:], found[0])


def likeliest(logprobs: Logprobs, k: int) -> TokenArray:
    """The ids of the `k` likeliest tokens, int32 [k], likeliest first, equal ones by id."""
    if k == 1:
        return np.array([logprobs.argmax()], np.int32)
    candidates = _candidates(logprobs, k)
    values = logprobs[candidates]
    if k < candidates.size:
        # Which of those that tie with the last one get in is decided by their ids.
        least = np.partition(values, values.size - k)[values.size - k]
        candidates = candidates[values >= least]
    order = np.argsort(-logprobs[candidates], kind="stable")[:k]
    found: TokenArray = candidates[order].astype(np.int32)
    return found


def _candidates(logprobs: Logprobs, k: int) -> npt.NDArray[np.intp]:
    """Ids, ascending, of which are the `k` likeliest, whatever ties with the last one included.

    The k-th greatest of the blocks' maxima bounds the k-th greatest entry from below: to find it
    takes one pass over the row, where to order the row's entries takes ten.
    """
    size = logprobs.size
    blocks, left = divmod(size, _BLOCK)
    if 4 * k > blocks:
        return np.arange(size)
    # A block is every `blocks`-th entry: many maxima are taken at once.
    maxima = logprobs[: size - left].reshape(_BLOCK, blocks).max(0)
    bound = np.partition(maxima, blocks - k)[blocks - k]
    found = np.arange(_BLOCK)[:, None] * blocks + np.flatnonzero(maxima >= bound)
    return np.append(found.ravel(), np.arange(size - left, size))


def log_mass(logprobs: Logprobs) -> float:
    """The log of the summed probability, -inf of none; terms in float32, their sum in float64."""
    top = float(logprobs.max())
    if top == -np.inf:
        return top
    with np.errstate(under="ignore"):
        return top + float(np.log(np.exp(logprobs - np.float32(top)).sum(dtype=np.float64)))
