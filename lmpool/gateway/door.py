"""What every request passes: keys, bounds on body, time and answer, and a caller that hangs up.

It is plain ASGI, before any route: a body is read here, within its bounds, and a route has it
whole. From then on a caller can only go away, which cancels the route, and that withdraws its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final

from lmpool.gateway.errors import SOON, ApiError
from lmpool.gateway.keys import Key, KeyFile, given_key
from lmpool.gateway.options import GatewayOptions
from lmpool.gateway.page.assets import PATHS

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN: Final = PATHS | {
    "/health", "/ready", "/metrics", "/version", "/openapi.json", "/docs",
}  # fmt: skip
"""What costs nothing, and needs no key."""
WATCHING: Final = "/live/events"
"""The live page's stream, which is open as long as the page is: none of the requests that a key may
have at once. It has bounds of its own."""
KEY: Final = "lmpool.key"
"""What a request's scope has: its key, or None where there are no keys."""
SLOWEST: Final = 65_536
"""Bytes a second that a body must come at, once its first seconds are over."""
GRACE: Final = 5.0
"""Seconds beyond a request's time in which its route may still say so itself."""
PART: Final = 1 << 16
"""Bytes of an answer that are sent at a time."""
ABORT: Final = "lmpool.abort"
"""What a server's scope has that ends the connection at once."""
ENDING: Final = "lmpool.ending"
"""And the event that is set once the server is to end: whoever has no end of his own ends then."""
LAST: Final = 7.0
"""Seconds for what is under way then. The server ends at 10, without a word to those who wait."""
STALL: Final = 30.0
"""Seconds in which a caller takes nothing of its answer, and is taken to be gone."""
LINGER: Final = 2.0
LINGER_BYTES: Final = 16 << 20
"""Seconds and bytes of the rest of a refused body that are read, so that its sender sees why."""


class Door:
    """The application behind it is asked for what may come in."""

    def __init__(self, app: App, options: GatewayOptions, keys: KeyFile | None) -> None:
        self._app = app
        self._options = options
        self._keys = keys
        self._requests = 0
        self._of_key: Counter[str] = Counter()
        self._held = 0
        """Bytes of bodies, all together."""

    @property
    def requests(self) -> int:
        """How many are in."""
        return self._requests

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._options.max_response_bytes)
        name: str | None = None
        body = bytearray()
        counted = False
        try:
            self._check_room()
            key = scope[KEY] = self._key(scope)
            if key is not None and scope["path"] != WATCHING:
                self._take(key)
                name = key.name
            self._requests += 1
            counted = True
            async with _ends_with(scope):
                gone = await self._read(scope, receive, body)
                if not gone:
                    await self._run(scope, receive, answer, body)
        except ApiError as error:
            if answer.ended:
                pass  # as its time was over
            elif answer.begun:
                await _cut(scope, error.message)
            else:
                await answer.refuse(error, receive)
        except ConnectionAbortedError as error:
            await _cut(scope, str(error))
        finally:
            self._held -= len(body)
            self._requests -= counted
            if name is not None:
                self._of_key[name] -= 1
                if not self._of_key[name]:
                    del self._of_key[name]

    def _check_room(self) -> None:
        if self._requests >= self._options.max_requests:
            raise ApiError(503, "this gateway has as many requests as it takes: try again later")

    # --- keys ----------------------------------------------------------------------------------

    def _key(self, scope: MutableMapping[str, Any]) -> Key | None:
        if self._keys is None:
            return None
        given = given_key(_header(scope, b"authorization"))
        if given is None:
            raise ApiError(
                401,
                "No API key: send 'Authorization: Bearer KEY', or the key as the password of Basic",
                code="missing_api_key",
            )
        key = self._keys.find(given)
        if key is None:
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return key

    def _take(self, key: Key) -> None:
        most = self._options.key_requests if key.requests is None else key.requests
        if most is not None and self._of_key[key.name] >= most:
            raise ApiError(
                429,
                f"this key may have {most} requests at once: wait until one has ended",
                code="rate_limit_exceeded",
                retry_after=SOON,
            )
        self._of_key[key.name] += 1

    # --- body ----------------------------------------------------------------------------------

    async def _read(
        self, scope: MutableMapping[str, Any], receive: Receive, body: bytearray
    ) -> bool:
        """Read the body; whether its sender went away. Raises `ApiError`."""
        options, began = self._options, time.monotonic()
        told = _header(scope, b"content-length") or b""
        if told.isdigit() and int(told[:19]) > options.max_body_bytes:
            raise self._too_large()
        while True:
            left = began + options.body_timeout + len(body) / SLOWEST - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the body did not arrive in time") from None
            if message["type"] != "http.request":
                return True
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > options.max_body_bytes:
                raise self._too_large()
            if self._held + len(chunk) > 16 * options.max_body_bytes:
                raise ApiError(503, "this gateway holds as much as it takes: try again later")
            body += chunk
            self._held += len(chunk)
            if not message.get("more_body", False):
                return False

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"a body of more than {self._options.max_body_bytes} bytes: send it in parts"
        )

    # --- the route -----------------------------------------------------------------------------

    async def _run(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        answer: _Answer,
        body: bytearray,
    ) -> None:
        """Have the route answer, until it has, or its caller is gone, or the time is over."""
        waiting = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        async def replay() -> Message:
            return waiting.pop() if waiting else await forever

        route = asyncio.ensure_future(self._app(scope, replay, answer))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait(
                (route, gone),
                timeout=self._options.request_timeout + GRACE,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if route.done():
                if answer.error is not None:
                    raise answer.error from None
                route.result()
            elif not gone.done():
                raise ApiError(503, f"no answer within {self._options.request_timeout:g} s")
        finally:
            for task in (route, gone):
                task.cancel()
            await asyncio.gather(route, gone, return_exceptions=True)


class _Answer:
    """What a route sends, within its bound. A head waits for the first part of its body."""

    def __init__(self, send: Send, most: int) -> None:
        self._send = send
        self._most = most
        self._head: Message | None = None
        self.begun = False
        """Whether its caller was told anything."""
        self.ended = False
        """Whether all of it was."""
        self._bytes = 0
        self.error: Exception | None = None
        """Why the route was not let go on. Kept: the application makes an error of its own of what
        is raised within it."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._most:
            self._head = None
            self.error = ApiError(
                413, f"an answer of more than {self._most} bytes: ask for fewer at a time"
            )
            raise self.error
        if self._head is not None:
            head, self._head, self.begun = self._head, None, True
            await self._tell(head)
        body = message.get("body", b"")
        for at in range(0, len(body) - PART, PART):  # uvicorn waits for readers between parts
            await self._tell({**message, "body": bytes(body[at : at + PART]), "more_body": True})
        rest = (len(body) - 1) // PART * PART if len(body) > PART else 0
        await self._tell({**message, "body": bytes(body[rest:])})
        self.ended = not message.get("more_body", False)

    async def _tell(self, message: Message) -> None:
        """Send, to who reads. Raises ConnectionAbortedError."""
        try:
            async with asyncio.timeout(STALL):
                await self._send(message)
        except TimeoutError:
            self.error = ConnectionAbortedError(f"too little of it was read in {STALL:g} s")
            raise self.error from None

    async def refuse(self, error: ApiError, receive: Receive) -> None:
        """Send an error, where nothing was sent before."""
        body = error.body()
        headers = {**error.headers(), "content-length": str(len(body)), "connection": "close"}
        head = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": error.status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        await _drain(receive)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def _ends_with(scope: MutableMapping[str, Any]) -> AsyncIterator[None]:
    """End what is within once its server's last seconds are over. Raises `ApiError` then."""
    ending: asyncio.Event | None = scope.get(ENDING)
    if ending is None:
        yield
        return
    bound = asyncio.timeout(None)
    watching = asyncio.ensure_future(_bounded_by(ending, bound))
    try:
        async with bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise ApiError(503, "this gateway is ending: ask again", retry_after=SOON) from None
    finally:
        watching.cancel()


async def _bounded_by(ending: asyncio.Event, bound: asyncio.Timeout) -> None:
    await ending.wait()
    bound.reschedule(asyncio.get_running_loop().time() + LAST)


async def _cut(scope: MutableMapping[str, Any], why: str) -> None:
    """End a connection in the midst of an answer; what was not taken of it is dropped."""
    logger.info("an answer was cut: %s", why)
    abort = scope.get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server notices before it is returned to


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drain(receive: Receive) -> None:
    """Read what a sender still sends, for a while."""
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


def _header(scope: MutableMapping[str, Any], name: bytes) -> bytes | None:
    for found, value in scope["headers"]:
        if found == name:
            return bytes(value)
    return None
