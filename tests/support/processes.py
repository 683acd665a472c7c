"""Processes that a test must find gone: by process id, and by what a folder of its own holds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import psutil

from tests.support.waiting import until


def runs(pid: int) -> bool:
    """Whether a process does more than wait to be buried."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Iterable[int], timeout: float = 60.0) -> None:
    """Return once none of them runs."""
    waited_for = set(pids)
    assert waited_for
    until(
        lambda: not [pid for pid in waited_for if runs(pid)],
        timeout,
        what=f"the processes {sorted(waited_for)} to end",
        every=0.02,
    )


def users_of(folder: str | os.PathLike[str]) -> list[int]:
    """Processes that name `folder` on their command line or in their environment."""
    name, found = os.fspath(folder), []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(name in text for text in told):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [pid for pid in found if runs(pid)]


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name; pytest's own are long."""
    folder = Path(tempfile.mkdtemp(prefix="lmpool-t-", dir="/tmp"))
    try:
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)
