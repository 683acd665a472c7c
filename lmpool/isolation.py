"""Finding the one entry that the server refuses among many that travel together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import redis.exceptions

from lmpool.server import is_full, is_lost

T = TypeVar("T")

ALL_ALIKE: Final = 4
"""Entries refused one by one, none taken: then it is not the entries."""


def is_about_entries(error: BaseException) -> bool:
    """Whether a refusal may be of what was sent, and not of who sends it or of the server."""
    if is_lost(error) or is_full(error):
        return False
    if isinstance(error, (redis.exceptions.NoPermissionError, redis.exceptions.ConnectionError)):
        return False
    return isinstance(error, redis.exceptions.ResponseError)


def isolate(
    entries: Sequence[T],
    send: Callable[[Sequence[T]], None],
    refused: Callable[[T, redis.exceptions.RedisError], None],
) -> None:
    """Send entries together; where that is refused, by halves, down to those that are to blame.

    Each of these goes to `refused`. Raises what `send` raises where it is not about the entries, or
    about all alike.
    """
    taken, blamed = 0, 0

    def part(some: Sequence[T]) -> None:
        nonlocal taken, blamed
        try:
            send(some)
            taken += len(some)
        except redis.exceptions.ResponseError as error:
            if not is_about_entries(error) or (not taken and blamed >= ALL_ALIKE):
                raise
            if len(some) > 1:
                middle = len(some) // 2
                part(some[:middle])
                part(some[middle:])
            else:
                blamed += 1
                refused(some[0], error)

    part(entries)
