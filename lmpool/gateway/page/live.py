"""What the page tells of pools: a stream of views, dead letters, and what is done about them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmpool import __version__, dead_letters
from lmpool.dead_letters import DeadLetter
from lmpool.errors import LmpoolError
from lmpool.gateway.door import ENDING, WATCHING
from lmpool.gateway.errors import ApiError, of_pool
from lmpool.gateway.page.rights import check_caller, check_operator, key_of, may_operate
from lmpool.gateway.page.telling import as_json, tell
from lmpool.gateway.page.watch import MOST_TEXT, Seen, Watch, plain
from lmpool.gateway.pools import Pool
from lmpool.gateway.schemas import JsonRoute, Request
from lmpool.gateway.sse import Streamed
from lmpool.gateway.state import Gateway
from lmpool.producer import PooledLM, connect
from lmpool.producer.deadline import Deadline

T = TypeVar("T")

router = APIRouter(include_in_schema=False, route_class=JsonRoute)

STREAMS: Final = 128
STREAMS_OF_KEY: Final = 16
STREAMS_OF_ADDRESS: Final = 64
"""Pages that are open at once; without keys of one address. They count as no requests of a key, as
they ask nothing."""
SHOWN_LETTERS: Final = 50
"""Of each shard, the latest ones."""
SHOWN_TOKENS: Final = 24
RETRIES: Final = 4
"""Dead letters that are asked for again at once."""
RETRY_TIMEOUT: Final = 60.0
Name = Annotated[str, Field(max_length=64)]


class Letters(Request):
    """Dead letters, by their names."""

    pool: str | None = Field(None, max_length=512)
    names: Annotated[list[Name], Field(min_length=1, max_length=SHOWN_LETTERS, fail_fast=True)]


class LivePage:
    """What the page's routes share."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._watches = {pool.name: Watch(pool) for pool in gateway.pools.all}
        self._streams: Counter[tuple[str, str]] = Counter()
        self._letters = ThreadPoolExecutor(RETRIES + 2, "page-letters")
        self._retries = RETRIES

    async def stop(self) -> None:
        """End all looking."""
        await asyncio.gather(*(watch.stop() for watch in self._watches.values()))
        self._letters.shutdown(wait=False, cancel_futures=True)

    def pool(self, name: str | None) -> Pool:
        """The pool of a name, or the first. Raises `ApiError`."""
        for pool in self.gateway.pools.all:
            if name in (None, "", pool.name):
                return pool
        raise ApiError(404, "this gateway has no such pool", param="pool")

    def watch(self, pool: Pool) -> Watch:
        """Its looks."""
        return self._watches[pool.name]

    @contextmanager
    def place(self, key: str | None, address: str = "") -> Iterator[None]:
        """A place for one more stream, of a key or an address. Raises `ApiError`."""
        whose = ("address", address) if key is None else ("key", key)
        most = STREAMS_OF_ADDRESS if key is None else STREAMS_OF_KEY
        if self._streams.total() >= STREAMS or self._streams[whose] >= most:
            raise ApiError(503, "as many pages are open as may be: close one", retry_after=10)
        self._streams[whose] += 1
        try:
            yield
        finally:
            self._streams[whose] -= 1
            if not self._streams[whose]:
                del self._streams[whose]

    def told(self, pool: Pool, seen: Seen, operator: bool) -> dict[str, Any]:
        """What a page is told of a look. Where the server is, is the operator's business."""
        view, why = seen.view, seen.why
        if not operator:
            view, why = None if view is None else {**view, "url": ""}, ""
        served = pool.served
        return {
            "pool": pool.name,
            "pools": [each.name for each in self.gateway.pools.all],
            "state": seen.state,
            "since": seen.since,
            "now": time.time(),
            "why": why,
            "view": view,
            "rate": seen.rate,
            "failures": seen.failures,
            "asked": None if served is None else served.lm.statistics(),
            "operator": operator,
            "version": __version__,
        }

    # --- dead letters --------------------------------------------------------------------------

    async def with_client(
        self,
        pool: Pool,
        work: Callable[[PooledLM], T],
        done: Callable[[], None] = lambda: None,
    ) -> T:
        """What `work` makes of a client of the pool's, on a thread; `done` is called once that is
        free again, also where nobody waits any more. Raises `ApiError`."""
        loop = asyncio.get_running_loop()

        def run() -> T:
            with connect(pool.url, pool.name, workers_timeout=2.0, reconnect_timeout=5.0) as lm:
                return work(lm)

        working = self._letters.submit(run)
        working.add_done_callback(lambda _: _tell(loop, done))
        try:
            return await asyncio.shield(asyncio.wrap_future(working))
        except LmpoolError as error:
            raise of_pool(error) from None

    async def retry(self, pool: Pool, names: list[str]) -> list[dict[str, Any]]:
        """What came of asking for letters again. Raises `ApiError`."""
        if not self._retries:
            raise ApiError(503, "others are being asked for again: wait until they are through")
        self._retries -= 1
        return await self.with_client(pool, lambda lm: _retried(lm, names), self._give_back)

    def _give_back(self) -> None:
        self._retries += 1


def _tell(loop: asyncio.AbstractEventLoop, done: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and nobody is left to be told
        loop.call_soon_threadsafe(done)


def page_of(request: HttpRequest) -> LivePage:
    """The page of the gateway that a request came to."""
    found: LivePage = request.app.state.page
    return found


@router.get(WATCHING)
async def events(request: HttpRequest, pool: str | None = None) -> Response:
    """Views of a pool as they come, as server-sent events. The first one has the last minutes."""
    check_caller(request)
    page = page_of(request)
    views = _views(page, page.pool(pool), request)
    first = await anext(views)  # what is refused is no stream
    return Streamed(_after(first, views), "text/event-stream")


@router.get("/live/view")
async def view(request: HttpRequest, pool: str | None = None) -> Response:
    """One view."""
    check_caller(request)
    page = page_of(request)
    found = page.pool(pool)
    watch = page.watch(found)
    with watch.watching():
        seen = await watch.after(watch.seen.number)
    return tell(page.told(found, seen, may_operate(request)))


async def _views(page: LivePage, pool: Pool, request: HttpRequest) -> AsyncGenerator[bytes]:
    """Events, until the request's time or room is over, or the gateway ends."""
    key, operator, options = key_of(request), may_operate(request), page.gateway.options
    deadline = Deadline(options.request_timeout)
    ending: asyncio.Event = request.scope.get(ENDING) or asyncio.Event()
    watch, sent = page.watch(pool), 0
    number = watch.seen.number - watch.is_looking  # what was seen a moment ago is told at once
    ended = asyncio.ensure_future(ending.wait())
    try:
        address = "" if request.client is None else request.client.host
        with page.place(None if key is None else key.name, address), watch.watching():
            while True:
                news = asyncio.ensure_future(watch.after(number))
                await asyncio.wait(
                    (news, ended), timeout=deadline.left(), return_when=asyncio.FIRST_COMPLETED
                )
                if not news.done() or ended.done():
                    news.cancel()
                    return
                seen = news.result()
                number = seen.number
                told = page.told(pool, seen, operator)
                if not sent:
                    told["history"] = list(watch.history)
                event = b"data: " + as_json(told) + b"\n\n"
                sent += len(event)
                if sent > options.max_response_bytes and sent > len(event):
                    return  # the page asks anew
                yield event
    finally:
        ended.cancel()


async def _after(first: bytes, views: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(views):
        yield first
        async for each in views:
            yield each


# --- dead letters --------------------------------------------------------------------------------


@router.get("/live/dead-letters")
async def letters(request: HttpRequest, pool: str | None = None) -> Response:
    """The latest jobs that were given up, the newest first."""
    check_caller(request)
    page = page_of(request)
    found = await page.with_client(page.pool(pool), _latest)
    found.sort(key=lambda letter: letter.given_up, reverse=True)
    return tell({"letters": [_shown(letter) for letter in found[:SHOWN_LETTERS]]})


@router.post("/live/dead-letters/drop")
async def drop(body: Letters, request: HttpRequest) -> Response:
    """Forget some."""
    check_caller(request)
    check_operator(request)
    page = page_of(request)

    def work(lm: PooledLM) -> int:
        return dead_letters.drop(lm, _named(lm, body.names))

    return tell({"dropped": await page.with_client(page.pool(body.pool), work)})


@router.post("/live/dead-letters/retry")
async def retry(body: Letters, request: HttpRequest) -> Response:
    """Ask for some again, one after another. What is answered is dropped."""
    check_caller(request)
    check_operator(request)
    page = page_of(request)
    return tell({"asked": await page.retry(page.pool(body.pool), body.names)})


def _latest(lm: PooledLM) -> list[DeadLetter]:
    return dead_letters.read(lm, latest=SHOWN_LETTERS)


def _named(lm: PooledLM, names: list[str]) -> list[DeadLetter]:
    return [letter for letter in _latest(lm) if letter.name in names]


def _retried(lm: PooledLM, names: list[str]) -> list[dict[str, Any]]:
    """What came of each that there is still."""
    found: list[dict[str, Any]] = []
    deadline = Deadline(RETRY_TIMEOUT)
    for letter in _named(lm, names):
        try:
            dead_letters.retry(lm, letter, timeout=deadline.at_least(0.001))
        except LmpoolError as error:
            found.append({"name": letter.name, "error": of_pool(error).message[:MOST_TEXT]})
        else:
            found.append({"name": letter.name, "error": None})
    return found


def _shown(letter: DeadLetter) -> dict[str, Any]:
    job = letter.job
    shown: dict[str, Any] = plain(
        {
            "name": letter.name,
            "given_up": letter.given_up.timestamp(),
            "reason": letter.reason,
            "worker": letter.worker,
            "deliveries": letter.deliveries,
            "want": None if job is None else job.want.kind,
            "adapter": None if job is None else job.adapter,
            "tokens": [] if job is None else job.token_ids()[:SHOWN_TOKENS].tolist(),
            "length": 0 if job is None else len(job.token_ids()),
            "bytes": len(letter.data),
        }
    )
    return shown
