"""How a gateway listens."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from uvicorn.server import ServerState

from lmpool.errors import SettingsError
from lmpool.gateway.door import PART, STALL
from lmpool.gateway.serve import (
    MAX_HEAD_BYTES,
    SEND_BYTES,
    UNREADABLE,
    _Files,
    _Server,
    listen,
    protocol,
)
from lmpool.insistence import Insistence
from lmpool.monitoring.server import MonitoringServer

SLOWEST = 8192
"""Bytes a second at which a reader is not taken to be gone."""


def test_a_slow_reader_is_seen_to_read() -> None:
    """The system tells of room once a third of its buffer is free, twice what was asked for."""
    listener = listen("127.0.0.1", 0)
    with closing(listener), socket.create_connection(listener.getsockname()):
        taken, _ = listener.accept()
        with taken:
            held = taken.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert held == 2 * SEND_BYTES
    assert (held / 3 + PART) / STALL < SLOWEST


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("no.host.invalid", 0, r"\(no host of that name is known\): write an address of this ma"),
        ("192.0.2.1", 0, r"\(Cannot assign requested address\): write an address of this machine"),
        ("127.0.0.1", None, r"\(Address already in use\): stop what does, or write another port"),
    ],
)
def test_a_wrong_host_is_told_from_a_port_in_use(host: str, port: int | None, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1] if port is None else port
        message = rf"^host='{host}', port={number}: cannot listen there {said}"
        with pytest.raises(SettingsError, match=message) as refused:
            listen(host, number)
        with pytest.raises(SettingsError) as of_metrics:
            MonitoringServer(lambda *_: [], host, number).listen()
    assert str(refused.value) == str(of_metrics.value)
    assert str(refused.value).count(f"{host}'") == 1


# --- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.EBADF, None)],
)
def test_a_want_of_descriptors_is_said_with_its_remedy_and_nothing_else(
    number: int, remedy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    listener = MagicMock()
    listener.dup.side_effect = OSError(number, os.strerror(number))
    files = _Files(listener)
    for _ in range(2):
        files.look()
    said = [text for text in caplog.messages if "turned away" in text]
    assert len(said) == (remedy is not None)
    assert all(remedy in text for text in said if remedy)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[socket.socket, ServerState]]:
    """A caller's socket, whose server answers with `app`, and the connections of that."""
    state, kind = ServerState(), protocol(30)
    kind.patience = 0.3  # type: ignore[attr-defined]
    config = uvicorn.Config(app, http=kind, ws="none", log_config=None)
    config.load()
    listener = listen("127.0.0.1", 0)
    made = partial(kind, config, state, {})
    server = await asyncio.get_running_loop().create_server(made, sock=listener)
    try:
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.connect(listener.getsockname())
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield caller, state
    finally:
        server.close()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body that came."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def whole_parts(parts: Sequence[bytes]) -> bytes:
    """What `echo` answers to a request that comes in these parts."""
    async with serving(echo) as (caller, _):
        loop = asyncio.get_running_loop()
        caller.setblocking(False)
        for part in parts:
            await loop.sock_sendall(caller, part)
            await asyncio.sleep(0.002)
        answer = b""
        async with asyncio.timeout(5):
            while data := await loop.sock_recv(caller, 4096):
                answer += data
        return answer


async def answer_in_full(parts: Sequence[bytes]) -> bytes:
    """The same where the server may end the connection first."""
    try:
        return await whole_parts(parts)
    except (ConnectionResetError, BrokenPipeError):
        return b""


BODY = b'{"Upgrade": 1}\r\nUpgrade: x\r\n\r\n\r\nUp'
OFFER = (
    b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\nX: \r\n"
    b"Content-Length: %d\r\n\r\n"
) % len(BODY)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_an_offer_of_another_protocol_may_come_in_parts(size: int) -> None:
    request = OFFER + BODY
    parts = [request[at : at + size] for at in range(0, len(request), size)]
    answer = asyncio.run(whole_parts(parts))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.partition(b"\r\n\r\n")[2].startswith(b"%x\r\n%b" % (len(BODY), BODY))


LARGE_BODY = bytes(2 * MAX_HEAD_BYTES)


def long_head(size: int) -> bytes:
    """One of so many bytes, its end included."""
    begun = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\nX: " % len(
        LARGE_BODY
    )
    return begun + b"x" * (size - len(begun) - 4) + b"\r\n\r\n"


KEPT = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nA"


@pytest.mark.parametrize("before", [b"", b"\r\n\r\n", KEPT], ids=["first", "lines", "second"])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 40])
def test_a_head_is_as_long_as_it_may_be_however_it_comes(before: bytes, cut: int) -> None:
    """In one read, with a large body right behind it, or cut within its end; also behind empty
    lines, and as the second of its connection."""
    empty = 0 if before == KEPT else len(before)
    for size, is_taken in ((MAX_HEAD_BYTES - empty, True), (MAX_HEAD_BYTES + 1, False)):
        head = long_head(size)
        cut_at = len(head) - cut
        for begun in ([before, head[:cut_at]], [before + head[:cut_at]]):
            parts = [*begun, head[cut_at:] + LARGE_BODY]
            answer = asyncio.run(answer_in_full([part for part in parts if part]))
            assert (LARGE_BODY in answer) == is_taken, (size, cut)


@pytest.mark.parametrize("cut", range(OFFER.index(b"\r\nUpgrade"), len(OFFER) + 1))
def test_a_head_may_be_cut_anywhere(cut: int) -> None:
    answer = asyncio.run(whole_parts([OFFER[:cut], OFFER[cut:] + BODY]))
    assert BODY in answer


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\xf8\x01\x00\x00\xf4\x03\x03" + b"x" * 240,  # as TLS begins
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_an_error_like_others(sent: bytes) -> None:
    head, _, body = asyncio.run(whole_parts([sent])).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
    assert json.loads(body)["error"]["message"] == UNREADABLE


def test_no_error_is_told_in_the_midst_of_an_answer() -> None:
    async def test() -> bytes:
        async def begins(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass

        async with serving(begins) as (caller, _):
            loop = asyncio.get_running_loop()
            caller.setblocking(False)
            start = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            await loop.sock_sendall(caller, start)
            answer = b""
            with suppress(ConnectionError):
                async with asyncio.timeout(5):
                    while data := await loop.sock_recv(caller, 4096):
                        answer += data
                        if b"begun" in answer:
                            await loop.sock_sendall(caller, b"zz\r\n")
            return answer

    answer = asyncio.run(test())
    assert b"begun" in answer
    assert b"error" not in answer
    assert b"400" not in answer


class Held:
    """Answers with the path and body of a request once it may, and says what it has been asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.gone: list[bytes] = []
        self.changed = asyncio.Event()
        self.may = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        said = scope["path"].encode() + body
        self._say(self.asked, said)
        gone, may = asyncio.create_task(receive()), asyncio.create_task(self.may.acquire())
        await asyncio.wait((gone, may), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self._say(self.gone, said)
        gone.cancel()
        may.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"[" + said + b"]"})

    def _say(self, where: list[bytes], said: bytes) -> None:
        where.append(said)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def post(path: str, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(), len(body), body,
    )  # fmt: skip


@pytest.mark.parametrize("cut", [0, 20, 60, 100, 150, 190, 1000])
def test_requests_that_come_before_the_last_ones_answer_are_answered_in_their_order(
    cut: int,
) -> None:
    """However they come: the first wait for nothing of what is behind them."""
    sent = post("/a", b"A" * 9) + post("/b", b"B" * 9) + b"GET /c HTTP/1.1\r\nHost: x\r\n\r\n"

    async def test() -> bytes:
        app, answer = Held(), b""
        async with serving(app) as (caller, _):
            loop = asyncio.get_running_loop()
            caller.setblocking(False)
            await loop.sock_sendall(caller, sent[:cut])
            await asyncio.sleep(0.002)
            await loop.sock_sendall(caller, sent[cut:])
            async with asyncio.timeout(60):
                for number in range(1, 4):
                    await app.until(lambda: len(app.asked) == number)  # noqa: B023
                    app.may.release()
                    while b"]" not in answer[answer.rfind(b"HTTP/1.1") :] or (
                        answer.count(b"]") < number
                    ):
                        answer += await loop.sock_recv(caller, 4096)
        assert app.gone == []
        return answer

    answer = asyncio.run(test())
    assert re.findall(rb"\[.*?\]", answer) == [b"[/aAAAAAAAAA]", b"[/bBBBBBBBBB]", b"[/c]"]


@pytest.mark.parametrize("cut", [1, 60, 1000])
def test_an_offer_of_another_protocol_before_the_last_ones_answer_loses_no_body(cut: int) -> None:
    """It is answered as what it is, or the connection ends."""
    offer = post("/b", b"B" * 9).replace(b"Host:", b"Upgrade: h2c\r\nConnection: Upgrade\r\nHost:")
    assert offer.count(b"h2c") == 1
    sent = post("/a", b"A" * 9) + offer + post("/c", b"C" * 9)

    async def test() -> bytes:
        app, answer = Held(), b""
        for _ in range(3):
            app.may.release()
        async with serving(app) as (caller, _):
            loop = asyncio.get_running_loop()
            caller.setblocking(False)
            with suppress(ConnectionError):
                await loop.sock_sendall(caller, sent[:cut])
                await asyncio.sleep(0.002)
                await loop.sock_sendall(caller, sent[cut:])
                async with asyncio.timeout(60):
                    while answer.count(b"]") < 3 and (part := await loop.sock_recv(caller, 4096)):
                        answer += part
        return answer

    right = [b"[/aAAAAAAAAA]", b"[/bBBBBBBBBB]", b"[/cCCCCCCCCC]"]
    found = re.findall(rb"\[.*?\]", asyncio.run(test()))
    assert found == right[: len(found)]


def test_a_request_behind_another_hides_no_hang_up() -> None:
    async def test() -> None:
        app = Held()
        async with serving(app) as (caller, _):
            caller.sendall(post("/a", b"A") + post("/b", b"B") + post("/c", b"C" * 1000)[:200])
            await app.until(lambda: app.asked == [b"/aA"])
            caller.close()
            await app.until(lambda: app.gone == [b"/aA"])
        assert app.asked == [b"/aA"]

    asyncio.run(test())


@pytest.mark.parametrize(
    "much", [b"GET / HTTP/1.1\r\n\r\n" * 100, post("/", b"x" * 300_000)], ids=["many", "long"]
)
def test_more_than_may_wait_behind_a_request_ends_the_connection(much: bytes) -> None:
    async def test() -> None:
        app = Held()
        async with serving(app) as (caller, _):
            caller.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(caller, post("/a", b"A"))
            await app.until(lambda: app.asked == [b"/aA"])
            with suppress(ConnectionError):
                await loop.sock_sendall(caller, post("/b", b"B") + much)
            await app.until(lambda: app.gone == [b"/aA"])

    asyncio.run(test())


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_a_connection_ends_though_nobody_reads_the_end_of_its_answer(more: str) -> None:
    """One that was closed, too."""

    async def test() -> None:
        answered = asyncio.Event()

        async def long(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * (8 << 20)})
            answered.set()

        async with serving(long) as (caller, state):
            caller.sendall(f"GET / HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
            await asyncio.wait_for(answered.wait(), 5)
            async with asyncio.timeout(60):
                while state.connections:  # noqa: ASYNC110 - uvicorn's, which tells nobody
                    await asyncio.sleep(0.01)

    asyncio.run(test())


def test_who_reads_in_the_end_is_left_alone() -> None:
    async def test() -> None:
        kind: Any = protocol(30)
        kind.patience = 0.0
        config = uvicorn.Config(echo, http=kind, ws="none", log_config=None)
        config.load()
        made, transport = kind(config, ServerState(), {}), MagicMock()
        made.connection_made(transport)
        for is_read in (True, False):
            made.pause_writing()
            if is_read:
                made.resume_writing()
            for _ in range(3):
                await asyncio.sleep(0)
            assert transport.abort.called is not is_read
        made.connection_lost(None)

    asyncio.run(test())


@pytest.mark.parametrize(("later", "hastened"), [(0.0, False), (0.49, False), (0.5, True)])
def test_ctrl_c_that_comes_twice_at_once_is_one(later: float, hastened: bool) -> None:
    """From the terminal, and from who started it: what is under way has its time all the same."""
    now = [100.0]
    server = _Server(
        uvicorn.Config(MagicMock(), log_config=None), MagicMock(), Insistence(lambda: now[0])
    )
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit
    now[0] += later
    server.handle_exit(signal.SIGINT, None)
    assert server.force_exit == hastened
