"""Smaller scenarios in which the same promise is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lmpool.backends.contract.operations import Asked, Operation, Submit

T = TypeVar("T")
Fails = Callable[[Sequence[Operation]], bool]
"""Whether a scenario still breaks the promise; False as well once the time is over."""


def shrunk(operations: Sequence[Operation], fails: Fails) -> list[Operation]:
    """What is left of a failing scenario where any part is left out that is not needed."""
    found = _without(list(operations), fails)
    for place, operation in enumerate(found):
        if isinstance(operation, Submit):
            found[place] = _with_less(found, place, operation, fails)
    return found


def _with_less(operations: Sequence[Operation], place: int, whole: Submit, fails: Fails) -> Submit:
    """A submission of no more requests than are needed."""
    before, after = operations[:place], operations[place + 1 :]

    def still(asked: list[Asked]) -> bool:
        return fails([*before, Submit(tuple(asked)), *after])

    return Submit(tuple(_without(list(whole.asked), still)))


def _without(items: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Leave out halves, quarters, and so on, as long as what is left fails."""
    size = len(items)
    while size > 1:
        size = (size + 1) // 2
        start = 0
        while start < len(items) and len(items) > 1:
            rest = items[:start] + items[start + size :]
            if rest and fails(rest):
                items = rest
            else:
                start += size
    return items
