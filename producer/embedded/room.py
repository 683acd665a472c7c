"""The temporary folder of a server and workers of one's own, and what is said where it is full."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path
from typing import Final

from lmpool.errors import PoolError

WANTS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Errors that are of a folder, and not of processes or sockets."""
LEAST_ROOM: Final = 64 << 10
"""Bytes without which logs and sockets cannot be written."""
ROOM: Final = "make room, or let TMPDIR name a folder of another file system"


def make_folder(what: str) -> Path:
    """A new temporary folder of this user's alone, for `what`. Raises `PoolError`."""
    try:
        return Path(tempfile.mkdtemp(prefix="lmpool-"))
    except OSError as error:
        raise no_folder(what, error) from None


def no_folder(what: str, error: OSError) -> PoolError:
    """What is raised where the folder of `what` cannot be made, or not be written to."""
    return PoolError(f"{what} needs a temporary folder: {error}; {ROOM}")


def last_lines(log: Path, most: int, folder: Path) -> str:
    """The last `most` lines of a log, and whether `folder`, in which it was made, lacks room."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()[-most:]
    except OSError:
        lines = []
    if _is_full(folder):
        lines.append(f"({folder} has no room left: {ROOM})")
    return "\n".join(lines) or "(nothing was written)"


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < LEAST_ROOM
    except OSError:
        return False
