"""The two ways to call a client: from a thread that blocks, and from an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, Final, Literal

import lmpool

Way = Literal["blocking", "awaited"]
WAYS: Final[tuple[Way, ...]] = ("blocking", "awaited")


class Calls:
    """Calls of methods by name, blocking or awaited: then each thread has a loop of its own, which
    runs while it asks alone. What is asked within a running loop, as by a handler, blocks."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self._loops: dict[tuple[int, int], asyncio.AbstractEventLoop] = {}

    def __call__(self, lm: lmpool.PooledLM[Any], method: str, *args: Any, **kwargs: Any) -> Any:
        """What the method returns."""
        if self.way == "blocking" or asyncio._get_running_loop() is not None:
            return getattr(lm.sync, method)(*args, **kwargs)
        return self.loop.run_until_complete(getattr(lm, method)(*args, **kwargs))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """This thread's, in this process."""
        mine = os.getpid(), threading.get_ident()
        if mine not in self._loops:
            self._loops[mine] = asyncio.new_event_loop()
            self._loops[mine].set_exception_handler(lambda *_: None)  # who was ended tells nobody
        return self._loops[mine]

    def close(self) -> None:
        """Close the loops."""
        for (process, _), loop in self._loops.items():
            if process == os.getpid():
                loop.close()
