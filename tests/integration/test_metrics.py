"""What a scraper sees of workers, gateways and pools, and how ready each of them is."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

import lmpool
from lmpool.counters import METRICS, Gateway, Metric, Pool, Worker
from lmpool.errors import PromptFailed
from lmpool.exporter import FRESH, Exporter
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.gateways import GatewayProcess
from tests.support.pools import pool_shards
from tests.support.ports import free_port
from tests.support.scrape import Scrape, get, status
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess, clean_environment, worker_process

pytestmark = [pytest.mark.server]

FAILS = 7


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with RealServer(tcp=True) as running:
        yield running


def names_of(source: type) -> set[str]:
    return {each.name for each in vars(source).values() if isinstance(each, Metric)}


def shown(scrape: Scrape) -> set[str]:
    """The metrics of lmpool's that there are, by their names."""
    counters = {m.name.removesuffix("_total"): m.name for m in METRICS if m.kind == "counter"}
    return {counters.get(n, n) for n in scrape.families if n.startswith("lmpool_")}


@contextmanager
def exporter(url: str, *options: str) -> Iterator[int]:
    """``lmpool exporter``'s port, while the block runs; SIGTERM must then end it in order."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmpool", "exporter", "--url", url, "--port", "0", *options],
            stderr=log,
            env={**clean_environment(), "COLUMNS": "500"},
        )

        def said() -> int | None:
            assert process.poll() is None, "it ended"
            log.seek(0)
            lines = log.read().decode().splitlines()
            there = [line for line in lines if line.startswith("lmpool exporter at")]
            return int(there[0].rpartition(":")[2].split("/")[0]) if there else None

        try:
            port = until(said, what="the exporter to listen")
            assert port
            yield port
        finally:
            process.terminate()
            assert process.wait(60) == 0


# --- workers -------------------------------------------------------------------------------------


def test_a_worker_counts_what_it_did(server: RealServer) -> None:
    port, pool = free_port(), "counted"
    options = {"vocab_size": 64, "fail_token": FAILS}
    with (
        worker_process(server.url, pool, metrics_port=port, engine_opts=options, batch_size=16),
        connected(server.url, pool, cache_bytes=0) as lm,
    ):
        # It is a moment after it has said that it serves.
        until(lambda: Scrape(port).value("lmpool_worker_ready", pool=pool) == 1, what="it to serve")
        began = time.monotonic()
        lm.sync.batch_next_token_logprobs([[1, 2, n] for n in range(20, 60)])
        lm.sync.top_logprobs([1, 2, 3], 5)
        lm.sync.score([1, 2, 3], 1)
        with pytest.raises(PromptFailed):
            lm.sync.next_token_logprobs([1, FAILS])
        computed = lm.pool_statistics_sync()["computed"]
        # A caller is told first, and then it is counted.
        failed = "lmpool_worker_failures_total"
        until(lambda: Scrape(port).value(failed, reason="failed"), what="it to be counted")
        scrape, took = Scrape(port), time.monotonic() - began
        age = "lmpool_worker_heartbeat_age_seconds"
        until(lambda: Scrape(port).value(age) < 5, what="a heartbeat")  # type: ignore[operator]
    value = scrape.value
    assert value("lmpool_worker_answers_total", want="row") == 40
    assert value("lmpool_worker_answers_total", want="top") == 1
    answers = [v for n, _, v in scrape.samples() if n == "lmpool_worker_answers_total"]
    assert sum(answers) == computed
    assert value("lmpool_worker_failures_total", reason="failed") == 1
    assert value("lmpool_worker_batch_prompts_sum") == 43
    assert value("lmpool_worker_queue_wait_seconds_count") == 43
    batches = value("lmpool_worker_batch_prompts_count")
    assert batches
    assert value("lmpool_worker_batch_prompts_bucket", le="16.0") == batches, "batch_size is 16"
    assert 5 <= batches <= 43
    assert value("lmpool_worker_compute_seconds_count", le="") is None
    assert value("lmpool_worker_prompt_tokens_total") == 40 * 3 + 3 + 3 + 2
    assert value("lmpool_worker_computed_tokens_total") >= 40 * 3 + 3 + 2  # type: ignore[operator]
    waited = value("lmpool_worker_queue_wait_seconds_sum")
    assert waited is not None
    assert 0 <= waited <= 43 * (took + 1)
    (info,) = scrape.families["lmpool_worker_info"].samples
    assert info.labels["engine"] == "mock"
    assert (info.labels["pool"], info.labels["model_name"]) == (pool, "tiny")


def test_a_worker_says_how_far_its_start_has_come(tmp_path: Path) -> None:
    port, gate = free_port(), Gate(tmp_path, hold_loading=True)
    server = RealServer(tcp=True)
    worker = WorkerProcess(server.url, "p", metrics_port=port, **gate.settings())
    try:
        until(lambda: status(port, "/health")[0] == 200, what="the worker to be seen")
        # It is seen before it has begun to look for its server.
        code, says = until(
            lambda: found if (found := status(port))[1].get("stage") == "server" else None
        )
        assert (code, says["status"]) == (503, "starting")
        with server:
            gate.wait_for_loading()
            code, says = until(
                lambda: found if (found := status(port))[1].get("stage") == "load" else None
            )
            assert (code, says["status"]) == (503, "starting")
            assert says["stages"]["server"] > 0
            assert Scrape(port).value("lmpool_worker_ready") == 0
            gate.open("load")
            code, says = until(lambda: found if (found := status(port))[0] == 200 else None)
            assert says["status"] == "ready"
            assert {"server", "load", "join"} <= says["stages"].keys()
            # A server that is frozen, and one that goes on.
            server.pause()
            code, says = until(lambda: found if (found := status(port))[0] == 503 else None)
            assert says["status"] == "away"
            assert status(port, "/health")[0] == 200
            server.resume()
            until(lambda: status(port)[0] == 200, what="the worker to be ready again")
            worker.terminate()
            assert worker.wait() == 0
    finally:
        worker.close()


def test_a_port_that_is_taken_keeps_no_worker_from_its_work(server: RealServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            worker_process(server.url, "taken", metrics_port=port) as worker,
            connected(server.url, "taken") as lm,
        ):
            lm.sync.next_token_logprobs([1])
            until(lambda: f"port={port}: cannot listen there" in worker.log)
            other.close()
            until(lambda: status(port)[0] == 200, what="the port to be taken")


@pytest.mark.one_server
def test_every_worker_of_a_launcher_has_a_port(server: RealServer) -> None:
    port = free_port(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "lmpool", "worker", "--workers", "2", "--url", server.url,
         "--pool", "two", "--engine", "mock", "--metrics-port", str(port)],
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for number in range(2):
            until(lambda n=number: status(port + n)[0] == 200, what=f"worker {number}")  # type: ignore[misc]
        assert len({status(port + n)[1]["worker"] for n in range(2)}) == 2
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.one_server
def test_each_metric_is_shown_where_its_name_says(server: RealServer) -> None:
    port, pool = free_port(), "all"
    with (
        worker_process(server.url, pool, metrics_port=port, engine="hf") as _,
        GatewayProcess(server.url, pool) as gateway,
        exporter(server.url, "--pool", pool) as exported,
        connected(server.url, pool) as lm,
    ):
        lm.sync.next_token_logprobs([1, 2])
        with suppress(lmpool.errors.LmpoolError):
            lm.sync.next_token_logprobs([1, 2], lora_name="nobody")
        until(lambda: get(gateway.port, "/ready")[0] == 200)
        get(gateway.port, "/v1/models")
        get(gateway.port, "/made/up/1")
        get(gateway.port, "/made/up/2")
        found = {
            Worker: shown(Scrape(port)),
            Gateway: shown(Scrape(gateway.port)),
            Pool: shown(Scrape(exported)),
        }
        at_gateway = Scrape(gateway.port)
    for source, names in found.items():
        assert names == names_of(source)
    assert at_gateway.value("lmpool_gateway_requests_total", route="other", status="404") == 2
    assert at_gateway.value("lmpool_gateway_requests_total", route="/v1/models") == 1


# --- pools ---------------------------------------------------------------------------------------


def test_the_exporter_tells_what_waits_and_what_was_given_up(
    server: RealServer, tmp_path: Path
) -> None:
    pool, gate = "waits", Gate(tmp_path)
    with (
        ThreadPoolExecutor(8) as threads,
        worker_process(server.url, pool, **gate.settings(), batch_size=1),
        connected(server.url, pool, cache_bytes=0) as lm,
        redis.Redis.from_url(server.url) as client,
        exporter(server.url, "--pool", pool, "--pool", "nobody") as port,
    ):
        (shard,) = pool_shards(client, pool)
        client.xadd(shard.dead, {"job": b"x", "reason": "by hand"})
        asked = [threads.submit(lm.sync.next_token_logprobs, [1, 0])]
        gate.wait_for_batch()  # its one job is pending, and no other's
        asked += [threads.submit(lm.sync.next_token_logprobs, [1, n]) for n in range(1, 5)]
        asked += [
            threads.submit(lm.sync.next_token_logprobs, [2, n], priority="batch") for n in range(3)
        ]
        until(lambda: lm.pool_statistics_sync()["backlog"] == 8, what="all jobs to be there")
        time.sleep(FRESH)
        scrape = Scrape(port)
        assert scrape.value("lmpool_up", pool=pool) == 1
        assert scrape.value("lmpool_up", pool="nobody") == 0
        assert scrape.value("lmpool_workers", pool=pool) == 1
        assert scrape.value("lmpool_dead_letters", pool=pool) == 1
        assert scrape.value("lmpool_server_memory_bytes", pool=pool) > 100_000  # type: ignore[operator]
        assert scrape.value("lmpool_backlog_jobs", pool=pool, priority="interactive") == 5
        assert scrape.value("lmpool_pending_jobs", pool=pool, priority="interactive") >= 1  # type: ignore[operator]
        for priority in ("interactive", "batch"):
            age = scrape.value("lmpool_oldest_job_age_seconds", pool=pool, priority=priority)
            assert 0.3 < age < 60  # type: ignore[operator]
        gate.open()
        for each in asked:
            each.result(60)
        until(lambda: Scrape(port).value("lmpool_answers_total", pool=pool, want="row") == 8)
        assert Scrape(port).value("lmpool_oldest_job_age_seconds", pool=pool, priority="batch") == 0


def test_a_server_that_is_gone_is_seen_and_comes_back() -> None:
    with RealServer(tcp=True) as server, exporter(server.url) as exported:
        assert Scrape(exported).value("lmpool_up", pool="default") == 0, "nobody serves it"
        with worker_process(server.url, "default"):
            until(lambda: Scrape(exported).value("lmpool_up") == 1, what="the pool to be up")
            assert status(exported) == (200, {"status": "ready", "pools": ["default"]})
            server.kill()
            until(lambda: Scrape(exported).value("lmpool_up") == 0, what="the pool to be down")
            code, says = status(exported)
            assert code == 503
            assert "Is the server" in says["errors"]["default"]
            assert status(exported, "/health")[0] == 200
            server.start()
            until(lambda: Scrape(exported).value("lmpool_up") == 1, what="the pool to be back")


def test_a_frozen_server_holds_a_scrape_no_longer_than_scrapers_wait() -> None:
    with RealServer(tcp=True) as server, exporter(server.url) as exported:
        assert Scrape(exported).value("lmpool_up") == 0
        server.pause()
        time.sleep(FRESH)
        began = time.monotonic()
        assert Scrape(exported).value("lmpool_up") == 0
        assert time.monotonic() - began < 30
        server.resume()
        until(lambda: status(exported)[0] == 200, what="the server to be read again")


def test_an_exporter_that_cannot_serve_says_why(server: RealServer) -> None:
    def said(*options: str, status: int) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "lmpool", "exporter", "--url", server.url, *options],
            capture_output=True, text=True, timeout=60, check=False,
            env={**clean_environment(), "COLUMNS": "500"},
        )  # fmt: skip
        assert ran.returncode == status
        return ran.stderr

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert "stop what does, or write another port" in said("--port", port, status=2)
    assert "pool='a b' is no pool name" in said("--pool", "a b", status=78)


def test_users_read_a_pool_as_prometheus_would(server: RealServer) -> None:
    with (
        worker_process(server.url, "mine"),
        Exporter([("mine", None)], server.url) as exporter,
    ):
        text = exporter.exposition().decode()
    assert 'lmpool_workers{model_name="tiny",pool="mine"} 1.0' in text
