"""A server that comes and goes does not end its workers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import redis

from lmpool.backends.mock import mock_row
from lmpool.errors import LmpoolError, PromptFailed, ServerUnreachable
from lmpool.keys import GROUP
from lmpool.producer import adapters as adapters_module
from lmpool.producer import session as session_module
from lmpool.worker.adapters import adapter_fingerprint
from tests.integration.test_adapters import write_adapter
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.pools import Asking, pool_shards
from tests.support.proxy import Proxy
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process


def test_who_waits_is_told_of_a_server_that_is_gone_while_others_ask_on(server_binary, pool_name):
    """What asks for something else finds nothing out about what was asked before."""
    slow = {"engine_opts": {"delay": 3600.0}}
    with (
        RealServer() as server,
        worker_process(server.url, pool_name, **slow) as worker,
        connected(server.url, pool_name, reconnect_timeout=4.0) as lm,
        ThreadPoolExecutor(1) as threads,
    ):
        waiting = threads.submit(lm.next_token_logprobs_sync, [1])
        until(lambda: lm.statistics()["queued"] == 1)
        server.kill()

        def is_told() -> bool:
            with pytest.raises(LmpoolError):
                lm.pool_statistics_sync(timeout=0.05)
            return waiting.done()

        until(is_told)
        assert isinstance(waiting.exception(), ServerUnreachable)
        worker.kill()


def test_workers_outlive_their_server(server_binary, pool_name):
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        worker_process(server.url, pool_name) as worker,
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):
        for number in range(2):
            prompt = [number, 1, 2]
            row = lm.next_token_logprobs_sync(prompt, timeout=60)
            assert (row == mock_row(prompt, 256)).all()
            server.kill()
            time.sleep(0.7)  # longer than the pauses between two looks for control jobs
            assert worker.process.poll() is None, worker.log
            server.start()
        assert (lm.next_token_logprobs_sync([3], timeout=60) == mock_row([3], 256)).all()
        assert "Traceback" not in worker.log


def test_a_worker_that_is_told_to_stop_without_a_server_stops(server_binary, pool_name):
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        worker_process(server.url, pool_name, drain_timeout=2) as worker,
    ):
        server.kill()
        until(lambda: "jobs cannot be read" in worker.log, what="the worker to notice")
        worker.terminate()
        assert worker.wait(60) == 0
        assert "Traceback" not in worker.log


def test_who_names_an_adapter_waits_for_a_server_as_others_do(
    server_binary: str, pool_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "FRESH", 0.0)  # the registry is read for each call
    style = write_adapter(tmp_path / "style")
    reference = f"style@{adapter_fingerprint(tmp_path / 'style')}"
    with (
        RealServer(binary=server_binary, tcp=True, appendonly="yes") as server,
        worker_process(server.url, pool_name, adapter_dirs=[str(tmp_path)]),
        connected(server.url, pool_name, cache_bytes=0) as lm,
        ThreadPoolExecutor() as threads,
    ):
        lm.add_new_lora(style, "style")
        server.stop()
        asking = threads.submit(lm.next_token_logprobs_sync, [1], "style", timeout=60)
        clearing = threads.submit(lm.clear_kv_cache, timeout=60)
        time.sleep(0.3)
        assert not asking.done()
        assert not clearing.done()
        server.start()
        np.testing.assert_array_equal(asking.result(), mock_row([1], 256, reference))
        clearing.result()


@pytest.mark.one_shard
def test_the_living_keep_their_jobs_where_the_server_lost_their_heartbeats(
    server_binary: str, pool_name: str, tmp_path: Path
) -> None:
    """It restarts as it was a moment ago, less the heartbeats, and goes on losing them."""
    gate = Gate(tmp_path)
    settings = {"batch_size": 4, **gate.settings()}
    with (
        RealServer(binary=server_binary, tcp=True, appendonly="yes") as server,
        worker_process(server.url, pool_name, **settings) as busy,
        connected(server.url, pool_name, workers_timeout=60) as lm,
    ):
        asking = Asking(lm, [[1, 2]])
        gate.wait_for_batch()
        with worker_process(server.url, pool_name, **settings) as idle:
            server.kill()
            server.start()
            with server.client() as client:
                (shard,) = pool_shards(client, pool_name)
                ends = time.monotonic() + 4.0  # longer than from one look for the dead to the next
                while time.monotonic() < ends:
                    client.delete(*client.keys(shard.alive("*")), shard.steady)
                    time.sleep(0.005)
                (held,) = client.xpending_range(shard.stream().key, GROUP, "-", "+", 10)
            gate.open()
            np.testing.assert_array_equal(asking.rows(), [mock_row([1, 2], 256)])
            assert {pid for pid, _ in gate.batches()} == {busy.pid} != {idle.pid}
            assert held["times_delivered"] == 1
            assert "took over" not in idle.log + busy.log


def test_a_worker_waits_for_a_server_that_is_away_when_it_starts(
    server_binary: str, pool_name: str
) -> None:
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        Proxy(server.port) as proxy,
    ):
        proxy.refuses = True
        with worker_process(proxy.url, pool_name, alive=False) as worker:
            until(lambda: "waiting for the server, 60 s at most" in worker.log)
            time.sleep(1.0)
            assert worker.process.poll() is None, worker.log
            proxy.refuses = False
            worker.wait_until_alive()
            assert "Traceback" not in worker.log


def test_answers_of_a_server_that_is_away_are_given_once_it_is_back(
    server_binary: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody can confirm is not given out, and a short outage is no error."""
    monkeypatch.setattr(session_module, "CONFIRMED_FOR", 0.2)
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        in_process_worker(server.url, pool_name),
        connected(server.url, pool_name) as lm,
        ThreadPoolExecutor(1) as threads,
    ):
        lm.next_token_logprobs_sync([7])
        server.kill()
        time.sleep(0.3)
        row = threads.submit(lm.next_token_logprobs_sync, [7])
        time.sleep(0.5)
        assert not row.done()
        server.start()
        assert np.array_equal(row.result(60), mock_row([7], 256))


@pytest.mark.one_shard
def test_notices_of_a_server_that_is_as_it_was_some_time_ago_are_read(
    server_url: str,
    pool_name: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its streams go on with ids that are smaller than those that the client has read."""
    with (
        in_process_worker(server_url, pool_name, engine_opts={"fail_token": 255}),
        connected(server_url, pool_name, cache_bytes=0, workers_timeout=480.0) as lm,
    ):
        (shard,) = pool_shards(redis_client, pool_name)
        reply = shard.reply(lm._client._session.id)
        lm.next_token_logprobs_sync([1], timeout=60)
        ahead = f"{int(time.time() * 1000) + 3_600_000}-5"  # as of a clock that is set back later
        redis_client.xadd(reply, {"ok": b""}, id=ahead)
        until(lambda: lm._client._session.last_ids[reply] == ahead, what="the client to read it")
        with redis_client.pipeline(transaction=True) as pipeline:  # the client may be looking
            pipeline.delete(reply)
            pipeline.xadd(reply, {"hello": "1"}, id="1-1")
            pipeline.expire(reply, 30)
            pipeline.execute()
        with pytest.raises(PromptFailed):
            lm.next_token_logprobs_sync([2, 255], timeout=60)
        assert lm.statistics()["resubmitted"] < 5  # a look each, until its notice is read
        # From now on it learns of nothing in time by looking after it.
        monkeypatch.setattr(session_module, "CHECK_EVERY", 100.0)
        for number in range(3):
            with pytest.raises(PromptFailed):
                lm.next_token_logprobs_sync([3, number, 255], timeout=60)
