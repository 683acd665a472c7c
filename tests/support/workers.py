"""Workers for tests: a real process as arq starts it, and one inside the test's own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import redis.exceptions

from lmpool.backends.mock import mock_row
from lmpool.keys import PoolKeys
from lmpool.model_info import ModelInfo
from lmpool.producer.statistics import WorkerStatistics, pool_statistics
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions
from lmpool.testing.worker import InProcessService
from tests.support.freezing import freeze
from tests.support.waiting import until

ARQ = [
    sys.executable, "-m", "arq", "lmpool.worker.WorkerSettings",
    "--custom-log-dict", "lmpool.worker.logs.LOGGING",
]  # fmt: skip


DEFAULTS: dict[str, Any] = {"engine": "mock"}
"""Settings of every worker that a test starts, unless it says otherwise."""


def living_workers(url: str, pool: str) -> list[WorkerStatistics]:
    """The pool's workers that have a heartbeat; none while a server is away."""
    keys = PoolKeys(pool)
    with closing(Servers.of_url(url)) as servers:
        try:
            packed = servers.for_key(keys.info).get(keys.info)
            if packed is None:
                return []
            return pool_statistics(servers, ModelInfo.unpack(packed).shard_keys(keys))["workers"]
        except redis.exceptions.RedisError as error:
            if not is_lost(error):
                raise
            return []


def clean_environment() -> dict[str, str]:
    """This process's environment without the developer's own LMPOOL_* settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LMPOOL_")}


def settings_as_environment(settings: dict[str, Any]) -> dict[str, str]:
    """Settings as the LMPOOL_* variables that mean them."""
    return {f"LMPOOL_{name.upper()}": _as_text(value) for name, value in settings.items()}


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    return str(value)


class WorkerProcess:
    """A worker as an operator starts it; its settings come as LMPOOL_* variables."""

    def __init__(
        self,
        url: str,
        pool: str,
        *,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.url = url
        self.pool = pool
        self.folder = tempfile.TemporaryDirectory(prefix="lmpool-worker-")
        self.log_file = Path(self.folder.name) / "log"
        settings = {**DEFAULTS, **settings, "url": url, "pool": pool}
        self._says_that_it_serves = settings.get("log_level", "info") in ("debug", "info")
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                ARQ,
                env={
                    **clean_environment(),
                    **settings_as_environment(settings),
                    "PYTHONFAULTHANDLER": "1",
                    **(environment or {}),
                },
                cwd=self.folder.name,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.log_file.read_text("utf-8", "replace")

    def wait_until_alive(self, timeout: float = 150.0) -> WorkerStatistics:
        """What the pool says of it, as soon as the pool knows it and it reads jobs."""

        def found() -> WorkerStatistics | None:
            status = self.process.poll()
            assert status is None, f"the worker ended with {status}:\n{self.log}"
            workers = living_workers(self.url, self.pool)
            return next((worker for worker in workers if worker["pid"] == self.pid), None)

        known = until(found, timeout, what="the worker to be alive", every=0.05)
        assert known is not None
        if self._says_that_it_serves:
            # It is known before it has joined: where a server goes in between, it waits in silence.
            until(lambda: " serves " in self.log, timeout, what="the worker to serve")
        return known

    def terminate(self) -> None:
        """Ask it to end, as an operator does."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once: it gets no chance to clean up."""
        self.process.kill()
        self.process.wait(60)

    def pause(self) -> None:
        """Freeze it."""
        if self.process.poll() is None:
            freeze(self.process.pid)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # it writes down where its threads are
            self.process.wait(10)
            raise AssertionError(
                f"the worker has not ended after {timeout:g} s:\n{self.log}"
            ) from None

    def close(self) -> None:
        """Make sure that it is gone."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        self.folder.cleanup()


@contextmanager
def worker_process(
    url: str,
    pool: str,
    *,
    alive: bool = True,
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[WorkerProcess]:
    """A worker process with the mock engine (``engine=`` for another) while the block runs.

    Waits until it is alive (`alive=False`: not) and sends SIGTERM afterwards; unless the block has
    ended it already, it must then end with status 0.
    """
    worker = WorkerProcess(url, pool, environment=environment, **settings)
    try:
        if alive:
            worker.wait_until_alive()
        yield worker
        if worker.process.poll() is None:
            worker.resume()
            worker.terminate()
            status = worker.wait()
            assert status == 0, f"the worker ended with {status}:\n{worker.log}"
    finally:
        worker.close()


class InProcessWorker:
    """A worker whose threads are this process's: fast to start, and a test sees inside it."""

    def __init__(self, url: str, pool: str, **settings: Any) -> None:
        settings = {**DEFAULTS, "drain_timeout": 10.0, **settings}
        self.failed = threading.Event()
        options = WorkerOptions(url=url, pool=pool, **settings)
        self.service = InProcessService(options, self.failed.set)

    @property
    def id(self) -> str:
        """Its consumer's name."""
        return self.service.consumer

    def start(self) -> None:
        """Load the engine, join the pool, serve."""
        self.service.start()

    def stop(self) -> None:
        """Drain and leave."""
        self.service.stop()


@contextmanager
def in_process_worker(
    url: str, pool: str, *, may_fail: bool = False, **settings: Any
) -> Iterator[InProcessWorker]:
    """A worker with the mock engine in this process while the block runs.

    It must not have failed by the end, unless it may.
    """
    worker = InProcessWorker(url, pool, **settings)
    mock_row([0], worker.service.options.engine_opts.get("vocab_size", 256))  # the first takes long
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
    if not may_fail:
        assert worker.service.status.failure is None, worker.service.status.failure


def lmpool_threads() -> set[threading.Thread]:
    """Threads of the product that are running in this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("lmpool-")}


def leaked_threads(before: set[threading.Thread], timeout: float = 60.0) -> list[str]:
    """The names of the product's threads that are still there after `timeout`, but not before."""
    deadline = time.monotonic() + timeout
    while (left := lmpool_threads() - before) and time.monotonic() < deadline:
        time.sleep(0.005)
    return sorted(thread.name for thread in left)
