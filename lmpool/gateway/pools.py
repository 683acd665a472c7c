"""The pools behind a gateway, and which of them a model's name means."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lmpool.checks import quoted, said
from lmpool.errors import (
    LmpoolError,
    ServerRefused,
    ServerTooOld,
    SettingsError,
    WireError,
)
from lmpool.gateway.errors import ApiError, of_pool
from lmpool.gateway.options import GatewayOptions, PoolAddress
from lmpool.gateway.prompt_logprobs_json import prepare
from lmpool.gateway.template import ChatTemplate, model_template, read_template, special_tokens
from lmpool.gateway.words import Words
from lmpool.model_info import ModelInfo, OfLaterRelease
from lmpool.producer import NumpyRows, PooledLM, connect
from lmpool.producer.deadline import Deadline
from lmpool.server import get_string
from lmpool.servers import Servers

logger = logging.getLogger(__name__)

LOOK: Final = 5.0
"""Seconds after which a pool that is not there is looked for once more."""
FRESH: Final = 2.0
"""Seconds for which it is trusted what a pool serves, that it has workers, and these adapters."""
LOOK_TIMEOUT: Final = 5.0
MOMENT: Final = 3.0
"""Seconds for pools that are just being found, once one is there."""


class Served:
    """What a pool serves now, and the client that asks it."""

    def __init__(
        self, lm: PooledLM[NumpyRows], words: Words, template: ChatTemplate | None
    ) -> None:
        self.lm = lm
        self.info: ModelInfo = lm.info
        self.words = words
        self.template = template
        """How a conversation becomes text, where there is a way."""
        self._adapters: list[str] | None = None
        self._read = -FRESH

    async def adapters(self) -> list[str]:
        """The names of the pool's adapters, as they were when its server last told.

        Raises `ApiError` where it never did: whether there is one is not known then.
        """
        if self._adapters is None or time.monotonic() - self._read >= FRESH:
            try:
                found = await self.lm._run(self.lm._read_adapters, Deadline(LOOK_TIMEOUT))
                self._adapters = sorted(found)
            except LmpoolError as error:
                if self._adapters is None:
                    raise of_pool(error) from None
            self._read = time.monotonic()
        return self._adapters

    async def is_replaced(self) -> bool:
        """Whether the pool serves another model by now; False where its server does not tell."""
        try:
            return await self.lm._run(self._has_another, Deadline(LOOK_TIMEOUT))
        except LmpoolError:
            return False

    def _has_another(self, servers: Servers) -> bool:
        key = self.lm._client.keys.info
        current = get_string(servers.for_key(key), key)
        try:
            return current is not None and not ModelInfo.unpack(current).gives_the_same_as(
                self.info
            )
        except WireError as error:  # one that was damaged its workers mend
            return isinstance(error, OfLaterRelease)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What a request asks: a pool's model, or an adapter of it. `name` is as it was asked for."""

    name: str
    pool: Pool
    served: Served
    lora_name: str | None

    @property
    def lm(self) -> PooledLM[NumpyRows]:
        """The client of its pool."""
        return self.served.lm

    @property
    def info(self) -> ModelInfo:
        """What the pool serves."""
        return self.served.info

    @property
    def words(self) -> Words:
        """Its tokens, and text to ids."""
        return self.served.words

    async def ids_of(self, prompts: Sequence[str | list[int]], special: bool) -> list[list[int]]:
        """Prompts as token ids; with `special` those around texts. Raises `ApiError`."""
        texts = [each for each in prompts if isinstance(each, str)]
        encode, most = self.words.encode_all, self.info.max_prompt_tokens
        encoded = iter(await encode(texts, special, most=most) if texts else ())
        return [next(encoded) if isinstance(each, str) else each for each in prompts]

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Refuse ids that the model does not have. Raises `ApiError`."""
        size, largest = self.info.vocab_size, max(ids, default=0)
        if largest >= size:
            raise ApiError(
                400, f"token id {largest}: this model has ids from 0 to {size - 1}", param=param
            )


class Pool:
    """One pool: connected in the background, and anew when it comes to serve another model."""

    def __init__(
        self, address: PoolAddress, options: GatewayOptions, template: str | None = None
    ) -> None:
        self.name = address.name
        self._template = template
        self.url = address.url or options.url
        self._options = options
        self._served: Served | None = None
        self._there = asyncio.Event()
        self._replaced = asyncio.Event()
        self._alive_until = 0.0
        self.why = "is not there yet"
        """What is wrong while it cannot be asked."""

    @property
    def served(self) -> Served | None:
        """What it serves, if it is connected."""
        return self._served

    async def keep(self) -> None:
        """Connect, and again whenever the model was replaced, until cancelled."""
        while True:
            served = await self._connect()
            self._served, self.why = served, ""
            self._there.set()
            logger.info("pool %s: %s on %s", self.name, served.info.model, served.info.engine)
            try:
                await self._until_replaced(served)
            finally:
                self._there.clear()
                self._replaced.clear()
                self._served, self.why = None, "comes to serve another model"
                await asyncio.shield(served.lm.aclose(1.0))

    async def _until_replaced(self, served: Served) -> None:
        """Return once a request was told so, or where there is none, as for a pool that seems to
        have no worker, once the server says so."""
        while not self._replaced.is_set() and not await served.is_replaced():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._replaced.wait(), FRESH)

    async def _connect(self) -> Served:
        options = self._options
        while True:
            lm = connect(
                self.url,
                self.name,
                framework="numpy",
                cache_bytes=options.cache_bytes,
                workers_timeout=options.queue_timeout,
                reconnect_timeout=options.queue_timeout,
                when_busy="raise",
            )
            try:
                await lm.wait_for_workers(LOOK)
                await lm.__aenter__()
                return await asyncio.to_thread(self._read, lm)
            except LmpoolError as error:
                await lm.aclose(1.0)
                self._say(error)
                await asyncio.sleep(1.0 if isinstance(error, TimeoutError) else LOOK)
            except Exception as error:  # files of any form are read
                await lm.aclose(1.0)
                if self.why != (why := f"its model cannot be read: {said(error)}"):
                    logger.exception("pool %s: %s", self.name, why)
                self.why = why
                await asyncio.sleep(LOOK)
            except BaseException:
                await asyncio.shield(lm.aclose(1.0))
                raise

    def _read(self, lm: PooledLM[NumpyRows]) -> Served:
        """What the pool published of its model; blocking."""
        words = Words.read(lm)
        prepare(words)
        source = self._template or model_template(words.files)
        template = None
        if source is not None:
            try:
                template = ChatTemplate(source, special_tokens(words.files))
            except SettingsError as error:
                logger.warning("pool %s: %s", self.name, error)
        return Served(lm, words, template)

    def _say(self, error: LmpoolError) -> None:
        refused = isinstance(error, (ServerRefused, ServerTooOld))
        if str(error) != self.why:  # once, however long it goes on
            logger.log(
                logging.ERROR if refused else logging.WARNING, "pool %s: %s", self.name, error
            )
        self.why = str(error)

    async def ready(self, deadline: Deadline) -> Served:
        """What it serves, for which it is waited. Raises `ApiError`."""
        if self._served is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._there.wait(), deadline.left())
        if self._served is None:
            raise ApiError(503, f"no model is served as {self.name!r} at the moment")
        return self._served

    def replaced(self, served: Served) -> None:
        """What `served` says is no longer so."""
        if self._served is served:
            self._replaced.set()

    async def has_workers(self) -> bool:
        """Whether it can be asked now."""
        served = self._served
        if served is None:
            return False
        if time.monotonic() < self._alive_until:
            return True
        try:
            await served.lm.wait_for_workers(0.5)
        except LmpoolError:
            return False
        self._alive_until = time.monotonic() + FRESH
        return True


class Pools:
    """All pools of a gateway, and the names of their models."""

    def __init__(self, options: GatewayOptions) -> None:
        file = options.chat_template
        template = None if file is None else read_template(file)
        self.all: Sequence[Pool] = [Pool(each, options, template) for each in options.pools]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to connect."""
        self._tasks = [asyncio.create_task(pool.keep()) for pool in self.all]

    async def stop(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def any_served(self, deadline: Deadline) -> None:
        """Return once there is a pool that can be asked, after a moment for all. Raises `ApiError`
        where there is none in time."""
        if await _first(self.all, deadline, MOMENT) is None:
            raise ApiError(503, "no model is served at the moment")

    async def find(self, name: str | None, deadline: Deadline) -> Model:
        """The model of a name: a pool's, its model's, ``pool:adapter``, or an adapter's.

        None is the first pool's. Raises `ApiError`.
        """
        if name is None:
            pool = self.all[0]
            return Model(pool.name, pool, await pool.ready(deadline), None)
        for pool in self.all:
            if name == pool.name:
                return Model(name, pool, await pool.ready(deadline), None)
        for pool in self.all:
            prefix, colon, adapter = name.partition(":")
            if colon and prefix == pool.name and adapter:
                served = await pool.ready(deadline)
                if adapter in await served.adapters():
                    return Model(name, pool, served, adapter)
        for pool in self.all:
            if pool.served is not None and name == pool.served.info.model:
                return Model(name, pool, pool.served, None)
        unknown: ApiError | None = None
        for pool in self.all:
            try:
                if pool.served is not None and name in await pool.served.adapters():
                    return Model(name, pool, pool.served, name)
            except ApiError as error:
                unknown = error
        # Among those that are not there yet may be the one that has it.
        waiting = [pool for pool in self.all if pool.served is None]
        if waiting:
            if await _first(waiting, deadline) is not None:
                return await self.find(name, deadline)
            away = ", ".join(pool.name for pool in waiting)
            raise ApiError(503, f"the model {quoted(name)} may be of a pool that is away: {away}")
        if unknown is not None:
            raise unknown
        known = ", ".join(pool.name for pool in self.all)
        raise ApiError(
            404,
            f"The model {quoted(name)} does not exist; there are {known}",
            param="model",
            code="model_not_found",
        )


async def _first(pools: Sequence[Pool], deadline: Deadline, moment: float = 0.0) -> Pool | None:
    """Whichever of the pools is there first, after up to `moment` seconds for all of them.

    None where none is in time.
    """
    waiting = {asyncio.ensure_future(pool.ready(deadline)): pool for pool in pools}
    try:
        left = deadline.left()
        await asyncio.wait(waiting, timeout=moment if left is None else min(moment, left))
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                pool = waiting.pop(task)
                if task.exception() is None:
                    return pool
        return None
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
