"""arq's part: control jobs and the health that ``arq --check`` asks for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from lmpool.errors import PoolTimeout
from lmpool.keys import PoolKeys
from lmpool.producer.control import ask_workers
from lmpool.producer.deadline import Deadline
from tests.support.waiting import until
from tests.support.workers import ARQ, clean_environment, settings_as_environment, worker_process


def test_of_a_control_job_that_nobody_takes_nothing_is_left(
    server_url: str, redis_client: redis.Redis, pool_name: str
) -> None:
    keys = PoolKeys(pool_name)
    with pytest.raises(PoolTimeout, match="clear_cache was not answered"):
        ask_workers(server_url, keys, ["gone"], "clear_cache", deadline=Deadline(0.3))
    until(lambda: not redis_client.exists(keys.control_queue("gone")), 2)


def check(url: str, pool: str, folder: Path, **settings: Any) -> int:
    """The exit status of ``arq --check`` with these settings."""
    return subprocess.run(
        [*ARQ, "--check"],
        env={
            **clean_environment(),
            **settings_as_environment({"url": url, "pool": pool, "engine": "mock", **settings}),
        },
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=60,
    ).returncode


def test_a_workers_health_is_told_by_arq(server_url: str, pool_name: str, tmp_path: Path) -> None:
    def found(name: str) -> int:
        return check(server_url, pool_name, tmp_path, worker_name=name)

    with worker_process(server_url, pool_name, worker_name="here"):
        until(lambda: found("here") == 0, 20, what="the worker to be healthy")
        assert found("there") == 1
    assert found("here") == 1
