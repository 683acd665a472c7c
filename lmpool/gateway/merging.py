"""Several things at once, of which one that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

from lmpool.gateway.unread import Shelf

T = TypeVar("T")

TOGETHER: Final = 64
"""Parts that are taken from who has them already before others have their turn."""


async def gathered(asked: Sequence[Awaitable[T]]) -> list[T]:
    """What all of them bring, in their order. The first failure ends the rest, and is raised."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(
    sources: Sequence[tuple[int, AsyncGenerator[T]]],
    shelf: Shelf[tuple[int, T]],
    turns: asyncio.Semaphore,
) -> AsyncGenerator[tuple[int, T]]:
    """What numbered sources bring, as it comes, each in its turn.

    They are read on whatever becomes of what they brought: that waits on the shelf.
    """

    async def read(number: int, source: AsyncGenerator[T]) -> None:
        async with turns, aclosing(source):
            async for part in source:
                shelf.put((number, part))
                if len(shelf) % TOGETHER == 0:
                    await asyncio.sleep(0)  # of what is there at once others shall not wait for all

    async def read_all() -> None:
        try:
            await gathered([read(number, source) for number, source in sources])
        except Exception as error:
            shelf.end(error)
        finally:
            shelf.end()

    reading = asyncio.create_task(read_all())
    shelf.begin(reading.cancel)
    try:
        while (found := await shelf.take()) is not None:
            yield found[0]
    finally:
        shelf.end()
        shelf.clear()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
