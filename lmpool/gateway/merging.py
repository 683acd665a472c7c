"""Several things at once, of which one that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

T = TypeVar("T")

AHEAD: Final = 64
"""Parts that are held for a slow reader."""


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
) -> AsyncGenerator[tuple[int, T]]:
    """What numbered sources bring, as it comes."""
    if len(sources) == 1:
        number, only = sources[0]
        async with aclosing(only):
            async for part in only:
                yield number, part
        return
    queue: asyncio.Queue[Any] = asyncio.Queue(AHEAD)

    async def read(number: int, source: AsyncGenerator[T]) -> None:
        async with aclosing(source):
            async for part in source:
                await queue.put((number, part))

    async def read_all() -> None:
        try:
            await gathered([read(number, source) for number, source in sources])
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    reading = asyncio.create_task(read_all())
    try:
        while (found := await queue.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
