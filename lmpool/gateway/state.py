"""What all routes share: the pools, room, and how an answer is waited for."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any, Final, TypeVar, cast

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from lmpool import Ask
from lmpool.errors import LmpoolError, PoolBusy, PoolMismatch
from lmpool.gateway.errors import ApiError, of_pool
from lmpool.gateway.options import GatewayOptions
from lmpool.gateway.pools import Model, Pools
from lmpool.gateway.unread import UNREAD_BYTES, Unread
from lmpool.producer.deadline import Deadline

T = TypeVar("T")

BUSY_PAUSE: Final = (0.05, 0.5)
"""Seconds between two tries at a pool whose backlog is full, as they grow."""


class Room:
    """Places for prompts that are asked at once; who finds none waits for its turn."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._free = places
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free(self) -> int:
        """Places that nobody has."""
        return self._free

    @asynccontextmanager
    async def hold(self, count: int, timeout: float | None) -> AsyncIterator[None]:
        """Have `count` places, or all of them. Raises TimeoutError."""
        count = min(max(1, count), self._places)
        await self._take(count, timeout)
        try:
            yield
        finally:
            self._give(count)

    async def _take(self, count: int, timeout: float | None) -> None:
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            # The future itself tells whether the places were given before the time was over.
            await asyncio.wait((turn,), timeout=timeout)
        except asyncio.CancelledError:
            self._leave(count, turn)
            raise
        if not turn.done():
            self._leave(count, turn)
            raise TimeoutError

    def _leave(self, count: int, turn: asyncio.Future[None]) -> None:
        if turn.done():
            self._give(count)
        else:
            self._waiting.remove((count, turn))
            self._next()

    def _give(self, count: int) -> None:
        self._free += count
        self._next()

    def _next(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            count, turn = self._waiting.popleft()
            self._free -= count
            turn.set_result(None)


class Gateway:
    """A gateway's pools and bounds; `gateway_of` finds it."""

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.pools = Pools(options)
        self.room = Room(options.max_in_flight)
        self.unread = Unread()
        self.held = Room(2 * UNREAD_BYTES)
        """Bytes of binary answers, for those that streams have asked for and not told."""
        self.registry = CollectorRegistry()
        """What `/metrics` shows."""

    def deadline(self) -> Deadline:
        """Until when a request that comes now is answered."""
        return Deadline(self.options.request_timeout)

    async def model(self, name: str | None, deadline: Deadline) -> Model:
        """The model that a request names. Raises `ApiError`."""
        return await self.pools.find(name, Deadline(self._patience(deadline)))

    async def asked(
        self,
        model: Model,
        ask: Callable[[float | None], Awaitable[T]],
        deadline: Deadline,
        count: int = 1,
    ) -> T:
        """What `ask` brings, which is given a timeout and asks `count` prompts at once.

        Waits for room in the gateway and in the pool as long as `queue_timeout`; for none in the
        gateway where `count` is 0. Raises `ApiError`.
        """
        patience = Deadline(self._patience(deadline))
        async with self.places(count, patience) if count else nullcontext():
            pause = BUSY_PAUSE[0]
            while True:
                try:
                    return await ask(deadline.at_least(0.001))
                except PoolBusy as error:
                    if patience.left() == 0.0:
                        raise of_pool(error) from None
                except LmpoolError as error:
                    raise self.answer_to(model, error) from None
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, BUSY_PAUSE[1])

    @asynccontextmanager
    async def places(
        self, count: int, patience: Deadline, room: Room | None = None
    ) -> AsyncIterator[None]:
        """Room for so many prompts, or of another kind. Raises `ApiError`."""
        held = (room or self.room).hold(count, patience.left())
        try:
            await held.__aenter__()
        except TimeoutError:
            raise ApiError(
                503, f"no room for this request in {patience.timeout:g} s: try again later"
            ) from None
        try:
            yield
        finally:
            await held.__aexit__(None, None, None)

    def answer_to(self, model: Model, error: LmpoolError) -> ApiError:
        """What a caller is told of a pool's error."""
        if isinstance(error, PoolMismatch):
            model.pool.replaced(model.served)
        return of_pool(error)

    async def answers(
        self,
        model: Model,
        asks: Sequence[tuple[Sequence[int], Any]],
        deadline: Deadline,
        *,
        within: bool = False,
    ) -> list[Any]:
        """The answers to pairs of a prompt and a want, in their order. Raises `ApiError`.

        `within`: of who streams, one at a time, and would wait for room again with every part.
        """
        given = [Ask(ids, want, lora_name=model.lora_name) for ids, want in asks]

        async def ask(timeout: float | None) -> list[Any]:
            return list(await model.lm.ask_many(given, timeout=timeout))

        return await self.asked(model, ask, deadline, 0 if within else len(given))

    async def streamed(
        self,
        model: Model,
        begin: Callable[[float | None], AsyncIterator[T]],
        deadline: Deadline,
    ) -> AsyncGenerator[T]:
        """What `begin` brings piece by piece, waiting for room as `asked` does.

        It has its place until it ends: who reads it takes what comes at once, for whomever.
        """
        patience = Deadline(self._patience(deadline))
        async with self.places(1, patience):
            pause = BUSY_PAUSE[0]
            while True:
                begun = False
                try:
                    # What a caller leaves ends the loop within it, which withdraws the job.
                    pieces = cast(AsyncGenerator[T], begin(deadline.at_least(0.001)))
                    async with aclosing(pieces):
                        async for piece in pieces:
                            begun = True
                            yield piece
                    return
                except PoolBusy as error:
                    if begun or patience.left() == 0.0:
                        raise of_pool(error) from None
                except LmpoolError as error:
                    raise self.answer_to(model, error) from None
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, BUSY_PAUSE[1])

    def turns(self) -> asyncio.Semaphore:
        """For what one request asks one by one: so many at once as may have room, as what waits
        for another of its own request is not to be told that there was none."""
        return asyncio.Semaphore(self.options.max_in_flight)

    def patience(self, deadline: Deadline) -> Deadline:
        """Until when a request of this deadline waits for room."""
        return Deadline(self._patience(deadline))

    def _patience(self, deadline: Deadline) -> float:
        left = deadline.left()
        most = self.options.queue_timeout
        return most if left is None else min(most, left)


def gateway_of(request: Request) -> Gateway:
    """The gateway that a request came to."""
    found: Gateway = request.app.state.gateway
    return found
