"""The ways to a server: Sentinels that fail over, TLS, users with narrow permissions."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import redis

import lmpool
from lmpool.address import Sentinels
from lmpool.backends.mock import mock_row
from lmpool.errors import SettingsError
from lmpool.settings import ClientOptions
from tests.support.clients import connected
from tests.support.server import RealServer, free_port
from tests.support.waiting import until
from tests.support.workers import living_workers, worker_process

pytestmark = pytest.mark.timeout(60)


def test_sentinel_urls_are_read() -> None:
    url = "redis+sentinel://me:p%40ss@one:26380,two,[::1]:5/my%2Dservice/3"
    known = Sentinels.parse(url)
    assert known.hosts == (("one", 26380), ("two", 26379), ("::1", 5))
    assert known.service == "my-service"
    assert known.options == {"username": "me", "password": "p@ss", "db": 3}
    assert not known.tls
    assert "p%40ss" not in repr(ClientOptions(url=url))
    assert Sentinels.parse("rediss+sentinel://h/s?ssl_cert_reqs=none").tls


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://host", "names no service"),
        ("redis+sentinel://host/s/x", "database is no number"),
        ("redis+sentinel://host:0/s", "no host and port"),
        ("redis+sentinel://:secret@one,:5/s", "no host and port"),
        ("redis+sentinel://host/s?nonsense=1", "unknown option 'nonsense'"),
    ],
)
def test_sentinel_urls_that_cannot_be_used(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        lmpool.connect(url)
    assert "redis" in str(refused.value)
    assert "secret" not in str(refused.value)


@contextmanager
def sentinels(primary: RealServer, count: int = 3) -> Iterator[list[int]]:
    """Sentinels that watch `primary` as the service ``main``; their ports."""
    ports = [free_port() for _ in range(count)]
    running = []
    try:
        for port in ports:
            file = primary.folder / f"sentinel-{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {primary.folder}\n"
                f"sentinel monitor main 127.0.0.1 {primary.port} 2\n"
                "sentinel down-after-milliseconds main 1000\n"
                "sentinel failover-timeout main 5000\n"
            )
            with (primary.folder / f"sentinel-{port}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        [primary.binary, str(file), "--sentinel"], stdout=log, stderr=log
                    )
                )
        for port in ports:
            with redis.Redis(port=port, socket_connect_timeout=1) as client:

                def ready(client: redis.Redis = client) -> bool:
                    try:
                        state = client.sentinel_master("main")
                    except redis.exceptions.RedisError:
                        return False
                    return state["num-other-sentinels"] == count - 1 and state["num-slaves"] == 1

                until(ready, 20, what="the sentinels to know each other and the replica", every=0.1)
        yield ports
    finally:
        for process in running:
            process.kill()
            process.wait(10)


def test_a_failover_of_sentinels_loses_nothing(server_binary, pool_name):
    with ExitStack() as stack:
        primary = stack.enter_context(RealServer(binary=server_binary, tcp=True))
        replica = stack.enter_context(
            RealServer(binary=server_binary, tcp=True, replicaof=f"127.0.0.1 {primary.port}")
        )
        ports = stack.enter_context(sentinels(primary))
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        url = f"redis+sentinel://{hosts}/main/0"
        stack.enter_context(worker_process(url, pool_name, alive=False))
        until(lambda: living_workers(primary.url, pool_name), 20, what="the worker to be alive")
        lm = stack.enter_context(
            connected(url, pool_name, cache_bytes=0, workers_timeout=40, reconnect_timeout=40)
        )
        row = lm.next_token_logprobs_sync([1, 2], timeout=20)
        np.testing.assert_array_equal(row, mock_row([1, 2], 256))
        primary.kill()
        began = time.monotonic()
        for number in range(5):
            prompt = [3, number]
            row = lm.next_token_logprobs_sync(prompt, timeout=45)
            np.testing.assert_array_equal(row, mock_row(prompt, 256))
        assert time.monotonic() - began < 40
        with replica.client() as client:
            assert client.info("replication")["role"] == "master"
