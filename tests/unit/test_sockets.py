"""Sockets whose next bytes are waited for awake, and those whose are not."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lmpool import sockets

WITHIN = 0.2


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.settimeout(WITHIN)
    with near, far:
        yield near, far


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a tenth of what is waited awake whenever it is looked at."""
    looked = count()
    monkeypatch.setattr(sockets.time, "perf_counter", lambda: 1 + next(looked) * sockets.AWAKE / 10)


def full(end: socket.socket) -> int:
    """Write until nothing more goes. How many bytes that was."""
    sent = 0
    while True:
        try:
            sent += os.write(end.fileno(), bytes(1 << 16))
        except BlockingIOError:
            return sent


def test_what_comes_within_a_moment_is_had_without_sleep(
    ends: tuple[socket.socket, socket.socket], clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    tries = count(1)
    monkeypatch.setattr(
        sockets, "_let_others_run", lambda: far.send(b"abcde") if next(tries) == 3 else None
    )
    first, second = bytearray(2), bytearray(9)
    near.settimeout(1e-9)  # who slept would be late
    assert sockets.reads(near)([first, second]) == 5
    assert bytes(first) + bytes(second[:3]) == b"abcde"
    assert next(tries) == 4


def test_room_within_a_moment_is_used_without_sleep(
    ends: tuple[socket.socket, socket.socket], clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    waiting = full(near)
    monkeypatch.setattr(sockets, "_let_others_run", lambda: far.recv(waiting))
    near.settimeout(1e-9)
    assert sockets.writes(near)([b"ab", b"cde"]) == 5
    assert far.recv(waiting).endswith(b"abcde")


def test_what_takes_longer_is_slept_for(
    ends: tuple[socket.socket, socket.socket], clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    tries = count()
    monkeypatch.setattr(sockets, "_let_others_run", lambda: next(tries))
    near.settimeout(30)
    threading.Timer(0.1, far.send, (b"late",)).start()
    came = bytearray(10)
    assert sockets.reads(near)([came]) == 4
    assert 9 <= next(tries) <= 12  # as often as the clock says, then no more
    waiting = full(near)
    threading.Timer(0.1, far.recv, (waiting,)).start()
    assert sockets.writes(near)([b"late"]) == 4


def test_one_that_is_silent_is_given_up_after_the_sockets_timeout(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = ends
    with pytest.raises(TimeoutError):
        sockets.reads(near)([bytearray(1)])
    full(near)
    with pytest.raises(TimeoutError):
        sockets.writes(near)([b"a"])


def test_one_that_ended_is_at_its_end(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    read, write = sockets.reads(near), sockets.writes(near)
    near.shutdown(socket.SHUT_RD)
    assert read([bytearray(1)]) == 0
    far.close()
    with pytest.raises(BrokenPipeError):
        write([b"a"])
    near.close()
    for move in (read, write):
        with pytest.raises(OSError, match="file descriptor"):
            move([bytearray(1)])


def test_more_pieces_than_go_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    pieces = [bytes([n]) for n in range(3 * sockets.PIECES)]
    assert sockets.writes(near)(pieces) == sockets.PIECES
    far.send(b"".join(pieces))
    assert sockets.reads(near)([bytearray(1) for _ in pieces]) == sockets.PIECES


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
        assert not sockets.is_near(near)  # it would be waited for without end
        near.settimeout(5)
        assert sockets.is_near(near)
    assert not sockets.is_near(near)


class Peer:
    """A socket that is connected to somebody."""

    def __init__(self, *address: object) -> None:
        self._address = address

    def gettimeout(self) -> float:
        return 5.0

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
