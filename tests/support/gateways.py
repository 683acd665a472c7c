"""Gateways for tests: a real process as an operator starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.ports import free_port, listens
from tests.support.waiting import until
from tests.support.workers import clean_environment

GATEWAY = [sys.executable, "-m", "lmpool", "gateway"]
_WHERE = re.compile(r"http://[^\s/]+")


class GatewayProcess:
    """``lmpool gateway`` on a free port, in front of `pools` of the server at `url`."""

    def __init__(
        self,
        url: str,
        *pools: str,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lmpool-gateway-")
        self.log_file = Path(self._folder.name) / "log"
        named = [part for pool in pools for part in ("--pool", pool)]
        self._command = [*GATEWAY, "--url", url, *named, *options]
        # A terminal of one column would break the line that says where it is.
        self._environment = {**clean_environment(), "COLUMNS": "500", **(environment or {})}
        self.base_url = ""
        self.process = self._started(free_port())

    def _started(self, port: int) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                [*self._command, "--port", str(port)],
                stdout=log,
                stderr=log,
                env=self._environment,
            )

    def __enter__(self) -> Self:
        try:
            until(self._says_where, 150, what="the gateway to listen")
        except BaseException:
            self.__exit__(*sys.exc_info())  # nobody else ends it, and the next test would complain
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if kind is not None:
            print(self.log())
        self._folder.cleanup()

    def kill(self) -> None:
        """End it at once: it gets no chance to clean up."""
        self.process.kill()
        self.process.wait(60)

    def start_again(self) -> None:
        """Start it where it was; it listens when this returns."""
        assert self.process.poll() is not None, "it runs already"
        self.process = self._started(self.port)
        until(self._listens, 150, what="the gateway to listen again")

    def log(self) -> str:
        """What it said so far."""
        return self.log_file.read_text("utf-8", "replace")

    def resident(self) -> int:
        """Bytes of memory that it has."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def port(self) -> int:
        """Where it listens on this machine."""
        return int(self.base_url.rpartition(":")[2])

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log()
        return listens(self.port)

    def _says_where(self) -> bool:
        assert self.process.poll() is None, self.log()
        found = _WHERE.search(self.log())
        if found is not None:
            self.base_url = found[0]
        return found is not None
