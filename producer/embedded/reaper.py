"""The reaper of an embedded pool: the parent of its server and its workers, and the last to leave.

A program of its own, in a session of its own, that uses the standard library alone and so starts
in milliseconds: ``reaper.py FOLDER OWNER`` (the user's process id), with what to start as one line
of JSON on its standard input.
It holds on to that pipe: when its other end closes, because the user's process closed it or ended
in whatever way, the reaper ends the workers, then the server, and removes the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

LOOK_EVERY: Final = 0.2
SERVER_START: Final = 20.0
SERVER_STOP: Final = 3.0
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


class Reaper:
    """Starts what the plan says, watches, cleans up."""

    def __init__(self, folder: Path, owner: int) -> None:
        self.folder = folder
        self.owner = owner
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._told = False

    def run(self) -> None:
        """Until the user's process is gone, or somebody sends SIGTERM."""
        try:
            plan = self._read_plan()
            if plan is None:
                return
            self._grace = float(plan["grace"])
            self._start("server", plan["server"], "server.log")
            if self._server_answers(plan["address"]):
                self._report("server ready")
                self._start("workers", plan["workers"], "workers.log")
            self._watch()
        finally:
            self._clean_up()

    def stop_soon(self, *_: object) -> None:
        """What SIGTERM does."""
        self._told = True

    def _read_plan(self) -> dict[str, Any] | None:
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(0, 1 << 16)
            if not part:
                return None
            line += part
        plan: dict[str, Any] = json.loads(line)
        return plan

    def _start(self, name: str, command: list[str], log: str) -> None:
        with (self.folder / log).open("ab") as output:
            self.processes[name] = process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent(),
            )
        self._report("started", what=name, pid=process.pid)

    def _server_answers(self, address: str | int) -> bool:
        family, place = (
            (socket.AF_INET, ("127.0.0.1", address))
            if isinstance(address, int)
            else (socket.AF_UNIX, address)
        )
        deadline = time.monotonic() + SERVER_START
        while time.monotonic() < deadline:
            with socket.socket(family) as probe:
                try:
                    probe.connect(place)
                    return True
                except OSError:
                    pass
            if self.processes["server"].poll() is not None or self._is_over(0.01):
                return False
        return False

    def _watch(self) -> None:
        running = dict(self.processes)
        while not self._is_over(LOOK_EVERY):
            for name, process in list(running.items()):
                if process.poll() is not None:
                    self._report("ended", what=name, status=process.returncode)
                    del running[name]

    def _is_over(self, wait: float) -> bool:
        """Wait, at most so many seconds, and say whether it is time to leave."""
        ready, _, _ = select.select([0], [], [], wait)
        closed = bool(ready) and not os.read(0, 1 << 10)
        # A forked child of the user's process may hold the pipe open for longer than it lives.
        return closed or self._told or os.getppid() != self.owner

    def _report(self, event: str, **details: Any) -> None:
        line = json.dumps({"event": event, **details}) + "\n"
        with (self.folder / "events").open("ab", buffering=0) as events:
            events.write(line.encode())

    def _clean_up(self) -> None:
        with contextlib.suppress(Exception):
            workers = self.processes.get("workers")
            if workers is not None:
                _end(workers, self._grace)
        # Whatever a worker started belongs to this session, unless it left it on purpose.
        server = self.processes.get("server")
        _kill_session(spared={server.pid} if server is not None else set())
        if server is not None:
            _end(server, SERVER_STOP)
        _kill_session(spared=set())
        shutil.rmtree(self.folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """SIGTERM, and SIGKILL for one that is still there after `grace` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _kill_session(spared: set[int]) -> None:
    """SIGKILL for all of this session but the reaper and the spared, until none is left."""
    spared = {*spared, os.getpid()}
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        others = [pid for pid in _session() if pid not in spared]
        if not others:
            return
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # orphans of this session are ours to bury
        time.sleep(0.01)


def _session() -> Iterator[int]:
    mine = os.getsid(0)
    for pid in _pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == mine:
                yield pid


def _pids() -> list[int]:
    if os.path.isdir("/proc/self"):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = subprocess.run(["ps", "-A", "-o", "pid="], capture_output=True, check=False)
    return [int(word) for word in found.stdout.split()]


def _prctl(option: int, value: int) -> Callable[[], None]:
    """A Linux system call, ready to be made where little is safe; nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    call = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: call(option, value, 0, 0, 0)


def _die_with_parent() -> Callable[[], None]:
    # Should the reaper be killed, its children are told; `die` is made before the fork.
    die = _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = os.getpid()

    def before_exec() -> None:
        die()
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def main() -> None:
    """Look after the folder that the command line names."""
    if len(sys.argv) != 3 or os.getsid(0) != os.getpid():
        # In the end it kills its session: that must not be somebody's terminal.
        sys.exit("this is started by lmpool.embedded")
    reaper = Reaper(Path(sys.argv[1]), int(sys.argv[2]))
    # Handlers, unlike SIG_IGN, are not inherited by what is started.
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)
    signal.signal(signal.SIGTERM, reaper.stop_soon)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)()
    reaper.run()


if __name__ == "__main__":
    main()
