"""A server that comes and goes does not end its workers."""

from __future__ import annotations

import time

import pytest

from lmpool.backends.mock import mock_row
from tests.support.clients import connected
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import worker_process

pytestmark = pytest.mark.timeout(60)


def test_workers_outlive_their_server(server_binary, pool_name):
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        worker_process(server.url, pool_name) as worker,
        connected(server.url, pool_name, cache_bytes=0) as lm,
    ):
        for number in range(2):
            prompt = [number, 1, 2]
            row = lm.next_token_logprobs_sync(prompt, timeout=20)
            assert (row == mock_row(prompt, 256)).all()
            server.kill()
            time.sleep(0.7)  # longer than the pauses between two looks for control jobs
            assert worker.process.poll() is None, worker.log
            server.start()
        assert (lm.next_token_logprobs_sync([3], timeout=20) == mock_row([3], 256)).all()
        assert "Traceback" not in worker.log


def test_a_worker_that_is_told_to_stop_without_a_server_stops(server_binary, pool_name):
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        worker_process(server.url, pool_name, drain_timeout=2) as worker,
    ):
        server.kill()
        until(lambda: "jobs cannot be read" in worker.log, what="the worker to notice")
        worker.terminate()
        assert worker.wait(20) == 0
        assert "Traceback" not in worker.log
