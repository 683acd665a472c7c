"""Room for prompts: in turn, never more than there is, and nothing lost of it."""

from __future__ import annotations

import asyncio
import random

import pytest

from lmpool.gateway.state import Room


def test_places_are_given_in_turn_and_all_of_them_come_back() -> None:
    async def test() -> None:
        room, chance = Room(10), random.Random(1)
        held, most, order = 0, 0, []

        async def one(number: int) -> None:
            nonlocal held, most
            count = chance.randrange(1, 15)
            async with room.hold(count, 5.0):
                order.append(number)
                held += min(count, 10)
                most = max(most, held)
                assert held <= 10
                await asyncio.sleep(chance.random() / 500)
                held -= min(count, 10)

        tasks = []
        for number in range(200):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0)
        for task in chance.sample(tasks, 60):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert room.free == 10
        assert order == sorted(order)
        assert most > 5

    asyncio.run(test())


def test_who_waits_too_long_is_told_and_blocks_nobody() -> None:
    async def test() -> None:
        room = Room(4)
        async with room.hold(3, None):
            large = asyncio.create_task(_hold(room, 4, 0.05))
            await asyncio.sleep(0.01)
            small = asyncio.create_task(_hold(room, 1, 5.0))
            with pytest.raises(TimeoutError):
                await large
            await small
        assert room.free == 4

    asyncio.run(test())


async def _hold(room: Room, count: int, timeout: float) -> None:
    async with room.hold(count, timeout):
        pass
