"""What the contract has to know of a want."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lmpool.backends.contract.operations import Asked, Prompt
from lmpool.backends.contract.prompts import Random
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.engine import EngineInfo, Outcome
from lmpool.wants import Want

W = TypeVar("W", bound=Want)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request as it was submitted, its adapter as it was then, and its outcome."""

    asked: Asked
    adapter: Adapter | None
    outcome: Outcome


class WantReference(ABC, Generic[W]):
    """What the contract knows of one want."""

    @abstractmethod
    def draw(self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> W:
        """A want of this kind, made up for this prompt."""

    @abstractmethod
    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        """Raise `BrokenPromise` where one of these answers is not right. None is an error."""

    def refuses(self, want: W, info: EngineInfo) -> bool:
        """Whether an engine must refuse this want with `PromptFailed`."""
        return False
