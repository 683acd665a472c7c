"""``lmpool worker`` for tests: the launcher of workers, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import wait_until_gone
from tests.support.waiting import until
from tests.support.workers import clean_environment, living_workers


class LauncherProcess:
    """``lmpool worker`` as an operator starts it."""

    def __init__(
        self, url: str, pool: str, *options: str, nohup: bool = False, **environment: str
    ) -> None:
        self.url, self.pool = url, pool
        self.folder = tempfile.TemporaryDirectory(prefix="lmpool-launcher-")
        self._log = Path(self.folder.name) / "log"
        self.cwd = Path(self.folder.name) / "cwd"
        self.cwd.mkdir()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(["nohup"] if nohup else []),
                    *(sys.executable, "-m", "lmpool", "worker"),
                    *("--url", url, "--pool", pool, "--engine", "mock", *options),
                ],
                env={**clean_environment(), **environment},
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    @property
    def log(self) -> str:
        """What it and its workers have said so far."""
        return self._log.read_text("utf-8", "replace")

    def workers(self) -> dict[int, str]:
        """Process id and GPU of each living worker."""
        return {w["pid"]: w["gpu"] for w in living_workers(self.url, self.pool)}

    def wait_for_workers(self, count: int, *, without: Sequence[int] = ()) -> dict[int, str]:
        """So many living workers, none of which is one of those."""

        def found() -> dict[int, str] | None:
            assert self.process.poll() is None, self.log
            alive = self.workers()
            return alive if len(alive) == count and not set(without) & set(alive) else None

        workers = until(found, 150.0, what=f"{count} workers", every=0.05)
        assert workers is not None
        return workers

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended after {timeout:g} s:\n{self.log}") from None


@contextmanager
def launcher(
    url: str, pool: str, *options: str, nohup: bool = False, **environment: str
) -> Iterator[LauncherProcess]:
    """``lmpool worker`` with the mock engine while the block runs.

    Unless the block has ended it already, it must then end with status 0, and with it its workers.
    """
    found = LauncherProcess(url, pool, *options, nohup=nohup, **environment)
    workers: dict[int, str] = {}
    try:
        yield found
        if found.process.poll() is None:
            workers = found.workers()
            found.send(signal.SIGTERM)
            assert found.wait() == 0, found.log
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.wait()
        if workers:
            wait_until_gone(workers)
        found.folder.cleanup()
