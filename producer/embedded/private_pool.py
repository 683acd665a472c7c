"""The processes of an embedded pool, seen from the user's process: start, watch, end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import redis.exceptions

from lmpool.errors import LmpoolError, PoolError, PoolTimeout, SettingsError
from lmpool.exit_status import EXIT_REFUSED
from lmpool.interrupts import frees
from lmpool.keys import PoolKeys
from lmpool.logs import entries
from lmpool.model_info import ModelInfo
from lmpool.producer.embedded import reaper
from lmpool.producer.embedded.private_server import find_server, prepare_server
from lmpool.producer.embedded.room import last_lines, make_folder, no_folder
from lmpool.producer.statistics import pool_statistics
from lmpool.servers import Servers
from lmpool.stderr import say
from lmpool.variables import as_variables

LAST_LINES: Final = 12
_WHAT: Final = "an embedded pool"

_AT_START = re.compile(r"^(?:\[[^\]]*\] )?(?:lmpool worker|error): (.+)$", re.MULTILINE)


class PrivatePool:
    """A server and workers in a folder of their own, and a reaper that outlives this process.

    `worker_arguments` are those of ``lmpool worker``, `settings` become its ``LMPOOL_*`` variables.
    """

    def __init__(
        self, pool: str, worker_arguments: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        program = find_server()
        self.pool = pool
        self._owner = os.getpid()
        self._copy: threading.Thread | None = None
        self._stopping = threading.Event()
        self._stopped = False
        self._lock = threading.RLock()
        self.folder = make_folder(_WHAT)
        try:
            server = prepare_server(program, self.folder)
            self.url = server.url
            own = {"url": server.url, "control_url": server.url, "pool": pool}
            self._reaper = self._start_reaper({**settings, **own})
        except BaseException as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise no_folder(_WHAT, error) from None
            raise
        drain = float(settings["drain_timeout"])
        plan = {
            "server": server.command,
            "address": server.address,
            "workers": [
                sys.executable, "-P", "-m", "lmpool", "worker",
                *worker_arguments, "--events", str(self.folder / "events"),
            ],
            "grace": 2 * drain + 2.0,
        }  # fmt: skip
        os.write(self._pipe, json.dumps(plan).encode() + b"\n")

    def _start_reaper(self, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        reading, self._pipe = os.pipe()
        _PIPES.add(self._pipe)
        try:
            with (self.folder / "reaper.log").open("wb") as log:
                return subprocess.Popen(
                    [
                        sys.executable, "-I", "-S", reaper.__file__,
                        str(self.folder), str(self._owner),
                    ],
                    stdin=reading,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **as_variables(settings)},
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            self._close_pipe()
            raise
        finally:
            os.close(reading)

    # --- what it does --------------------------------------------------------------------------

    @property
    def log(self) -> Path:
        """What the workers say."""
        return self.folder / "workers.log"

    def processes(self) -> dict[str, int]:
        """Process ids: of the reaper, the server, and the launcher of the workers."""
        started = {e["what"]: e["pid"] for e in self._events() if e["event"] == "started"}
        return {"reaper": self._reaper.pid, **started}

    def wait_until_alive(self, count: int, timeout: float) -> None:
        """Return once `count` workers serve.

        Raises what stopped one of them: `SettingsError` where it refused to start, `PoolError`
        where it died; and `PoolTimeout` after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        alive = 0
        while alive < count:
            events = self._events()
            self._check_processes(events)
            if any(event["event"] == "server ready" for event in events):
                alive = self._alive()
            if alive < count and time.monotonic() >= deadline:
                raise PoolTimeout(
                    f"{alive} of {count} workers are ready after {timeout:g} s; wait longer with "
                    f"start_timeout=, or see what they say:\n{self._last_lines(self.log)}"
                )
            time.sleep(0.03)

    def _alive(self) -> int:
        servers, keys = Servers.of_url(self.url, name="lmpool-embedded"), PoolKeys(self.pool)
        try:
            packed = servers.for_key(keys.info).get(keys.info)
            if packed is None:
                return 0
            shards = ModelInfo.unpack(packed).shard_keys(keys)
            return len(pool_statistics(servers, shards)["workers"])
        except (redis.exceptions.RedisError, OSError):
            return 0
        finally:
            servers.close()

    def _events(self) -> list[dict[str, Any]]:
        try:
            text = (self.folder / "events").read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]

    def _check_processes(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["event"] == "worker ended":
                raise self._worker_ended(event["status"])
            if event["event"] == "ended" and event["what"] == "workers":
                raise self._worker_ended(event["status"])
            if event["event"] == "ended":
                raise PoolError(
                    f"the private server {_how(event['status'])}:\n"
                    f"{self._last_lines(self.folder / 'server.log')}"
                )
        if self._reaper.poll() is not None:
            raise PoolError(
                f"the pool's reaper {_how(self._reaper.returncode)}:\n"
                f"{self._last_lines(self.folder / 'reaper.log')}"
            )

    def _worker_ended(self, status: int) -> LmpoolError:
        said = self._last_lines(self.log)
        if status == EXIT_REFUSED:
            return SettingsError(_last_complaint(said) or f"the worker refused to start:\n{said}")
        return PoolError(f"a worker {_how(status)} before it was ready. Its last lines:\n{said}")

    def _last_lines(self, log: Path) -> str:
        # The reaper may have removed the folder itself.
        return last_lines(log, LAST_LINES, self.folder.parent)

    # --- copying the log -----------------------------------------------------------------------

    def copy_log_to_stderr(self) -> None:
        """Show what the workers say, from now to the end, on stderr (a notebook's too)."""
        self._copy = threading.Thread(target=self._follow, name="lmpool-log", daemon=True)
        self._copy.start()

    def _follow(self) -> None:
        log: TextIO | None = None
        last = False
        while not last:
            last = self._stopping.wait(0.1)
            if log is None and self.log.exists():
                log = self.log.open(encoding="utf-8", errors="replace")
            if log is not None:
                say(log.read(), end="")
        if log is not None:
            log.close()

    # --- the end -------------------------------------------------------------------------------

    @frees("_lock")
    def stop(self) -> None:
        """End all processes and remove the folder; returns when nothing is left. Idempotent."""
        if os.getpid() != self._owner:
            return  # a forked child: the pool is its parent's
        with self._lock:
            if self._stopped:
                return
            self._close_pipe()
            try:
                self._reaper.wait(60)
            except subprocess.TimeoutExpired:
                self._reaper.kill()
                self._reaper.wait()
            finally:
                self._stopping.set()
            if self._copy is not None:
                self._copy.join(5)
            # The reaper has done it, unless somebody killed it.
            shutil.rmtree(self.folder, ignore_errors=True)
            self._stopped = True  # not before: Ctrl-C may end any of this

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            _PIPES.discard(pipe)
            os.close(pipe)


_PIPES: set[int] = set()


def _close_inherited_pipes() -> None:
    # A pool ends with the process that started it, whatever that process has forked.
    while _PIPES:
        os.close(_PIPES.pop())


os.register_at_fork(after_in_child=_close_inherited_pipes)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _last_complaint(said: str) -> str:
    """The last error a worker logged, without time and names."""
    for level, name, message in reversed(list(entries(said))):
        if level in ("ERROR", "CRITICAL") and name != "lmpool.worker.launcher":
            return message
    found = _AT_START.findall(said)
    return found[-1] if found else ""
