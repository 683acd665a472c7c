"""What every want has in common: which prompts it may be asked of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Self, TypeVar

from lmpool.wants.answers import Answer

AnswerT = TypeVar("AnswerT", bound=Answer)


class OfPrompt(Generic[AnswerT]):
    """Something that may be asked of a prompt; by default of every one that a model takes.

    `AnswerT` is what it is answered with.
    """

    __slots__ = ()

    @property
    def repeats(self) -> bool:
        """Whether several prompts of a call are asked it as it stands."""
        return True

    def each(self, count: int) -> Sequence[Self]:
        """This want for `count` prompts of a call."""
        return (self,) * count

    def travelling_bytes(self) -> int:
        """What a checked one adds to the size of its job, besides a few numbers, about."""
        return 0

    def longest_prompt(self, most: int) -> int:
        """How long its prompt may be, of a model that computes rows after up to `most` tokens."""
        return most

    def misfit(self, vocab_size: int) -> str | None:
        """Why rows of this size cannot answer it, as it travels; None where they can."""
        return None

    def misfit_prompt(self, tokens: int) -> str | None:
        """Why it cannot be asked of a prompt of so many tokens; None where it can."""
        return None
