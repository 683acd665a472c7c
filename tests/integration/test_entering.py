"""A client that is entered while its server says nothing."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmpool
from lmpool.errors import PoolTimeout

SOON = 10.0
"""Seconds in which who leaves has left; a connection would be waited for 15."""


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server that takes connections, and never answers."""
    monkeypatch.setattr("lmpool.producer.client.FAREWELL", 60.0)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        yield f"unix://{tmp_path / 's'}"


@pytest.fixture(autouse=True)
def _is_over_soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


async def enter(lm: lmpool.PooledLM) -> None:
    async with lm:
        raise AssertionError("nobody is there")


def test_who_is_cancelled_as_it_enters_has_left(silent: str) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(enter(lmpool.connect(silent)), 0.3))


def test_whose_time_is_over_as_it_enters_has_left(silent: str) -> None:
    with pytest.raises(PoolTimeout):
        asyncio.run(enter(lmpool.connect(silent, request_timeout=0.3)))


def test_who_is_interrupted_as_it_enters_has_left(silent: str) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt), lmpool.connect(silent):
            raise AssertionError("nobody is there")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
