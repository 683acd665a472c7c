"""Wants that one row answers: an engine may reduce it on its device, or anybody the row itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, Generic, Self, TypeVar

import numpy as np

from lmpool.errors import PromptFailed
from lmpool.model_info import ModelInfo
from lmpool.wants.answers import Computed, Logprobs, Reduced, freeze
from lmpool.wants.of_prompt import OfPrompt

NOT_A_NUMBER: Final = "the model computed NaN for this prompt; another dtype may help"

AnswerT = TypeVar("AnswerT", bound=Reduced)


class OfRow(OfPrompt[AnswerT], ABC, Generic[AnswerT]):
    """A want whose answer follows from the row after the prompt."""

    __slots__ = ()

    kind: ClassVar[str]
    cached: ClassVar[bool] = True
    """Whether a client keeps the answer in its local cache."""
    answer_type: ClassVar[type]

    @abstractmethod
    def checked(self, info: ModelInfo) -> Self:
        """With every default resolved for a model. Raises `PromptError`."""

    @abstractmethod
    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about."""

    @abstractmethod
    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""

    @abstractmethod
    def misfit(self, vocab_size: int) -> str | None:
        """Why rows of this size cannot answer it, as it travels; None where they can."""

    @abstractmethod
    def of_row(self, logprobs: Logprobs) -> AnswerT:
        """The answer of a row: float32 [vocab_size], natural log, normalized, none of it NaN.

        Raises `PromptFailed` for a row that has no answer.
        """

    @abstractmethod
    def pack(self, answer: AnswerT, vocab_size: int) -> bytes:
        """An answer as it is stored."""

    @abstractmethod
    def decode(self, data: bytes, info: ModelInfo) -> AnswerT:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""

    def decode_alike(self, stored: Sequence[bytes], info: ModelInfo) -> list[AnswerT] | None:
        """What `decode` reads of several answers to equal wants, where that costs less together.

        None where it does not, and where one of them is no answer.
        """
        return None

    def reduce(self, logprobs: Logprobs) -> AnswerT:
        """`of_row` of any row, frozen: one of NaN raises `PromptFailed` too."""
        # Normalizing spreads one NaN to all entries: the first one tells.
        if np.isnan(logprobs[0]):
            raise PromptFailed(NOT_A_NUMBER)
        answer = self.of_row(logprobs)
        freeze(answer)
        return answer

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        """What is stored of an answer. Raises `PromptFailed` where the engine gave another."""
        answer = computed.answer
        if not isinstance(answer, self.answer_type):
            raise PromptFailed(f"the engine gave no answer to {self.kind} for this prompt")
        return self.pack(answer, vocab_size)  # type: ignore[arg-type]
