"""What every request of a gateway passes, with an application of the test's own behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lmpool.gateway import door as door_module
from lmpool.gateway.door import Door
from lmpool.gateway.keys import KeyFile, line, new_key
from lmpool.gateway.options import GatewayOptions, PoolAddress
from lmpool.gateway.sse import Streamed

POOLS = (PoolAddress("pool"),)
KEY = new_key()


class Caller:
    """One that sends parts of a body, and stays until it is told to go."""

    def __init__(self, parts: Iterable[bytes | float] = (b"{}",), **headers: str) -> None:
        self._parts = list(parts)
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        self.reads = True
        self.is_cut = False
        self.ending = asyncio.Event()
        self.headers = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]

    async def receive(self) -> Any:
        while self._parts:
            part = self._parts.pop(0)
            if isinstance(part, float):
                await asyncio.sleep(part)
                continue
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if not self.reads:
            await asyncio.Event().wait()

    async def ask(self, door: Door, path: str = "/v1/x") -> None:
        scope = {"type": "http", "path": path, "headers": self.headers, "method": "POST"}

        def abort() -> None:
            self.is_cut = True

        of_server = {door_module.ABORT: abort, door_module.ENDING: self.ending}
        await door({**scope, **of_server}, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def answer_headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.sent if m["type"] == "http.response.body")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def opened(app: Any = echo, keys: KeyFile | None = None, **options: Any) -> Door:
    return Door(app, GatewayOptions(POOLS, **options), keys)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


def test_a_body_comes_through_whole() -> None:
    async def test() -> None:
        door, caller = opened(), Caller([b"a" * 1000, b"", b"b" * 10])
        await caller.ask(door)
        assert caller.body == b"a" * 1000 + b"b" * 10
        assert door.requests == 0

    run(test)


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_a_body_beyond_its_bound_is_not_held(told: bool) -> None:
    async def test() -> None:
        door = opened(max_body_bytes=100)
        taken = []

        class Endless(Caller):
            async def receive(self) -> Any:
                taken.append(1)
                await asyncio.sleep(0)
                return {"type": "http.request", "body": b"x" * 50, "more_body": len(taken) < 9}

        caller = Endless(**({"content_length": str(10**9)} if told else {}))
        await caller.ask(door)
        assert caller.status == 413
        assert json.loads(caller.body)["error"]["type"] == "request_too_large"
        assert door._held == 0

    run(test)


def test_a_body_that_trickles_in_is_given_up() -> None:
    async def test() -> None:
        caller = Caller([b"a", 0.3, b"b", 0.3, b"c"])
        await caller.ask(opened(body_timeout=0.2))
        assert caller.status == 408

    run(test)


def test_all_bodies_together_are_bounded() -> None:
    async def test() -> None:
        door = opened(max_body_bytes=100, body_timeout=5.0)
        slow = [Caller([b"x" * 90, 0.5, b"y"]) for _ in range(20)]
        await asyncio.gather(*(caller.ask(door) for caller in slow))
        statuses = [caller.status for caller in slow]
        assert statuses.count(503) == 3
        assert statuses.count(200) == 17
        assert door._held == 0

    run(test)


def test_who_hangs_up_ends_what_runs_for_it() -> None:
    async def test() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        door, caller = opened(slow), Caller()
        asked = asyncio.create_task(caller.ask(door))
        await began.wait()
        assert door.requests == 1
        caller.gone.set()
        await asked
        assert ended.is_set()
        assert door.requests == 0
        assert not caller.sent

    run(test)


def test_who_hangs_up_before_the_body_is_there_reaches_nobody() -> None:
    async def test() -> None:
        async def never(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

        caller = Caller([])
        caller.gone.set()
        await caller.ask(opened(never))
        assert not caller.sent

    run(test)


def test_a_request_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "GRACE", 0.0)

    async def test() -> None:
        async def stuck(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(60)

        caller = Caller()
        await caller.ask(opened(stuck, request_timeout=0.1))
        assert caller.status == 503
        assert 1 <= int(caller.answer_headers["retry-after"]) <= 120

    run(test)


@pytest.mark.parametrize("parts", [[b"{}"], [b"{", 60.0, b"}"]], ids=["whole", "in-parts"])
def test_who_waits_as_the_server_ends_is_told_before_it_has(
    monkeypatch: pytest.MonkeyPatch, parts: list[bytes | float]
) -> None:
    monkeypatch.setattr(door_module, "LAST", 0.0)

    async def test() -> None:
        async def stuck(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(60)

        door, caller = opened(stuck), Caller(parts)
        caller.ending.set()
        await caller.ask(door)
        assert caller.status == 503
        assert json.loads(caller.body)["error"]["message"] == "this gateway is ending: ask again"
        assert caller.answer_headers["retry-after"] == "1"
        assert not caller.is_cut
        assert door.requests == 0

    run(test)


def test_a_stream_that_goes_on_as_the_server_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "LAST", 0.0)

    async def test() -> None:
        async def endless(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            caller.ending.set()
            await asyncio.sleep(60)

        caller = Caller()
        await caller.ask(opened(endless))
        assert caller.is_cut
        assert caller.body == b"x"

    run(test)


def test_an_answer_that_is_there_before_the_server_has_ended_is_told() -> None:
    async def test() -> None:
        caller = Caller([b"x"])
        caller.ending.set()
        await caller.ask(opened())
        assert (caller.status, caller.body) == (200, b"x")

    run(test)


def test_an_answer_beyond_its_bound_is_refused_or_cut() -> None:
    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 101})

    async def streamed(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"x" * 50, "more_body": True})

    async def test() -> None:
        caller = Caller()
        await caller.ask(opened(whole, max_response_bytes=100))
        assert caller.status == 413
        caller = Caller()
        await caller.ask(opened(streamed, max_response_bytes=100))
        assert caller.body == b"x" * 100
        assert caller.is_cut

    run(test)


def test_an_answer_that_nobody_takes_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "STALL", 0.05)
    ended = False

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal ended
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended = True

    async def test() -> None:
        caller = Caller()
        caller.reads = False
        door = opened(endless)
        await caller.ask(door)
        assert caller.is_cut
        assert ended
        assert door.requests == 0

    run(test)


def test_a_stream_that_is_cut_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is collected: it holds places that others wait for."""
    monkeypatch.setattr(door_module, "STALL", 0.05)
    ended = False

    async def parts() -> AsyncGenerator[bytes]:
        nonlocal ended
        try:
            while True:
                yield b"x"
        finally:
            await asyncio.sleep(0)  # as what withdraws jobs does
            ended = True

    held = parts()

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        await Streamed(held, "text/plain")(scope, receive, send)

    async def test() -> None:
        caller = Caller()
        caller.reads = False
        await caller.ask(opened(streams))
        assert ended

    run(test)


def test_so_many_requests_at_once() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def waits(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await echo(scope, receive, send)

        door = opened(waits, max_requests=2)
        callers = [Caller() for _ in range(3)]
        asked = [asyncio.create_task(caller.ask(door)) for caller in callers]
        await asked[2]
        assert callers[2].status == 503
        go.set()
        await asyncio.gather(*asked)
        assert [caller.status for caller in callers] == [200, 200, 503]

    run(test)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    (tmp_path / "keys").write_text(f"{line('a', KEY, 2)}\n{line('b', KEY + 'b')}")
    return KeyFile(tmp_path / "keys")


def test_without_a_key_only_what_costs_nothing_is_open(keys: KeyFile) -> None:
    async def test() -> None:
        door = opened(keys=keys)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic wrong"}):
            for path in (
                "/v1/completions",
                "/v1/models",
                "/inference/v1/generate",
                "/tokenize",
                "/live/view",
                "/live/events",
                "/live/next-tokens",
                "/live/dead-letters/drop",
            ):
                caller = Caller(**headers)
                await caller.ask(door, path)
                assert caller.status == 401
                assert caller.answer_headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/version", "/openapi.json", "/", "/page/page.js"):
            caller = Caller()
            await caller.ask(door, path)
            assert caller.status == 200
        caller = Caller(authorization=f"Bearer {KEY}")
        await caller.ask(door)
        assert caller.status == 200

    run(test)


def test_a_key_has_so_many_requests_at_once_and_others_are_not_disturbed(keys: KeyFile) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def waits(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await echo(scope, receive, send)

        door = opened(waits, keys)
        mine = [Caller(authorization=f"Bearer {KEY}") for _ in range(3)]
        asked = [asyncio.create_task(caller.ask(door)) for caller in mine]
        await asked[2]
        assert mine[2].status == 429
        assert 1 <= int(mine[2].answer_headers["retry-after"]) <= 120
        other = Caller(authorization=f"Bearer {KEY}b")
        asked.append(asyncio.create_task(other.ask(door)))
        go.set()
        await asyncio.gather(*asked)
        assert other.status == 200
        again = Caller(authorization=f"Bearer {KEY}")
        await again.ask(door)
        assert again.status == 200

    run(test)
