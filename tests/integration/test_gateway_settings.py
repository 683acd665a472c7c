"""`lmpool gateway` as it is started with variables instead of options."""

from __future__ import annotations

import subprocess

import httpx
import pytest

from tests.support.gateways import GATEWAY, GatewayProcess
from tests.support.waiting import until
from tests.support.workers import clean_environment, worker_process

pytestmark = [pytest.mark.slow]


@pytest.mark.one_server
def test_a_gateway_is_what_its_variables_say(server_url: str, pool_name: str) -> None:
    """So are its workers, which have the same environment."""
    other = f"{pool_name}-b"
    told = {
        "LMPOOL_GATEWAY_POOL": f"{pool_name} {other}={server_url}",
        "LMPOOL_GATEWAY_MAX_N": "2",
        "LMPOOL_GATEWAY_MAX_PROMPTS": "2",
        "LMPOOL_GATEWAY_MAX_BODY": "2KiB",
    }
    with (
        worker_process(server_url, pool_name, environment=told),
        worker_process(server_url, other, environment=told),
        GatewayProcess(server_url, options=("--max-prompts", "6"), environment=told) as gateway,
        httpx.Client(base_url=gateway.base_url, timeout=60) as http,
    ):
        until(lambda: http.get("/ready").is_success, 60, what="it to be ready", every=0.1)
        listed = [card["id"] for card in http.get("/v1/models").json()["data"]]
        assert listed == [pool_name, other]

        def status(**body: object) -> int:
            answer = http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1, **body})
            return answer.status_code

        assert status(n=2) == status(model=other) == 200
        assert status(n=3) == 400
        assert status(prompt=[[1], [2], [3]], n=2) == 200  # the option, and not its variable
        assert status(prompt=[[1], [2], [3], [4]], n=2) == 400
        assert status(prompt=[1] * 2048) == 413


@pytest.mark.one_server
def test_a_variable_that_cannot_be_used_ends_it_at_once(server_url: str) -> None:
    for name, value, said in (
        ("LMPOOL_GATEWAY_MAX_N", "0", "LMPOOL_GATEWAY_MAX_N='0': input should be greater"),
        ("LMPOOL_GATEWAY_PROT", "80", "did you mean LMPOOL_GATEWAY_PORT?"),
    ):
        done = subprocess.run(
            [*GATEWAY, "--url", server_url, "--port", "0"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**clean_environment(), name: value},
        )
        assert done.returncode == 78
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert said in line
