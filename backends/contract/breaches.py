"""A broken promise, as whoever writes an engine reads it."""

from __future__ import annotations


class BrokenPromise(AssertionError):
    """What an engine did against a promise: the promise, and what was seen instead."""

    def __init__(self, promise: str, seen: str) -> None:
        super().__init__(f"{promise}: {seen}")
        self.promise = promise
        self.seen = seen


def expect(kept: bool, promise: str, *seen: object) -> None:
    """Raise `BrokenPromise` unless the promise was kept; what was seen is only then made a text."""
    if not kept:
        raise BrokenPromise(promise, " ".join(map(str, seen)))
