"""Ctrl-C, and whatever else a signal's handler raises between two steps of a call.

Locks are left free, wherever it comes. In Python 3.11 ``with lock:`` lets go of its lock whatever
comes. In 3.12 and 3.13 some loops within such a block begin anew outside of what its end is for,
and from 3.14 on what a handler raises may come between the lock and the block: nobody would let go
of the lock any more.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

MAY_LEAK: Final = sys.version_info >= (3, 12)

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def is_its_own(error: Exception) -> bool:
    """Whether what was called raised this, in the frame that catches it: a function of C, no
    handler, which has a frame of its own. Many a handler raises `TimeoutError`, an `OSError`."""
    raised_in = error.__traceback__
    return raised_in is not None and raised_in.tb_next is None


def frees(lock: str) -> Callable[[MethodT], MethodT]:
    """For a method that a thread runs which a signal may interrupt: once it has raised, that thread
    holds this lock, a `threading.RLock` among its object's attributes, only if it did before."""
    lock_of = attrgetter(lock)

    def changed(method: MethodT) -> MethodT:
        if not MAY_LEAK:
            return method

        @functools.wraps(method)
        def frees_it(self: Any, *args: Any, **kwargs: Any) -> Any:
            held = lock_of(self)
            was_held = held._is_owned()
            try:
                return method(self, *args, **kwargs)
            except BaseException:
                while not was_held and held._is_owned():
                    held.release()
                raise

        return cast(MethodT, frees_it)

    return changed
