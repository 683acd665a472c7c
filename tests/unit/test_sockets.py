"""Sockets whose next bytes are waited for awake, and those whose are not."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmpool import sockets
from tests.support.waiting import until

WITHIN = 0.2


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.settimeout(WITHIN)
    with near, far:
        yield near, far


class Clock:
    """One that goes on by a tenth of what is waited awake whenever it is looked at; `then` happens
    at its third look."""

    def __init__(self) -> None:
        self.looks = 0
        self.then: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        self.looks += 1
        if self.looks == 3:
            self.then()
        return 1 + self.looks * sockets.AWAKE / 10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(sockets, "_cores", lambda: 2)
    monkeypatch.setattr(sockets.time, "perf_counter", made := Clock())
    return made


def full(end: socket.socket) -> int:
    """Write until nothing more goes. How many bytes that was."""
    sent = 0
    while True:
        try:
            sent += os.write(end.fileno(), bytes(1 << 16))
        except BlockingIOError:
            return sent


def test_what_comes_within_a_moment_is_had_without_sleep(
    ends: tuple[socket.socket, socket.socket], clock: Clock
) -> None:
    near, far = ends
    clock.then = lambda: far.send(b"abcde")
    first, second = bytearray(2), bytearray(9)
    near.settimeout(1e-9)  # who slept would be late
    asleep, rest = sockets.reads(near)
    assert rest([first, second]) == 5
    assert bytes(first) + bytes(second[:3]) == b"abcde"
    assert clock.looks == 3
    with pytest.raises(TimeoutError):
        asleep([first])
    assert clock.looks == 3


def test_room_within_a_moment_is_used_without_sleep(
    ends: tuple[socket.socket, socket.socket], clock: Clock
) -> None:
    near, far = ends
    write = sockets.writes(near)
    waiting = full(near)
    clock.then = lambda: far.recv(waiting, socket.MSG_WAITALL)
    near.settimeout(1e-9)
    assert write([b"ab", b"cde"]) == 5
    assert clock.looks == 3
    assert far.recv(10) == b"abcde"


def test_what_takes_longer_is_slept_for(
    ends: tuple[socket.socket, socket.socket], clock: Clock
) -> None:
    near, far = ends
    near.settimeout(30)
    _, read = sockets.reads(near)
    write = sockets.writes(near)

    def late(move: Callable[[], object], looks: int) -> None:
        until(lambda: clock.looks >= looks)  # however long the other thread takes to begin
        time.sleep(0.1)
        move()

    threading.Thread(target=late, args=(lambda: far.send(b"late"), 10)).start()
    came = bytearray(10)
    assert read([came]) == 4
    assert 10 <= clock.looks <= 13  # as often as the clock says, then no more
    waiting = full(near)
    looks = clock.looks + 10
    threading.Thread(
        target=late, args=(lambda: far.recv(waiting, socket.MSG_WAITALL), looks)
    ).start()
    assert write([b"late"]) == 4
    assert 20 <= clock.looks <= 26


def test_nothing_is_waited_awake_for_long() -> None:
    # As others may need the core, of which the one that is waited for is one.
    assert 0 < sockets.AWAKE <= 1e-3


@pytest.mark.parametrize("why", ["one core", "no timeout"])
def test_none_is_waited_for_awake_where_that_leads_nowhere(
    ends: tuple[socket.socket, socket.socket],
    clock: Clock,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = ends
    near.settimeout(30)
    if why == "one core":  # which the other end needs
        monkeypatch.setattr(sockets, "_cores", lambda: 1)
    else:
        near.settimeout(None)
    threading.Timer(0.1, far.send, (b"late",)).start()
    assert sockets.reads(near)[1]([bytearray(4)]) == 4
    assert clock.looks == 0


def test_a_unix_socket_holds_what_the_system_lets_it(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    usual, kind = far.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), socket.SO_SNDBUF
    sockets.writes(near)
    assert near.getsockopt(socket.SOL_SOCKET, kind) >= usual
    far.setsockopt(socket.SOL_SOCKET, kind, sockets.SEND_BYTES)
    found = near.getsockopt(socket.SOL_SOCKET, kind)
    assert found == far.getsockopt(socket.SOL_SOCKET, kind)
    monkeypatch.setattr(sockets, "SEND_BYTES", found // 4)
    sockets.writes(near)
    assert near.getsockopt(socket.SOL_SOCKET, kind) == found  # no less than it had


def test_one_that_is_silent_is_given_up_after_the_sockets_timeout(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = ends
    with pytest.raises(TimeoutError):
        sockets.reads(near)[1]([bytearray(1)])
    write = sockets.writes(near)
    full(near)
    with pytest.raises(TimeoutError):
        write([b"a"])


def test_one_that_ended_is_at_its_end(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    (first, rest), write = sockets.reads(near), sockets.writes(near)
    near.shutdown(socket.SHUT_RD)
    assert first([bytearray(1)]) == rest([bytearray(1)]) == 0
    far.close()
    with pytest.raises(BrokenPipeError):
        write([b"a"])
    near.close()
    for move in (first, rest, write):
        with pytest.raises(OSError, match="file descriptor"):
            move([bytearray(1)])


def test_more_pieces_than_go_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    pieces = [bytes([n]) for n in range(3 * sockets.PIECES)]
    assert sockets.writes(near)(pieces) == sockets.PIECES
    far.send(b"".join(pieces))
    for read in sockets.reads(near):
        assert read([bytearray(1) for _ in pieces]) == sockets.PIECES


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "unix"])
def test_servers_on_the_same_machine_are_near(host: str, tmp_path: Path) -> None:
    family = {"unix": socket.AF_UNIX, "::1": socket.AF_INET6}.get(host, socket.AF_INET)
    with closing(socket.socket(family)) as listener, closing(socket.socket(family)) as near:
        try:
            listener.bind(str(tmp_path / "s") if host == "unix" else (host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listener.listen()
        near.connect(listener.getsockname())
        assert sockets.is_near(near)
    assert not sockets.is_near(near)


class Peer:
    """A socket that is connected to somebody."""

    def __init__(self, *address: object) -> None:
        self._address = address

    def getpeername(self) -> tuple[object, ...]:
        return self._address


@pytest.mark.parametrize(
    ("address", "near"),
    [
        (("10.0.0.7", 6379), False),
        (("128.0.0.1", 6379), False),
        (("fe80::1", 6379, 0, 2), False),
        (("::ffff:127.0.0.1", 6379, 0, 0), True),
        (("::ffff:10.0.0.7", 6379, 0, 0), False),
    ],
)
def test_who_is_elsewhere_is_slept_for(address: tuple[object, ...], near: bool) -> None:
    peer: Any = Peer(*address)
    assert sockets.is_near(peer) is near
