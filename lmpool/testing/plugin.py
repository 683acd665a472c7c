"""The fixtures of lmpool: a plug-in that each run of pytest loads where lmpool is installed, and
which reads the rest of lmpool when a test asks for one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lmpool.testing.mock_pool import MockPool, MockPoolArguments


@pytest.fixture
def lmpool_options() -> MockPoolArguments:
    """What `lmpool_fake` and `lmpool_pool` are made with: define it anew for other options."""
    return {}


@pytest.fixture
def lmpool_fake(
    lmpool_options: MockPoolArguments, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MockPool]:
    """A pool of this test's own on fakeredis, all of it in this process: a `MockPool`.

    ``lmpool.connect()`` finds it, too.
    """
    from lmpool.testing.mock_pool import MockPool

    _set_aside_variables(monkeypatch)
    with MockPool(**lmpool_options) as pool:
        _point_to(pool, monkeypatch)
        yield pool


@pytest.fixture(scope="session")
def _lmpool_server() -> Iterator[str]:
    """A server for the tests of this session: its URL."""
    from lmpool.testing.private_server import PrivateServer

    with PrivateServer() as server:
        yield server.url


@pytest.fixture
def lmpool_pool(
    _lmpool_server: str, lmpool_options: MockPoolArguments, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MockPool]:
    """A pool of this test's own on a real server, which the tests of the session share.

    A `MockPool`; ``lmpool.connect()`` finds it, too, in this process and in those that it starts.
    """
    from lmpool.testing.mock_pool import MockPool

    _set_aside_variables(monkeypatch)
    with MockPool(_lmpool_server, **lmpool_options) as pool:
        _point_to(pool, monkeypatch)
        yield pool


def _set_aside_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shell says of other pools is not for tests, nor what a file of settings does."""
    from lmpool.config_file import VARIABLE
    from lmpool.settings import ClientOptions, WorkerOptions

    monkeypatch.setenv(VARIABLE, os.devnull)  # without one, that of the current folder is read
    for name in {**ClientOptions.model_fields, **WorkerOptions.model_fields}:
        monkeypatch.delenv(f"LMPOOL_{name.upper()}", raising=False)


def _point_to(pool: MockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMPOOL_URL", pool.url)
    monkeypatch.setenv("LMPOOL_POOL", pool.pool)
    monkeypatch.setenv("LMPOOL_CACHE_BYTES", "0")
