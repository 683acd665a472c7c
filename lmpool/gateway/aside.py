"""Work of the processor beside the event loop.

What runs cannot be ended, whoever hangs up: there are few threads, and what is given to them is
bounded. What waits for one is withdrawn with its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREADS: Final = ThreadPoolExecutor(4, thread_name_prefix="beside-the-loop")


async def aside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns or raises, while the event loop serves others."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, lambda: work(*args, **kwargs))
