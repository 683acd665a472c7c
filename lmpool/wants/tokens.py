"""The want of given tokens' log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from lmpool.errors import JobFormatError, PromptError
from lmpool.model_info import ModelInfo
from lmpool.token_ids import TokenIds, listed, packed
from lmpool.wants import packing
from lmpool.wants.answers import Logprobs
from lmpool.wants.held import hold
from lmpool.wants.of_row import OfRow

MAX_TOKEN_IDS: Final = 1 << 18
"""Ids of one want: 1 MiB of a job."""


@dataclass(frozen=True, slots=True)
class Tokens(OfRow[Logprobs]):
    """The log-probabilities of given tokens coming next, in their order; an id may come twice.

    `token_ids` are integers in any form; of a checked want, little-endian uint32 bytes.
    """

    kind: ClassVar[str] = "tokens"
    answer_type: ClassVar[type] = np.ndarray
    form: ClassVar[int] = 3

    token_ids: TokenIds | bytes

    def __post_init__(self) -> None:
        hold(self, token_ids=MAX_TOKEN_IDS)

    def checked(self, info: ModelInfo) -> Tokens:
        """With the ids as bytes. Raises `PromptError` for ids that the vocabulary does not have."""
        if type(self.token_ids) is not bytes:
            return Tokens(checked_ids(self.token_ids, info.vocab_size, "token_ids"))
        try:
            read_checked_ids(self.token_ids, "token_ids")
        except JobFormatError as error:
            raise PromptError(f"{error}: write a list of token ids") from None
        wrong = self.misfit(info.vocab_size)
        if wrong is not None:
            raise PromptError(f"token_ids: {wrong}")
        return self

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about."""
        return len(as_bytes(self.token_ids))

    def travelling_bytes(self) -> int:
        """That of the ids."""
        return len(as_bytes(self.token_ids))

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        return [self.token_ids]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Tokens:
        """Read `fields`. Raises `JobFormatError`."""
        (ids,) = packing.expect(cls.kind, fields, 1)
        return cls(read_checked_ids(ids, "token_ids"))

    def misfit(self, vocab_size: int) -> str | None:
        """Why rows of this size cannot answer it; None where they can."""
        return beyond(self.token_ids, vocab_size)

    def of_row(self, logprobs: Logprobs) -> Logprobs:
        """That of a row, float32 [vocab_size]."""
        found: Logprobs = logprobs[np.frombuffer(as_bytes(self.token_ids), "<u4")]
        return found

    def pack(self, answer: Logprobs, vocab_size: int) -> bytes:
        """An answer as it is stored."""
        return packing.pack(self.form, packing.floats(answer))

    def decode_alike(self, stored: Sequence[bytes], info: ModelInfo) -> list[Logprobs] | None:
        """What `decode` reads of several answers to equal wants."""
        numbers = packing.alike(self.form, stored, len(as_bytes(self.token_ids)))
        found = None if numbers is None else packing.floats_alike(numbers)
        if found is None:
            return None
        answers = [values.copy() for values in found]  # one kept must not keep all
        for answer in answers:
            answer.flags.writeable = False
        return answers

    def decode(self, data: bytes, info: ModelInfo) -> Logprobs:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""
        numbers = packing.unpack(self.form, data, "log-probabilities of tokens")
        packing.expect_size(numbers, len(as_bytes(self.token_ids)), "log-probabilities of tokens")
        return packing.read_floats(numbers, 0, len(numbers) // 4)


def as_bytes(token_ids: TokenIds | bytes) -> bytes:
    """The ids of a checked want."""
    assert type(token_ids) is bytes
    return token_ids


def checked_ids(given: TokenIds, vocab_size: int, name: str) -> bytes:
    """A caller's ids as little-endian uint32 bytes. Raises `PromptError`, `name` in its message."""
    ids = listed(given, MAX_TOKEN_IDS, name)
    if not len(ids):
        raise PromptError(f"{name}: at least one token id is needed")
    if len(ids) > MAX_TOKEN_IDS:
        raise PromptError(f"{name} of more than {MAX_TOKEN_IDS} ids: ask in several calls")
    return packed(ids, vocab_size, f"{name}: ")


def read_checked_ids(found: object, name: str) -> bytes:
    """Ids as they travel. Raises `JobFormatError`."""
    if not isinstance(found, bytes) or not 0 < len(found) <= 4 * MAX_TOKEN_IDS or len(found) % 4:
        raise JobFormatError(f"{name} are not 1 to {MAX_TOKEN_IDS} uint32")
    return found


def beyond(token_ids: TokenIds | bytes, vocab_size: int) -> str | None:
    """What is wrong where an id is none of the vocabulary; None where all are."""
    largest = int(np.frombuffer(as_bytes(token_ids), "<u4").max())
    return None if largest < vocab_size else f"token id {largest}: below {vocab_size} expected"
