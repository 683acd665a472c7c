"""``lmpool worker``: one arq process for each GPU, started again when it dies.

A worker that refuses to start (exit status 78: its settings, another model in the pool) stays
down, and so does one that was told to leave and did (status 0).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import importlib.util
import json
import logging
import logging.config
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, Final

from lmpool.checks import check_working_directory
from lmpool.errors import SettingsError
from lmpool.exit_status import EXIT_REFUSED
from lmpool.insistence import Insistence
from lmpool.logs import logging_config
from lmpool.settings import WorkerOptions, refuse_unknown_variables
from lmpool.variables import as_variables
from lmpool.worker.placement import Placement, placements, with_ports
from lmpool.worker.signals import TOLD_TO_END, hear_no_more

logger = logging.getLogger(__name__)

ARQ: Final = (
    sys.executable, "-P", "-m", "arq", "lmpool.worker.WorkerSettings",
    "--custom-log-dict", "lmpool.worker.logs.LOGGING",
)  # fmt: skip
EXIT_KILLED: Final = 1
"""Exit status when a worker had to be killed."""
MARGIN: Final = 10.0
"""Seconds longer than `drain_timeout` after which a worker that was told to stop is killed."""
LONGEST_LINE: Final = 1 << 16
FOR_NOW: Final = frozenset((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE))
"""Errors of a machine that can make no more processes, or open no more files, at the moment."""
PR_SET_PDEATHSIG: Final = 1


@dataclass
class Backoff:
    """How long to wait before a worker is started again: longer each time, until it lives."""

    first: float = 0.5
    most: float = 60.0
    healthy: float = 60.0
    jitter: Callable[[], float] = random.random
    _deaths: int = 0

    def after(self, lived: float) -> float:
        """Seconds to wait after a life of `lived` seconds."""
        if lived >= self.healthy:
            self._deaths = 0
        wait = min(self.most, self.first * 2.0**self._deaths)
        self._deaths = min(self._deaths + 1, 30)
        # Workers that die together, of the same cause, come back one after the other.
        return wait * (0.75 + 0.5 * self.jitter())


def named_folder() -> str:
    """The working directory as it was changed to: a symbolic link may lead elsewhere later."""
    named = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, os.curdir):
            return named
    return os.getcwd()


@dataclass
class Launcher:
    """Keeps a worker running in each of its placements."""

    placements: Sequence[Placement]
    environment: Mapping[str, str]
    drain_timeout: float
    events: Path | None = None
    command: Sequence[str] = ARQ
    new_backoff: Callable[[], Backoff] = Backoff
    insistence: Insistence = field(default_factory=Insistence)
    folder: str = field(default_factory=named_folder)
    """Where workers run, by its name: a deploy may remove it, and put another one there."""
    _running: dict[Popen[bytes], asyncio.Future[int]] = field(default_factory=dict)
    """The workers' processes, each with its exit status once it has one."""
    _killed: bool = False

    async def run(self) -> int:
        """Until told to stop by SIGTERM, SIGINT or SIGHUP, or every worker is down for good.

        Returns the exit status: 0, 78 where all were refused, 1 where one had to be killed.
        """
        self._stopping = asyncio.Event()
        self._die = _die_with_parent()
        loop = asyncio.get_running_loop()
        for told in TOLD_TO_END:
            if signal.getsignal(told) is not signal.SIG_IGN:  # as nohup has it
                loop.add_signal_handler(told, self._stop, told)
        # Not asyncio's own processes: a thread or a descriptor to watch one may be refused when it
        # runs already.
        loop.add_signal_handler(signal.SIGCHLD, self._look)
        try:
            async with asyncio.TaskGroup() as group:
                kept = [group.create_task(self._keep(placement)) for placement in self.placements]
        finally:
            for process in self._running:  # where something failed that nobody foresaw
                process.terminate()
        statuses = [task.result() for task in kept]
        if self._killed:
            return EXIT_KILLED
        if EXIT_REFUSED in statuses and not self._stopping.is_set():
            logger.error("no worker is left: starting again cannot help, see above")
            return EXIT_REFUSED
        return 0

    async def _keep(self, placement: Placement) -> int:
        """Run a worker, and another one when it dies; the exit status of the last."""
        backoff = self.new_backoff()
        process: Popen[bytes] | None = None
        while True:
            started = time.monotonic()
            try:
                process, copying = self._start(placement)
            except OSError as error:
                # What ran once will again: a deploy replaces its folder, or all of its Python.
                is_none = error.errno not in FOR_NOW and error.filename != self.folder
                if process is None and is_none:
                    logger.error(
                        "%s cannot be started: %s: see that lmpool's environment is whole, and "
                        "may be run",
                        *(placement.name, error),
                    )
                    return EXIT_REFUSED
                wait = backoff.after(0.0)  # the others live on
                logger.error(
                    "%s cannot be started (%s): tried again in %.1f s", placement.name, error, wait
                )
                if await self._stops_within(wait):
                    return 0
                continue
            status = await self._wait(placement, process, copying)
            if self._stopping.is_set():
                return status
            lived = time.monotonic() - started
            if status == EXIT_REFUSED:
                logger.error("%s refused to start, and is not started again", placement.name)
                return status
            if status == 0:
                logger.info("%s was told to leave, and is not started again", placement.name)
                return status
            wait = backoff.after(lived)
            logger.error(
                "%s (pid %d) %s after %.0f s: another one starts in %.1f s",
                placement.name, process.pid, how_it_ended(status), lived, wait,
            )  # fmt: skip
            if await self._stops_within(wait):
                return status

    async def _stops_within(self, seconds: float) -> bool:
        """Wait, unless it is told to stop meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    def _start(self, placement: Placement) -> tuple[Popen[bytes], asyncio.Task[None] | None]:
        """The worker's process, and the task that copies what it says."""
        # Several workers' lines are told apart; a single one has the terminal to itself.
        reading, writing = os.pipe() if len(self.placements) > 1 else (None, None)
        try:
            process = Popen(
                self.command,
                cwd=self.folder,
                env={**os.environ, **self.environment, **placement.environment},
                stdin=DEVNULL,
                stdout=writing,
                stderr=writing,
                preexec_fn=self._die,
                # A group of its own: Ctrl-C reaches it through us alone, and what it has started
                # can be ended with it.
                process_group=0,
            )
        except BaseException:
            if reading is not None:
                os.close(reading)
            raise
        finally:
            if writing is not None:
                os.close(writing)
        self._running[process] = asyncio.get_running_loop().create_future()
        if self._stopping.is_set():
            process.terminate()  # told while it was being started
        self._report("worker started", placement, process)
        if reading is None:
            return process, None
        return process, asyncio.create_task(_copy_lines(reading, placement.name))

    async def _wait(
        self, placement: Placement, process: Popen[bytes], copying: asyncio.Task[None] | None
    ) -> int:
        status = await self._running[process]
        del self._running[process]
        # An engine's own processes would hold the GPU's memory against the next worker.
        _kill_group(process)
        if copying is not None:
            await asyncio.wait({copying}, timeout=2.0)
            copying.cancel()
        self._report("worker ended", placement, process, status=status)
        return status

    def _look(self) -> None:
        """Some worker may have ended."""
        for process, ended in self._running.items():
            if process.poll() is not None and not ended.done():
                ended.set_result(process.returncode)

    def _stop(self, told: signal.Signals) -> None:
        insists = self.insistence.insists()
        if self._stopping.is_set():
            if insists:
                self._kill("told to stop a second time")
            return
        self._stopping.set()
        limit = self.drain_timeout + min(MARGIN, self.drain_timeout)
        if self._running:
            logger.info(
                "%s: the workers finish their batches, within %g s; a second signal ends them "
                "at once",
                told.name, limit,
            )  # fmt: skip
        for process in self._running:
            process.terminate()
        asyncio.get_running_loop().call_later(limit, self._kill, f"not gone after {limit:g} s")

    def _kill(self, why: str) -> None:
        for process in self._running:
            logger.error("pid %d is killed: %s", process.pid, why)
            self._killed = True
            _kill_group(process)

    def _report(self, event: str, placement: Placement, process: Popen[bytes], **more: Any) -> None:
        if self.events is not None:
            line = json.dumps(
                {"event": event, "placement": placement.name, "pid": process.pid, **more}
            )
            try:
                with self.events.open("ab", buffering=0) as events:
                    events.write(line.encode() + b"\n")
            except OSError as error:  # the worker runs, or has ended, all the same
                logger.error("%s cannot be reported: %s", event, error)


async def _copy_lines(reading: int, place: str) -> None:
    """Write what comes through a pipe to our stderr, each line with the place that it is from."""
    source = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(source), os.fdopen(reading, "rb")
    )
    kept = b""
    try:
        while part := await source.read(LONGEST_LINE):
            *lines, kept = (kept + part).split(b"\n")
            for line in lines:
                _say(place, line)
            if len(kept) >= LONGEST_LINE:
                _say(place, kept)
                kept = b""
        if kept:
            _say(place, kept)
    finally:
        transport.close()


def _say(place: str, line: bytes) -> None:
    of = f"[{place}] ".encode()
    if line.startswith(b'{"'):  # JSON, and still so afterwards
        of, line = b'{"place": %b, ' % json.dumps(place).encode(), line[1:]
    with contextlib.suppress(OSError):
        os.write(2, of + line + b"\n")


def _kill_group(process: Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _die_with_parent() -> Callable[[], None] | None:
    """What a child does before it becomes a worker: ask for SIGTERM when this process dies.

    On Linux alone: elsewhere workers outlive a launcher that is killed.
    """
    if not sys.platform.startswith("linux"):
        return None
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # found before the fork, after which little is safe

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def launch(
    settings: Mapping[str, Any],
    *,
    gpus: str | None = None,
    workers: int | None = None,
    events: Path | None = None,
) -> int:
    """Run workers until they are told to stop; the exit status.

    `settings` are those of `WorkerOptions`, by name; what they leave out comes from ``LMPOOL_*``
    variables. Raises `SettingsError`, before anything is started, for what cannot be used.
    """
    refuse_unknown_variables()
    options = WorkerOptions(**settings)
    if importlib.util.find_spec("arq") is None:
        raise SettingsError("workers are run by arq: pip install 'lmpool[worker]'")
    check_working_directory()
    chosen = with_ports(placements(gpus, workers, os.environ), options.metrics_port)
    level, form = options.log_level, options.log_format
    logging.config.dictConfig(logging_config(level, form, pool=options.pool))
    launcher = Launcher(chosen, as_variables(settings), options.drain_timeout, events)
    return asyncio.run(_run_to_its_end(launcher))


async def _run_to_its_end(launcher: Launcher) -> int:
    status = await launcher.run()
    hear_no_more()
    return status
