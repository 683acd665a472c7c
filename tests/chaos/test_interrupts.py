"""Ctrl-C at random moments of blocking calls: whoever catches it goes on with the same client."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.interrupted import LARGE
from tests.support.workers import worker_process

pytestmark = pytest.mark.server


@pytest.mark.parametrize(("rows", "size"), [("small", 64), ("large", LARGE)])
@pytest.mark.parametrize(
    "rounds", [300, pytest.param(20_000, marks=pytest.mark.chaos)], ids=["short", "long"]
)
def test_interrupts_leave_the_client_as_it_was(
    server_url: str, pool_name: str, rounds: int, rows: str, size: int
) -> None:
    seed = int.from_bytes(os.urandom(2), "big")
    arguments = [server_url, pool_name, str(rounds), str(seed), rows]
    with worker_process(server_url, pool_name, engine_opts={"vocab_size": size}, result_ttl=5.0):
        child = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-m", "tests.support.interrupted", *arguments],
            capture_output=True,
            text=True,
            timeout=60 + rounds / 20,
            check=False,
        )
    assert child.returncode == 0, f"seed {seed}: {child.stderr[-4000:]}"
