"""Calls of all kinds, from threads and event loops, while random steps of theirs, of the client's
threads and of the worker's take long: whoever is quicker, nothing is wrong, lost or left."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import PoolTimeout, PromptFailed
from lmpool.producer import claims, replacement, sender
from lmpool.producer.session import Session
from lmpool.row_ring import IS_ORDERED
from tests.support.clients import connected
from tests.support.pauses import paused
from tests.support.pools import until_at_rest
from tests.support.streams import continuation
from tests.support.waiting import until
from tests.support.workers import in_process_worker

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("_looks_after")]

SMALL, LARGE = 64, 8192
"""Vocabularies: rows of the server's, and rows that are laid near."""
KINDS = "row", "rows", "top", "sample", "fails"
SECONDS = 30.0
Client = lmpool.PooledLM[Any]
Call = Callable[..., Coroutine[Any, Any, Any]]


class Asker:
    """Asks one thing after another, and counts what became of it."""

    def __init__(
        self,
        lm: Client,
        seed: str,
        size: int,
        goes_on: Callable[[], bool],
        found: Counter[str],
        leaves: bool,
        rests: float,
    ) -> None:
        """`leaves`: at times it waits no longer. It `rests` for so many seconds at most, before
        each thing that it asks."""
        self.lm, self.chance, self.size = lm, random.Random(seed), size
        self.goes_on, self.found, self.leaves, self.rests = goes_on, found, leaves, rests

    def reads_alone(self) -> None:
        """Whoever asks next reads by itself, if nobody else asks."""
        self.lm._client._alone._needed = 1

    def prompt(self) -> list[int]:
        """One that others ask for just now, too, or a new one."""
        if self.chance.random() < 0.4:
            return [int(time.monotonic() / 0.03) % (self.size - 1), self.chance.randrange(2)]
        return [self.chance.randrange(self.size - 1) for _ in range(9)]

    def drawn(self, asked: list[list[int]]) -> tuple[int, list[list[int]]]:
        """A seed, and what it draws for these, which nothing fails of."""
        while True:
            seed = self.chance.randrange(1 << 30)
            drawn = [continuation(each, 3, seed, self.size) for each in asked]
            if not any(self.size - 1 in tokens for tokens in drawn):
                return seed, drawn

    async def ask(self, call: Call) -> None:
        """One thing, where `call` gives what a method of the client returns."""
        weights = (6, 2, 2, 1, 1, int(self.leaves))
        (kind,) = self.chance.choices((*KINDS, "in vain"), weights)
        asked = [self.prompt() for _ in range(self.chance.randint(1, 4))]
        rows = [mock_row(each, self.size) for each in asked]
        if kind == "row":
            row = await call("next_token_logprobs", asked[0], timeout=SECONDS)
            np.testing.assert_array_equal(row, rows[0])
        elif kind == "rows":
            found = await call("batch_next_token_logprobs", asked, timeout=SECONDS)
            np.testing.assert_array_equal(found, rows)
        elif kind == "top":
            for top, row in zip(
                await call("batch_top_logprobs", asked, 3, timeout=SECONDS), rows, strict=True
            ):
                assert [*top.token_ids] == [*np.argsort(-row, kind="stable")[:3]]
        elif kind == "sample":
            seed, right = self.drawn(asked)
            assert await call("batch_sample", asked, 3, [], seed=seed, timeout=SECONDS) == right
        elif kind == "fails":
            with pytest.raises(PromptFailed):
                await call("next_token_logprobs", [self.size - 1, *asked[0]], timeout=SECONDS)
        else:
            try:
                row = await call("next_token_logprobs", asked[0], timeout=0.001)
                np.testing.assert_array_equal(row, rows[0])
            except PoolTimeout:
                kind = "timeout"
        self.found[kind] += 1

    def in_thread(self) -> None:
        async def blocking(method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.lm.sync, method)(*args, **kwargs)

        while self.goes_on():
            time.sleep(self.chance.random() * self.rests)
            self.reads_alone()
            with pytest.raises(StopIteration):  # and it never waits for a loop
                self.ask(blocking).send(None)

    def in_loop(self) -> None:
        asyncio.run(self._in_loop())

    async def _in_loop(self) -> None:
        async def awaited(method: str, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.lm, method)(*args, **kwargs)

        while self.goes_on():
            await asyncio.sleep(self.chance.random() * self.rests)
            self.reads_alone()
            task = asyncio.ensure_future(self.ask(awaited))
            if self.leaves and self.chance.random() < 0.2:
                await asyncio.sleep(self.chance.choice((0, 0.0003, 0.001, 0.01)))
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                self.found["cancelled"] += 1


def check_pauses(
    server: redis.Redis, url: str, pool: str, size: int, leaves: bool, seconds: float, seed: int
) -> None:
    engine = {"vocab_size": size, "fail_token": size - 1, "delay": 0.003}
    kinds = (*KINDS, "cancelled") if leaves else KINDS
    reads = {"Alone.read", "Alone.read_in"}  # of callers by themselves
    if size == LARGE and IS_ORDERED and os.path.isdir("/dev/shm"):
        reads.add("Line._laid")
    found: Counter[str] = Counter()
    failed: list[BaseException] = []

    def run(asks: Callable[[], object]) -> None:
        try:
            asks()
        except BaseException as error:
            failed.append(error)

    def is_at_rest(lm: Client) -> bool:
        """What was not counted as answered was withdrawn before the server had heard of it."""
        said = lm.statistics()
        ways = ("local_hits", "cache_hits", "joined", "queued")
        missing = said["requests"] - sum(said[way] for way in ways)
        return 0 <= missing <= said["withdrawn"] and not lm._client._session.table.flights

    with paused(seed) as steps, in_process_worker(url, pool, engine_opts=engine):
        with (
            connected(url, pool, cache_bytes=0) as first,
            connected(url, pool, cache_bytes=0) as second,
            connected(url, pool, cache_bytes=1 << 20) as crowded,
        ):
            ends, threads = time.monotonic() + seconds, []

            def goes_on() -> bool:
                """Until the time is over and all of it has happened."""
                is_whole = all(found[kind] for kind in kinds) and all(steps[s] for s in reads)
                return not failed and (time.monotonic() < ends or not is_whole)

            for number, lm in enumerate((first, second, crowded, first, second, crowded)):
                rests = 0.2 if lm is not crowded and number > 2 else 0.0  # company, at times
                asker = Asker(lm, f"{seed} {number}", size, goes_on, found, leaves, rests)
                asks = asker.in_loop if number % 2 else asker.in_thread
                threads.append(threading.Thread(target=run, args=(asks,)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(seconds + 3 * SECONDS)
                assert not thread.is_alive(), (failed, found, steps)
            assert not failed, failed
            for lm in (first, second, crowded):
                until(partial(is_at_rest, lm), SECONDS, what="all to be counted")
        until_at_rest(server, pool)


@pytest.fixture(params=[0.02, 2 * SECONDS], ids=["looks", "never looks"])
def _looks_after(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds until a client looks after what it waits for: it may be told of much twice, or finds
    nothing that was lost. Clients close in order, and what they leave does not end by itself."""
    monkeypatch.setattr(Session, "check_every", request.param)
    monkeypatch.setattr("lmpool.producer.client.FAREWELL", 60.0)
    for module in (claims, replacement, sender):
        monkeypatch.setattr(module, "REPLY_TTL", 600.0)


sizes = pytest.mark.parametrize("size", [SMALL, LARGE])
leaving = pytest.mark.parametrize("leaves", [False, True])


@sizes
@leaving
def test_whoever_pauses_nothing_is_wrong_or_left(
    server_url: str, redis_client: redis.Redis, pool_name: str, size: int, leaves: bool
) -> None:
    check_pauses(redis_client, server_url, pool_name, size, leaves, seconds=2.0, seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@sizes
@leaving
@pytest.mark.parametrize("seed", [2, 3])
def test_whoever_pauses_for_minutes_nothing_is_wrong_or_left(
    server_url: str, redis_client: redis.Redis, pool_name: str, size: int, leaves: bool, seed: int
) -> None:
    check_pauses(redis_client, server_url, pool_name, size, leaves, seconds=120.0, seed=seed)
