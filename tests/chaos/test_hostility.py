"""Nobody hurts anybody: whatever users of each role write, innocent callers get their rows."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from lmpool.keys import PoolKeys
from lmpool.model_info import ModelInfo
from tests.chaos.hostility import POOL, Hostility, Innocents, Writer, users_file, users_of
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import WorkerProcess

pytestmark = [pytest.mark.server]

TIMEOUT = 60.0


class Pool:
    """Workers that nothing may end but the test."""

    def __init__(self, server: RealServer, urls: dict[str, str], stack: ExitStack) -> None:
        self.server = server
        self.workers: list[WorkerProcess] = []
        self._urls, self._stack = urls, stack
        self._model = 0
        for _ in range(2):
            self.start()

    def start(self, **settings: Any) -> WorkerProcess:
        settings = {"engine_opts": {"delay": 0.02}, "batch_size": 16, **settings}
        settings |= {"max_deliveries": 10, "revision": f"r{self._model}"}
        worker = WorkerProcess(self._urls["worker"], POOL, **settings)
        self._stack.callback(worker.close)
        worker.url = self.server.url  # where the test looks
        self.workers.append(worker)
        worker.wait_until_alive()  # of many processes this is one
        return worker

    def kill(self) -> None:
        """SIGKILL for one, and another in its place."""
        self.workers.pop(0).kill()
        self.start()

    def restart_server(self) -> None:
        """Back empty."""
        self.server.kill()
        self.server.start()

    def replace(self) -> None:
        """By another model."""
        self._model += 1
        old, self.workers = self.workers, []
        self.start(replace=True)
        for worker in old:
            worker.terminate()
        for worker in old:
            assert worker.wait() == 0, worker.log
        self.start()

    def info(self) -> ModelInfo:
        """What it serves now."""

        def read() -> ModelInfo | None:
            with self.server.client() as admin:
                try:
                    packed = admin.get(PoolKeys(POOL).info)
                except redis.exceptions.ResponseError:
                    return None
                return ModelInfo.unpack(packed) if packed else None

        found: ModelInfo = until(read, what="the model info")  # type: ignore[assignment]
        return found

    def check(self) -> None:
        """None has ended, and none has grown."""
        for worker in self.workers:
            assert worker.process.poll() is None, worker.log[-3000:]
            with open(f"/proc/{worker.pid}/status") as status:
                (line,) = [line for line in status if line.startswith("VmHWM")]
            assert int(line.split()[1]) << 10 < 600 << 20


def hostile(folder: Path, seed: int, scenarios: int, pause: float, kinds: str) -> None:
    """A pool, innocents, and so many scenarios with kills, restarts and replacements in between."""
    with ExitStack() as stack:
        server = stack.enter_context(RealServer(tcp=True, aclfile=users_file(folder)))
        urls = users_of(server)
        pool = Pool(server, urls, stack)
        innocents = Innocents(urls["producer"], seed=seed, callers=3, size=8, timeout=TIMEOUT)
        hostility = Hostility(urls, Writer(seed, pool.info(), innocents))
        stack.callback(hostility.close)

        def replaced() -> None:
            pool.replace()
            hostility.writer.know(pool.info())

        acts = {"k": pool.kill, "s": pool.restart_server, "r": replaced}
        events = [((n + 0.5) / len(kinds), acts[kind]) for n, kind in enumerate(kinds)]
        told = f"seed {seed}; the last: "
        with innocents:
            hostility.run(scenarios, pause, events)
            time.sleep(0.5)
        found = innocents.found
        told += "\n".join(hostility.last)
        print(
            f"seed {seed}: {hostility.done} scenarios ({hostility.refused} commands refused), "
            f"{found.asked} prompts, {len(found.wrong)} wrong, {len(found.failed)} failed, "
            f"longest call {found.longest:.1f} s"
        )
        pool.check()
        assert found.wrong == [], (found.wrong[:5], told)
        assert found.failed == [], (sorted(set(found.failed))[:5], told)
        assert found.right == found.asked > 0, told
        assert found.longest < TIMEOUT + 0.5, told
        with server.client() as admin:
            assert admin.info("memory")["used_memory"] < 300 << 20


def test_two_thousand_scenarios(server_binary: str, tmp_path: Path) -> None:
    hostile(tmp_path, int(os.environ.get("LMPOOL_TEST_SEED", 1)), 2000, 0.005, "kskrk")


@pytest.mark.chaos
@pytest.mark.timeout(2400)
def test_half_an_hour(server_binary: str, tmp_path: Path) -> None:
    over, seed = time.monotonic() + 1800, int(time.time())
    while time.monotonic() < over:
        hostile(tmp_path, seed, 5000, 0.01, "kskrksrkk")
        seed += 1
