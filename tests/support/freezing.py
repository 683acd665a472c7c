"""Freezing processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.support.waiting import until


def freeze(pid: int) -> None:
    """Stop a process. Once this returns nothing of it goes on: the signal alone says nothing, and
    on a busy machine its threads may do a lot before the last of them has stopped."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _is_frozen(pid), what=f"process {pid} stands still")


def _is_frozen(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.is_dir():
        try:
            return psutil.Process(pid).status() != psutil.STATUS_RUNNING
        except psutil.NoSuchProcess:
            return True
    return all(_state_of(task) in ("T", "t", "Z", "X") for task in tasks.iterdir())


def _state_of(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return "X"
