"""What a gateway's description says is so: schemathesis, with every check that it has.

`LMPOOL_TEST_CASES` is how many requests it makes up for each path (60).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmpool.gateway.keys import line, new_key
from tests.support.gateways import GatewayProcess
from tests.support.workers import worker_process

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

CASES = os.environ.get("LMPOOL_TEST_CASES", "60")
HERE = Path(__file__).parent
BESIDE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
SCHEMATHESIS = shutil.which("schemathesis", path=BESIDE)


@pytest.mark.skipif(SCHEMATHESIS is None, reason="needs schemathesis: make test-clients")
def test_no_request_gets_an_answer_that_is_not_described(
    server_url: str, pool_name: str, tmp_path: Path
) -> None:
    key, keys = new_key(), tmp_path / "keys"
    keys.write_text(line("fuzz", key) + "\n")
    options = ("--api-keys", str(keys), "--max-response", "50000000", "--queue-timeout", "60")
    with worker_process(server_url, pool_name, alive=False, max_prompt_tokens=64) as worker:
        worker.wait_until_alive()
        with GatewayProcess(server_url, pool_name, options=options) as gateway:
            assert SCHEMATHESIS is not None
            found = subprocess.run(
                [
                    *(SCHEMATHESIS, "--config-file", str(HERE / "schemathesis.toml"), "run"),
                    *(f"{gateway.base_url}/openapi.json", "--checks", "all", "--no-color"),
                    *("--max-examples", CASES, "--suppress-health-check", "all"),
                    *("--header", f"Authorization: Bearer {key}", "--continue-on-failure"),
                ],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=1700,
                check=False,
            )
            assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-2000:]
            assert "failed" not in found.stdout.rpartition("Test cases:")[2], found.stdout
