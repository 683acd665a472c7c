"""Waiting for a server that is not ready when a worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import redis.exceptions

from lmpool.errors import LmpoolError, ServerRefused, ServerUnreachable
from lmpool.worker import patience
from lmpool.worker.patience import PAUSE, SERVER_WAIT, patiently
from tests.support import logged
from tests.support.parts import Time

Pause = Callable[[float], bool]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(patience, "time", clock)
    return clock


@pytest.fixture
def pause(clock: Time) -> Pause:
    """Of a worker that is not told to stop; it takes no time but the clock's."""

    def pause(seconds: float) -> bool:
        clock.now += seconds
        return False

    return pause


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def step() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return step


PASSING = [
    ServerUnreachable("no answer"),
    redis.exceptions.ConnectionError("Connection closed by server."),
    redis.exceptions.BusyLoadingError("loading"),
    redis.exceptions.ReadOnlyError("a replica"),
    redis.exceptions.ResponseError("MASTERDOWN Link with MASTER is down"),
    redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    redis.exceptions.TimeoutError("Timeout reading from socket"),
]


def test_what_passes_is_waited_for_and_each_reason_told_once(
    pause: Pause, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    began = clock.now
    with caplog.at_level(logging.WARNING):
        assert patiently(failing(*PASSING, *PASSING), pause) == "done"
    assert clock.now == pytest.approx(began + 2 * len(PASSING) * PAUSE)
    told = logged.messages(caplog)
    assert len(told) == len(PASSING)
    assert told[0] == "waiting for the server, 60 s at most: no answer"
    assert told[-1] == "waiting for the server, 58 s at most: Timeout reading from socket"


def test_nobody_waits_longer_than_is_said(pause: Pause, clock: Time) -> None:
    began, tries = clock.now, 0

    def step() -> None:
        nonlocal tries
        tries += 1
        raise ServerUnreachable(f"try {tries}")

    with pytest.raises(ServerUnreachable) as told:
        patiently(step, pause)
    assert clock.now - began == pytest.approx(SERVER_WAIT, abs=PAUSE)
    assert str(told.value) == f"try {tries}"


@pytest.mark.parametrize(
    "error",
    [
        ServerRefused("another password"),
        redis.exceptions.AuthenticationError("WRONGPASS"),
        redis.exceptions.NoPermissionError("NOPERM"),
        redis.exceptions.ResponseError("ERR unknown command"),
        ValueError("of ours"),
    ],
)
def test_what_no_waiting_helps_against_is_raised_at_once(
    error: Any, pause: Pause, clock: Time
) -> None:
    began = clock.now
    with pytest.raises(type(error)):
        patiently(failing(error), pause)
    assert clock.now == began


def test_a_worker_that_is_told_to_stop_waits_no_longer() -> None:
    with pytest.raises(LmpoolError, match="told to stop"):
        patiently(failing(ServerUnreachable("no answer")), lambda seconds: True)
