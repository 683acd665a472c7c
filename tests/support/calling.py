"""The two ways to call a client: from a thread that blocks, and from an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import lmpool

Way = Literal["blocking", "awaited"]
WAYS: Final[tuple[Way, ...]] = ("blocking", "awaited")


class _Calls:
    way: Way = "blocking"
    loops: dict[tuple[int, int], asyncio.AbstractEventLoop] = {}


def call(lm: lmpool.PooledLM[Any], method: str, *args: Any, **kwargs: Any) -> Any:
    """What a method returns. Awaited, each thread has a loop of its own, which runs meanwhile; what
    is asked within a running loop, as by a handler, blocks."""
    if _Calls.way == "blocking" or asyncio._get_running_loop() is not None:
        return getattr(lm.sync, method)(*args, **kwargs)
    return this_loop().run_until_complete(getattr(lm, method)(*args, **kwargs))


def this_loop() -> asyncio.AbstractEventLoop:
    """That of this thread, in this process."""
    mine = os.getpid(), threading.get_ident()
    if mine not in _Calls.loops:
        _Calls.loops[mine] = asyncio.new_event_loop()
        _Calls.loops[mine].set_exception_handler(lambda *_: None)  # who was ended tells nobody
    return _Calls.loops[mine]


@contextmanager
def calling(way: Way) -> Iterator[None]:
    """Call so for a while."""
    _Calls.way = way
    try:
        yield
    finally:
        _Calls.way = "blocking"
        for (process, _), loop in _Calls.loops.items():
            if process == os.getpid():
                loop.close()
        _Calls.loops.clear()
