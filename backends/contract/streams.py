"""What is right of a continuation that is told while it is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.operations import Asked
from lmpool.backends.engine import Part
from lmpool.wants import Generation, Stream

_BEGINS: Final = "the parts of a stream, in order, are the beginning of its answer"
_EARLY: Final = "what is drawn of a stream leaves the engine before it has ended"
_SOON: Final = 4
"""Tokens of which some are told before the last is drawn, whatever an engine does at a time."""


class Told:
    """What an engine told of streams that run."""

    def __init__(self) -> None:
        self._parts: dict[bytes, list[Generation]] = {}
        self._worked_through: set[bytes] = set()

    def work_through(self, ids: Iterable[bytes]) -> None:
        """What runs may come to its end within an operation that changes adapters or states: an
        engine may work through it first."""
        self._worked_through.update(ids)

    def take(self, part: Part, asked: Asked) -> None:
        """Take one of what was asked."""
        expect(isinstance(part, Part), "parts() returns Parts", type(part))
        expect(isinstance(asked.want, Stream), "parts are of those that want a Stream", asked)
        told = self._parts.setdefault(asked.id, [])
        upto = len(asked.begun) + sum(each.token_ids.size for each in told)
        expect(part.start == upto, _BEGINS, f"one from {part.start} on behind {upto}:", asked)
        expect(isinstance(part.drawn, Generation), "a part is a Generation", asked)
        expect(part.drawn.token_ids.size > 0, "a part has a token", asked)
        told.append(part.drawn)

    def end(self, asked: Asked, answer: object) -> None:
        """Compare them with the answer."""
        told = self._parts.pop(asked.id, [])
        in_steps = asked.id not in self._worked_through
        self._worked_through.discard(asked.id)
        if not isinstance(asked.want, Stream) or not isinstance(answer, Generation):
            return
        size = answer.token_ids.size
        begun = asked.begun[:size]  # which may have been all of it
        start = len(begun)
        expect(
            bool(told) or size - start < _SOON or not in_steps,
            _EARLY,
            f"none of {size - start} tokens was told:",
            asked,
        )
        expect(answer.token_ids[:start].tolist() == list(begun), _BEGINS, asked)
        for part in told:
            rest = answer.behind(start)
            start += part.token_ids.size
            for mine, whole in zip(part.arrays(), rest.arrays(), strict=True):
                same = mine.tobytes() == whole[: mine.shape[0]].tobytes()
                expect(same, _BEGINS, f"not behind {start} tokens:", asked)
        expect(
            start < answer.token_ids.size or not told,
            "the last token comes with the answer",
            f"all {start} were told before:",
            asked,
        )

    def forget(self, ids: list[bytes]) -> None:
        """Those of these ids were cancelled."""
        for cancelled in ids:
            self._parts.pop(cancelled, None)
