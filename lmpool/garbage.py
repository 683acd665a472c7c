"""Python's garbage collector, kept out of the way of processes that load much and live long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports by the thousand: they leave no garbage, and to look for some takes a third of
    their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_what_is_there() -> None:
    """Leave all that is loaded by now out of every later collection, and of the one at the end."""
    gc.collect()
    gc.freeze()
