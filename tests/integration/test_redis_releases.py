"""A client beside each release of redis-py that it may be installed with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import RealServer
from tests.support.workers import worker_process

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.one_server]

ASKS = """
import asyncio, sys
import redis
import lmpool

url, pool = sys.argv[1:]


async def at_once(lm):
    rows = await asyncio.gather(*[lm.next_token_logprobs([1, i % 256]) for i in range(500)])
    tokens = [t async for piece in lm.stream([1, 2], max_tokens=5, seed=1) for t in piece.token_ids]
    return len(rows), len(tokens)


with lmpool.connect(url, pool, framework="numpy", workers_timeout=30) as lm:
    assert lm.sync.next_token_logprobs([1, 2, 3]).shape == (256,)
    assert lm.sync.top_logprobs([1, 2, 3], k=3).token_ids.size == 3
    assert asyncio.run(at_once(lm)) == (500, 5)
    with redis.Redis.from_url(url, protocol=2) as other:
        other.client_kill_filter(_type="normal", skipme=True)
    assert lm.sync.batch_next_token_logprobs([[7, 8], [7, 9]]).shape == (2, 256)
print(redis.__version__)
"""


@pytest.mark.parametrize("release", ["redis==5.3.0", "redis==7.1.0", "redis"])
def test_a_client_works_beside_it(tmp_path: Path, server_binary: str, release: str) -> None:
    """The oldest that is allowed, one between, and whatever is the newest: pip takes that."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    target = tmp_path / "packages"
    subprocess.run([*pip, "--no-deps", "--target", target, release], check=True, timeout=120)
    for place in ({}, {"tcp": True}):
        with RealServer(binary=server_binary, **place) as server, worker_process(server.url, "p"):
            asked = subprocess.run(
                [sys.executable, "-c", ASKS, server.url, "p"],
                env={**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{ROOT}"},
                cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False,
            )  # fmt: skip
        assert asked.returncode == 0, asked.stderr
        found = next(target.glob("redis-*.dist-info")).name
        assert found == f"redis-{asked.stdout.strip()}.dist-info"
    # What it makes of replies, refusals among them.
    replies = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not real_server",
    ]
    tested = subprocess.run(
        [*replies, "tests/unit/test_bulk.py"],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout
