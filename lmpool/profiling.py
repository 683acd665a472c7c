"""Where a process spends its time: what each of its threads is at, a hundred times a second.

By py-spy (the extra ``profile``), which looks from a process of its own: it sees every thread, also
where none of them holds the interpreter, and costs them little. A profiler of Python's own sees one
thread, and one at a time from Python 3.12 on. The file is read by https://www.speedscope.app.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from lmpool.checks import said
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

SUFFIX: Final = ".speedscope.json"
WRITTEN_IN: Final = 20.0
"""Seconds in which a profile is written."""
_BEGUN: Final = "Sampling process"
_PR_SET_PTRACER: Final = 0x59616D61
_ANYONE: Final = ctypes.c_ulong(-1)


def profile(folder: str | Path, name: str, *, children: bool = False) -> Callable[[], None]:
    """Begin to profile this process, and with `children` those that it starts, too.

    What it returns ends that: then ``NAME-PID.speedscope.json`` is written in `folder`, which is
    made where it is not there. So it is where this process ends otherwise.
    Raises `SettingsError` where py-spy is not installed, or may not look.
    """
    what = f"profile={str(folder)!r}"
    command = shutil.which("py-spy", path=_search_path())
    if command is None:
        raise SettingsError(f"{what} needs py-spy: pip install 'lmpool[profile]'")
    file = Path(folder).absolute() / f"{name}-{os.getpid()}{SUFFIX}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # It says that it cannot write when all is over.
        file.touch()
    except OSError as error:
        raise SettingsError(
            f"{what}: {said(error)}; name a folder that can be written to"
        ) from None
    _let_look(_ANYONE)
    # Not a pipe: where this process dies, py-spy would die of writing to it.
    with tempfile.TemporaryFile() as saying:
        process = subprocess.Popen(
            [
                *(command, "record", "--pid", str(os.getpid()), "--format", "speedscope"),
                # Without stopping the process at each look: one that is killed meanwhile might be
                # kept as a zombie by py-spy, and its launcher would wait for good.
                *("--nonblocking", *(["--subprocesses"] if children else [])),
                *("--output", str(file)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=saying,
            stderr=saying,
            # It outlives this one, to write what it saw, and whatever ends this one's group.
            start_new_session=True,
        )
        late = time.monotonic() + WRITTEN_IN
        while _BEGUN not in _said(saying):
            if time.monotonic() > late:
                process.kill()
                process.wait()
            if process.poll() is not None:
                text = " ".join(_said(saying).split())
                file.unlink()
                _let_look(ctypes.c_ulong(0))
                raise SettingsError(
                    f"{what}: py-spy may not look at this process ({text}); a container needs the "
                    "capability SYS_PTRACE, macOS a root user"
                )
            time.sleep(0.01)
    _let_look(ctypes.c_ulong(process.pid))
    logger.info("profiled by py-spy (pid %d), for %s", process.pid, file)

    def end() -> None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(WRITTEN_IN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            logger.error("the profile %s was not written in %g s", file, WRITTEN_IN)

    return end


def _said(saying: IO[bytes]) -> str:
    size = os.fstat(saying.fileno()).st_size
    return os.pread(saying.fileno(), size, 0).decode("utf-8", "replace")


def _search_path() -> str:
    """Where pip puts commands, of an environment that is not activated as well."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def _let_look(whom: ctypes.c_ulong) -> None:
    """Let a process look into this one, where Linux lets a parent alone (Yama)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, whom, 0, 0, 0)
