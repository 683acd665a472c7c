"""The want of a continuation that is told as it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmpool.wants.generate import Generate


@dataclass(frozen=True, slots=True)
class Stream(Generate):
    """A `Generate` whose tokens are told as they are drawn: what `PooledLM.stream` asks.

    Its answer is the whole continuation, as that to a `Generate` is.
    """

    kind: ClassVar[str] = "stream"
