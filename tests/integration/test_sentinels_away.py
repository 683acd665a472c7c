"""Sentinels, or the primary that they name, are away when somebody connects for the first time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import pytest
import redis.asyncio
import redis.exceptions
from redis.asyncio.connection import ConnectionPool

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.control_connections import control_pool
from lmpool.errors import ServerUnreachable
from lmpool.keys import PoolKeys
from lmpool.server import open_server
from lmpool.worker.service import Service
from tests.support.clients import connected
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.sentinels import sentinels
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker


@pytest.fixture
def primary(server_binary: str) -> Iterator[RealServer]:
    with RealServer(binary=server_binary, tcp=True) as server:
        yield server


def test_a_connection_that_met_no_sentinel_is_used_again(primary: RealServer) -> None:
    port = free_port()
    server = open_server(f"redis+sentinel://127.0.0.1:{port}/main/0")
    for _ in range(3):
        with pytest.raises(redis.exceptions.ConnectionError, match="No master found"):
            server.ping()

    def answers() -> bool:
        """A Sentinel that missed the primary for a second does not name it for a moment."""
        with suppress(redis.exceptions.ConnectionError):
            return bool(server.ping())
        return False

    with sentinels(primary, replicas=0, ports=[port]):
        until(answers, what="the primary to be found")
        primary.kill()
        for _ in range(2):
            with pytest.raises(redis.exceptions.ConnectionError):
                server.ping()
        primary.start()
        until(answers, what="the primary to be found again")
    server.close()


def test_a_client_that_met_no_sentinel_connects_later(primary: RealServer, pool_name: str) -> None:
    port = free_port()
    url = f"redis+sentinel://127.0.0.1:{port}/main/0"
    with ExitStack() as stack:
        lm = stack.enter_context(closing(lmpool.connect(url, pool_name, framework="numpy")))
        with pytest.raises(ServerUnreachable, match="No master found"):
            lm.next_token_logprobs_sync([1])
        stack.enter_context(sentinels(primary, replicas=0, ports=[port]))
        stack.enter_context(in_process_worker(url, pool_name))
        np.testing.assert_array_equal(lm.next_token_logprobs_sync([1]), mock_row([1], 256))


def test_who_has_ended_is_connected_to_no_sentinel(primary: RealServer, pool_name: str) -> None:
    """Also while somebody holds what it asked with: an error's traceback may, for ever."""
    port = free_port()

    def is_as_before() -> bool:
        return len(looks.client_list()) == before

    async def ask_for_control_jobs(url: str) -> ConnectionPool:
        pool = control_pool(url, PoolKeys(pool_name))
        asks = redis.asyncio.Redis(connection_pool=pool)
        async with asyncio.timeout(60):
            while True:
                with suppress(redis.exceptions.ConnectionError):  # as in `answers`, above
                    assert await asks.ping()
                    break
        assert not is_as_before()
        await asks.aclose(close_connection_pool=True)
        await asyncio.to_thread(until, is_as_before)
        return pool

    with (
        sentinels(primary, replicas=0, ports=[port]) as url,
        redis.Redis(port=port, protocol=2) as looks,
    ):
        before = len(looks.client_list())
        held: list[object] = []
        with in_process_worker(url, pool_name) as worker, connected(url, pool_name) as lm:
            held += [lm, worker, *worker.service._opened]
            lm.next_token_logprobs_sync([1])
            assert not is_as_before()
        until(is_as_before, what="connections to be closed")
        held.append(asyncio.run(ask_for_control_jobs(url)))


def test_a_worker_whose_threads_meet_no_sentinel_is_not_deaf(
    primary: RealServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has joined, and its threads, each with a connection of its own, find nobody to ask."""
    enter = Service._enter_pool
    with ExitStack() as stack:
        port = free_port()
        stack.enter_context(sentinels(primary, replicas=0, ports=[port]))
        proxy = stack.enter_context(Proxy(port))
        url = f"redis+sentinel://127.0.0.1:{proxy.port}/main/0"

        def enter_and_lose_the_sentinel(*arguments: Any) -> Any:
            entered = enter(*arguments)
            proxy.refuses = True
            proxy.cut()
            return entered

        monkeypatch.setattr(Service, "_enter_pool", enter_and_lose_the_sentinel)
        stack.enter_context(in_process_worker(url, pool_name))
        lm = stack.enter_context(connected(primary.url, pool_name))
        with ThreadPoolExecutor(1) as threads:
            row = threads.submit(lm.next_token_logprobs_sync, [1], timeout=60)
            with pytest.raises(TimeoutError):
                row.result(0.5)
            proxy.refuses = False
            np.testing.assert_array_equal(row.result(60), mock_row([1], 256))


def test_a_client_that_was_led_to_a_replica_finds_the_primary(
    primary: RealServer, pool_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody loads scripts into a replica, and this user may not: waiting for them is in vain."""
    with ExitStack() as stack:
        replica = RealServer(binary=primary.binary, tcp=True, replicaof=f"127.0.0.1 {primary.port}")
        stack.enter_context(replica)
        for server in (primary, replica):
            with server.client() as admin:
                admin.execute_command(
                    "ACL", "SETUSER", "narrow", "on", ">pw", "~*", "+@all", "-eval"
                )
        stack.enter_context(in_process_worker(primary.url, pool_name))
        proxy = stack.enter_context(Proxy(primary.port))
        lm = stack.enter_context(
            connected(proxy.url.replace("redis://", "redis://narrow:pw@"), pool_name)
        )
        lm.next_token_logprobs_sync([1], timeout=60)
        proxy.target = replica.port
        with ThreadPoolExecutor(1) as threads:
            proxy.cut()
            token, row = 2, threads.submit(lm.next_token_logprobs_sync, [2], timeout=120)
            while "NOSCRIPT" not in caplog.text:
                if row.done():  # by a connection to the primary that was just being made
                    row.result()
                    proxy.cut()
                    token += 1
                    row = threads.submit(lm.next_token_logprobs_sync, [token], timeout=120)
                until(
                    lambda row=row: "NOSCRIPT" in caplog.text or row.done(),
                    what="the client to ask the replica",
                )
            proxy.target = primary.port
            np.testing.assert_array_equal(row.result(120), mock_row([token], 256))
