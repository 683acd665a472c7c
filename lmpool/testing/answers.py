"""What a test sets as answers, and what was asked: between a test's thread and the engine's."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, fields, replace
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lmpool.wants import Draw, Generate, Reduced, Stream, Want

F32 = npt.NDArray[np.float32]

Asked: TypeAlias = tuple[tuple[int, ...], str | None]
"""A prompt, and the adapter that it is asked of."""
Meant: TypeAlias = Want | type[Want] | None
"""Which wants of a prompt: one, those of a kind, or all of them."""


@dataclass(frozen=True, slots=True)
class Call:
    """Something that reached the pool: the `prompt` as token ids, what was wanted of it, and the
    adapter (None: the base model)."""

    prompt: tuple[int, ...]
    want: Want
    lora_name: str | None = None


@dataclass(slots=True)
class Failure:
    """A prompt that fails, so many `times`, or always; `after` it holds what was set before."""

    reason: str
    times: float = math.inf
    after: RowSet | Reduced | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """A row, float32 [vocab]: natural log, normalized."""

    logprobs: F32


Set: TypeAlias = RowSet | Reduced | Failure


class Answers:
    """The answers that a test has set, and the calls that were made."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sets: dict[Asked, dict[Meant, Set]] = {}
        self._calls: list[Call] = []
        self._delay = 0.0

    def set(self, asked: Asked, meant: Meant, answer: Set) -> None:
        """Answer so from now on; what was set for the same before is forgotten, but for an answer
        that a failure only puts off."""
        with self._changed:
            sets = self._sets.setdefault(asked, {})
            if isinstance(answer, Failure):
                before = sets.get(meant)
                answer.after = before.after if isinstance(before, Failure) else before
            sets[meant] = answer

    def find(self, asked: Asked, want: Want) -> Set | None:
        """What was set for this want of a prompt, the closest first; None where nothing was.

        A `Failure` is one time less afterwards.
        """
        with self._changed:
            sets = self._sets.get(asked, {})
            for meant in (*(key for key in sets if _is(key, want)), *_kinds(want), None):
                found = sets.get(meant)
                if found is None:
                    continue
                if isinstance(found, Failure):
                    found.times -= 1
                    if found.times <= 0:
                        del sets[meant]
                        if found.after is not None:
                            sets[meant] = found.after
                return found
        return None

    def record(self, call: Call) -> None:
        """Keep what was asked."""
        with self._changed:
            self._calls.append(call)

    def calls(self) -> list[Call]:
        """What was asked so far, in order."""
        with self._changed:
            return list(self._calls)

    def delay(self, seconds: float) -> None:
        """Let each batch take so long, also one that is under way."""
        with self._changed:
            self._delay = seconds
            self._changed.notify_all()

    def wait(self) -> None:
        """Let the delay pass."""
        begun = time.monotonic()
        with self._changed:
            while (left := begun + self._delay - time.monotonic()) > 0:
                self._changed.wait(min(left, _LONGEST_WAIT))


_LONGEST_WAIT: Final = 3600.0


def _is(meant: Meant, asked: Want) -> bool:
    """Whether it is this want that was meant, whatever its seed where none was named."""
    if isinstance(asked, Stream) and type(meant) is Generate:
        asked = Generate(**{f.name: getattr(asked, f.name) for f in fields(asked)})
    if type(meant) is not type(asked):
        return False
    if isinstance(meant, Draw | Generate) and meant.seed is None:
        asked = replace(cast(Generate, asked), seed=None)
    return meant == asked


def _kinds(want: Want) -> tuple[type[Want], ...]:
    """A continuation that is streamed is one."""
    return (Stream, Generate) if isinstance(want, Stream) else (type(want),)
