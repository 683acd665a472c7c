"""Fixtures of every suite; see tests/support for what they start.

A test of a real server asks for `server_url` (and is marked `server` by that); one that holds on
fakeredis as well asks for `any_server` and runs on both.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings

from lmpool.producer import session
from tests.support.cluster import Cluster
from tests.support.fake import FakeServer
from tests.support.huge_pages import do_without_huge_pages
from tests.support.redis_client import open_redis
from tests.support.server import RealServer, find_server
from tests.support.workers import leaked_threads, lmpool_threads

settings.register_profile(
    "lmpool",
    deadline=None,  # machines that run tests are busy
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("lmpool")

# Who runs the tests in the background lets them ignore these, and what they start as well.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

do_without_huge_pages()

# What is imported and collected stays: no collection looks at it, neither meanwhile nor later.
gc.disable()

_pool_numbers = itertools.count(1)

LONGEST = frozenset(
    {"test_moving", "test_streams", "test_recovery", "test_clean_life", "test_lanes"}
)
"""Files that go first: processes that take a file each would wait for them at the end."""

# A busy machine may let the thread wait that counts.
session.COUNTED_WITHIN = 10.0  # type: ignore[misc]

# Where tests run side by side there is no core to spare for a second thread of a library's.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def need_server() -> str:
    """The real server's binary; without one the test is skipped, or fails where it is expected."""
    found = find_server()
    if found is None:
        text = "no Redis-compatible server: install one, or name one in LMPOOL_TEST_SERVER"
        if _is_set("LMPOOL_REQUIRE_SERVERS"):
            pytest.fail(text)
        pytest.skip(text)
    return found


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-batches",
        type=int,
        default=150,
        metavar="N",
        help="random batches of the soak on the hf engine (150)",
    )
    parser.addoption(
        "--answers",
        type=int,
        default=500,
        metavar="N",
        help="random questions of each kind that a row answers, and texts to score (500)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        asks_for = set(getattr(item, "fixturenames", ()))
        if {"server_url", "server_binary"} & asks_for:
            item.add_marker(pytest.mark.server)
        if "server_url" in asks_for or (
            "any_server" in asks_for and item.get_closest_marker("server")
        ):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def server_binary() -> str:
    """A real server's program, for tests that start servers of their own (`RealServer`)."""
    return need_server()


@pytest.fixture(scope="session")
def _session_server() -> Iterator[RealServer | Cluster]:
    need_server()
    on_cluster = _is_set("LMPOOL_TEST_CLUSTER")
    # Nothing befalls it, however busy the machine.
    with Cluster(3, 1, node_timeout=15.0) if on_cluster else RealServer() as server:
        yield server


@pytest.fixture
def server_url(_session_server: RealServer | Cluster) -> str:
    """A real server that all tests of the session share: kill none, flush nothing.

    With LMPOOL_TEST_CLUSTER=1 it is a cluster.
    """
    return _session_server.url


@pytest.fixture(scope="session")
def _session_fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def fake_url(_session_fake: FakeServer) -> str:
    """fakeredis behind a socket, shared by all tests of the session."""
    return _session_fake.url


@pytest.fixture(params=["fakeredis", pytest.param("server", marks=pytest.mark.server)])
def any_server(request: pytest.FixtureRequest) -> str:
    """The URL of fakeredis and then of a real server: the test runs on both."""
    name = "fake_url" if request.param == "fakeredis" else "server_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
def redis_client(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """A connection to the server, or to all of the cluster, that the test uses."""
    name = "any_server" if "any_server" in request.fixturenames else "server_url"
    with open_redis(request.getfixturevalue(name)) as client:
        yield client


@pytest.fixture
def pool_name() -> str:
    """A pool that no other test uses."""
    return f"t{os.getpid()}-{next(_pool_numbers)}"


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the test itself logs: asyncio tells of tasks that others left as soon as they are
    collected, which is now."""
    gc.collect()
    return caplog


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LMPOOL_") and not name.startswith(("LMPOOL_TEST_", "LMPOOL_REQUIRE_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = lmpool_threads()
    yield
    left = leaked_threads(before)
    assert not left, f"threads left behind: {', '.join(left)}"
