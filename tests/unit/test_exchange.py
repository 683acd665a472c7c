"""Replies that the thread of who asks reads: whatever comes is a reply or `NOTHING`."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import hiredis
import pytest

from lmpool import exchange as exchange_module
from lmpool.bell import CAN_WAIT
from lmpool.exchange import BESIDE, NOTHING, REPLY_BYTES, pack, waited_for
from lmpool.producer.line import _told
from lmpool.wants import Digest
from tests.support.exchange_ends import LONG, Ends

pytestmark = pytest.mark.skipif(not CAN_WAIT, reason="nothing waits for two things at once here")


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_commands_arrive_as_they_are(ends: Ends) -> None:
    assert ends.exchange.send(pack(("GET", "a")) + pack(("XTRIM", b"b", "MAXLEN", "0")))
    assert ends.there.recv(1000) == (
        b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*4\r\n$5\r\nXTRIM\r\n$1\r\nb\r\n$6\r\nMAXLEN\r\n$1\r\n0\r\n"
    )


def test_replies_are_whole_however_they_come(ends: Ends) -> None:
    chance = random.Random(3)
    replies = [b"x" * chance.randrange(9000) for _ in range(60)]
    data = b"".join(b"$%d\r\n%b\r\n" % (len(reply), reply) for reply in replies)

    def come() -> None:
        at = 0
        while at < len(data):
            size = chance.choice((1, 2, 100, 5000))
            ends.there.sendall(data[at : at + size])
            at += size

    thread = threading.Thread(target=come)
    thread.start()
    assert [ends.reply() for _ in replies] == replies
    thread.join()


def test_a_refusal_is_a_reply(ends: Ends) -> None:
    ends.there.sendall(b"-NOSCRIPT no\r\n+OK\r\n")
    assert isinstance(ends.reply(), hiredis.ReplyError)
    assert ends.reply() == b"OK"


@pytest.mark.parametrize("how", ["ended", "closed", "no protocol", "late", "half", "long", "rung"])
def test_what_goes_wrong_is_nothing(ends: Ends, how: str) -> None:
    began, seconds = time.monotonic(), LONG
    if how == "ended":
        ends.there.close()
    elif how == "closed":
        ends.here.close()
    elif how == "no protocol":
        ends.there.sendall(b"HTTP/1.1 200 OK\r\n")
    elif how == "half":
        ends.there.sendall(b"$5\r\nab")
        seconds = 0.1
    elif how == "late":
        seconds = 0.1
    elif how == "rung":
        ends.bell.ring()
    else:
        ends.there.setblocking(False)
        size = 2 * REPLY_BYTES
        threading.Thread(target=_send_much, args=(ends.there, size), daemon=True).start()
    assert ends.reply(seconds) is NOTHING
    assert time.monotonic() - began < LONG
    if how in ("ended", "closed"):
        assert not ends.exchange.send(pack(("PING",)))


def _send_much(end: socket.socket, size: int) -> None:
    end.setblocking(True)
    try:
        end.sendall(b"$%d\r\n" % size + b"x" * size)
    except OSError:
        pass


@pytest.mark.parametrize("kind", [OSError, ValueError, TimeoutError, hiredis.ProtocolError])
def test_what_a_handler_raises_is_its_own(ends: Ends, kind: type[Exception]) -> None:
    def raise_it(number: int, frame: FrameType | None) -> None:
        raise kind("the handler's")

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(kind, match="the handler's"):
            ends.reply()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", [OSError, BrokenPipeError, BlockingIOError])
def test_what_a_handler_raises_in_the_midst_is_no_error_of_the_connection(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """As a handler does that comes between a call's return and its next step."""

    def raise_it(*unused: object) -> int:
        raise kind("the handler's")

    ends.there.sendall(b"+OK")
    for step in ("readv", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(exchange_module.os, step, raise_it)
            with pytest.raises(kind, match="the handler's"):
                ends.reply() if step == "readv" else ends.exchange.send(b"x")


def test_of_what_is_no_read_of_notices_nothing_is_told() -> None:
    digest = Digest(bytes(range(16)))
    entry = [b"5-1", [b"ok", digest.hex().encode()]]
    told = _told([[b"reply", [entry]]])
    assert told is not None
    assert told[0] == b"5-1"
    assert told[1][digest].status == "ok"
    assert _told({b"reply": [entry]}) == told

    chance = random.Random(9)
    parts: list[Any] = [None, b"ok", 5, [], {}, entry, b"5-1", hiredis.ReplyError("no"), NOTHING]

    def nonsense(depth: int) -> Any:
        if not depth or chance.random() < 0.3:
            return chance.choice(parts)
        return [nonsense(depth - 1) for _ in range(chance.randrange(4))]

    for _ in range(20_000):
        found = _told(nonsense(5))
        assert found is None or type(found[0]) is bytes


def test_several_replies_are_read_together(ends: Ends) -> None:
    ends.there.send(b":1\r\n:2\r\n$2\r\nab")
    assert ends.replies(2) == [1, 2]
    assert ends.replies(2, 0.02) == [NOTHING, NOTHING]
    ends.there.send(b"\r\n:3\r\n:4\r\n")
    assert ends.replies(3) == [b"ab", 3, 4]
    ends.there.send(b":5\r\n")
    ends.there.close()
    assert ends.replies(2) == [5, NOTHING]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


def test_what_lies_elsewhere_is_said_once_no_reply_is_there(
    ends: Ends, pipe: tuple[int, int]
) -> None:
    def reply(seconds: float = LONG) -> Any:
        until = time.monotonic() + seconds
        return waited_for(ends.exchange.replies(1, until, None, lambda: pipe[0]))[0]

    os.write(pipe[1], b"x")
    assert reply() is BESIDE
    assert reply() is BESIDE  # it is for others to read that
    ends.there.send(b":5\r\n")
    assert reply() == 5
    ends.there.send(b"$2\r\na")
    assert reply() is BESIDE
    os.read(pipe[0], 1)
    ends.there.send(b"b\r\n")
    assert reply() == b"ab"
    assert reply(0.02) is NOTHING
    os.write(pipe[1], b"x")
    ends.bell.ring()
    assert reply() is NOTHING


def test_a_pipe_that_was_let_go_of_is_not_waited_for(ends: Ends) -> None:
    began = time.monotonic()
    replies = ends.exchange.replies(1, began + LONG, None, lambda: -1)
    assert waited_for(replies) == [NOTHING]
    assert time.monotonic() - began < LONG / 2
