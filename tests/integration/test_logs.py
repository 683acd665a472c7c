"""What processes say, read as a machine reads it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.clients import connected
from tests.support.gateways import GatewayProcess
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import worker_process


def objects(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.strip()]


@pytest.mark.one_server
def test_a_worker_says_all_in_json(server_binary: str) -> None:
    with (
        RealServer(binary=server_binary) as server,
        worker_process(server.url, "said", log_format="json", worker_name="one") as worker,
        connected(server.url, "said") as lm,
    ):
        lm.sync.next_token_logprobs([1, 2])
        with server.client() as client:  # what a worker has something to say of
            for stream in client.scan_iter("{lmpool:said:*:job*", _type="stream"):
                client.xadd(stream, {b"wrong": b"entry"})
        until(lambda: "refused an entry" in worker.log)
        lines = objects(worker.log)
    assert all(line["pool"] == "said" and line["worker"] == "one" for line in lines)
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    assert any("refused an entry" in line["message"] for line in lines)


@pytest.mark.one_server
def test_a_gateway_says_all_in_json(server_binary: str) -> None:
    options = ("--log-format", "json")
    with (
        RealServer(binary=server_binary) as server,
        worker_process(server.url, "said"),
        GatewayProcess(server.url, "said", options=options) as gateway,
    ):
        until(lambda: httpx.get(gateway.base_url + "/ready").is_success, 120, every=0.1)
        lines = [line for line in gateway.log().splitlines() if line.startswith("{")]
        others = [line for line in gateway.log().splitlines() if not line.startswith("{")]
    assert any("pool said" in line["message"] for line in map(json.loads, lines))
    assert all("lmpool gateway at" in line for line in others)
