"""Fixtures of the suites that run on fakeredis and on a real server."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

import lmpool
from lmpool.keys import PoolKeys, ShardKeys
from tests.support.calling import WAYS, Way, calling
from tests.support.clients import connected
from tests.support.cluster import Cluster
from tests.support.embedded import assert_nothing_left
from tests.support.hold import Hold
from tests.support.pools import until_at_rest
from tests.support.processes import short_folder
from tests.support.protocol import Caller, Consumer, shard_of_pool
from tests.support.redis_client import open_redis
from tests.support.server import RealServer
from tests.support.users import url_of_user
from tests.support.workers import DEFAULTS, in_process_worker


@pytest.fixture(autouse=True)
def _one_shard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("one_shard") is not None:
        monkeypatch.setitem(DEFAULTS, "shards", 1)


@pytest.fixture
def shard(pool_name: str, any_server: str) -> ShardKeys:
    return shard_of_pool(pool_name)


@pytest.fixture
def caller(redis_client: redis.Redis, shard: ShardKeys) -> Caller:
    return Caller(redis_client, shard, "first")


@pytest.fixture
def other(redis_client: redis.Redis, shard: ShardKeys) -> Caller:
    return Caller(redis_client, shard, "second")


@pytest.fixture
def worker(redis_client: redis.Redis, shard: ShardKeys) -> Consumer:
    return Consumer(redis_client, shard)


@pytest.fixture
def pool(any_server: str, pool_name: str) -> Iterator[str]:
    """A pool with one fast worker."""
    with in_process_worker(any_server, pool_name):
        yield pool_name


@pytest.fixture
def lm(any_server: str, pool: str) -> Iterator[lmpool.PooledLM]:
    with connected(any_server, pool) as lm:
        yield lm


@pytest.fixture
def start_pool(any_server: str, pool_name: str) -> Iterator[Callable[..., str]]:
    """A pool with one worker of these settings; `delay` is the mock engine's."""
    with ExitStack() as stack:

        def start(delay: float = 0.0, **settings: Any) -> str:
            opts = {"delay": delay, **settings.pop("engine_opts", {})}
            stack.enter_context(
                in_process_worker(any_server, pool_name, engine_opts=opts, **settings)
            )
            return pool_name

        yield start


@pytest.fixture
def hold(start_pool: Callable[..., str]) -> Iterator[Hold]:
    """Nothing is computed until the test opens it. Workers of `start_pool` outlive it."""
    with Hold() as hold:
        yield hold


@pytest.fixture(scope="module")
def own_server(server_binary: str) -> Iterator[RealServer]:
    """A server that the tests of a module share, and no others."""
    with RealServer(binary=server_binary) as server:
        yield server


@pytest.fixture
def admin(own_server: RealServer) -> Iterator[redis.Redis]:
    """Who may do all on `own_server`, which is empty."""
    with own_server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def url_of(own_server: RealServer, admin: redis.Redis) -> Callable[..., str]:
    """The URL of a user of `own_server`, by its name, with these rules."""
    return partial(url_of_user, own_server, admin)


@pytest.fixture(scope="module")
def _cluster(server_binary: str) -> Iterator[Cluster]:
    with Cluster(3, 0, node_timeout=2.0, cluster_require_full_coverage="no") as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """Three primaries without replicas, whose slots stay away with them. None may be paused at the
    end of a test; one that was ended has forgotten everything."""
    _cluster.mend()
    return _cluster


@pytest.fixture
def nothing_is_left(any_server: str, pool_name: str) -> Iterator[None]:
    """When all is done the streams are empty, and no client has left anything.

    For `pytest.mark.usefixtures`: made before the fixtures of workers, it looks when they are gone.
    """
    yield
    with open_redis(any_server) as server:
        if server.exists(PoolKeys(pool_name).info):
            until_at_rest(server, pool_name)


@pytest.fixture
def confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else the client's threads look at the pool now and then, and have what is asked then."""
    monkeypatch.setattr("lmpool.producer.sender.CONFIRMED_FOR", 600.0)


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look soon after what they wait for. With a short `workers_timeout` they would, too,
    and take a worker for dead whose sign of life comes late on a busy machine."""
    monkeypatch.setattr("lmpool.producer.session.CHECK_EVERY", 0.25)


@pytest.fixture
def unhurried_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that are closed delete what is theirs, however late their threads are: after some
    seconds they would leave it to end by itself."""
    monkeypatch.setattr("lmpool.producer.client.FAREWELL", 60.0)


@pytest.fixture
def pool_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's pools put their folders. At the end nothing is there, and nobody.

    `tmp_path`, which must not come to lie there, is made first.
    """
    with short_folder() as short:
        monkeypatch.setattr(tempfile, "tempdir", str(short))
        monkeypatch.setenv("TMPDIR", str(short))
        yield short
        assert_nothing_left(short)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """How `tests.support.calling.call` calls: blocking, then awaited."""
    with calling(request.param):
        yield request.param
