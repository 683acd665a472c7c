"""Processes of one pool that run on one machine, of one user: they find each other in a folder.

Each lays a file there, and holds a lock on it as long as it lives: the system lets go of that
whatever becomes of the process. The files of those that are gone are taken away by who comes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias

from lmpool.keys import PROTOCOL

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, where there is no such folder either
    fcntl = None

MEMORY: Final = "/dev/shm"
"""Where files are memory that processes share: Linux's."""
LOOK_EVERY: Final = 5.0
"""Seconds after which those that died are noticed."""
UNSETTLED: Final = 0.05
"""Seconds in which two changes of a folder may have the same time."""
TRIES: Final = 100
"""To come into a folder that others leave, and take away, at the same moment."""
DRAFT_SECONDS: Final = 60.0
"""Seconds after which a file that is not whole yet will not be."""

Kind: TypeAlias = Literal["client", "notices", "rows"]
"""What a client waits for; the pipe that it is told by; a worker's rows."""


class Neighbourhood:
    """The folder of one pool, `of`: what is in it counts for the processes of this user alone."""

    def __init__(self, of: str) -> None:
        self._root = f"{MEMORY}/lmpool-{_user()}"
        self.folder = f"{self._root}/{hashlib.blake2b(of.encode(), digest_size=8).hexdigest()}"

    @classmethod
    def of_pool(cls, pool: str, fingerprint8: str) -> Neighbourhood:
        """That of the pool of a name, while it serves one model."""
        return cls(f"{pool}:{fingerprint8}:{PROTOCOL}")

    def enter(
        self,
        kind: Kind,
        name: str,
        fill: Callable[[int], Any] | None = None,
        *,
        is_pipe: bool = False,
    ) -> Membership:
        """Be there, with a file that `fill` writes, or a pipe that it takes an end of, from when
        that is whole. `name` is of letters, digits, ``_``, ``.`` and ``-``. Raises `OSError` where
        that cannot be."""
        if fcntl is None or not os.path.isdir(MEMORY):
            raise FileNotFoundError(f"no {MEMORY}")
        _make(self._root)
        self._sweep()
        draft, file = self._begin(_pipe if is_pipe else _file)
        lock = -1
        try:
            # By another opening of it: what `fill` maps would hold on to the lock in forks, too.
            lock = os.open(draft, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fill is not None:
                fill(file)
            path = self.path(kind, name)
            os.rename(draft, path)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            with suppress(OSError):
                os.unlink(draft)
            with suppress(OSError):  # others are there
                os.rmdir(self.folder)
            raise
        finally:
            os.close(file)
        return Membership(lock, path)

    def _begin(self, make: Callable[[str], int]) -> tuple[str, int]:
        """An empty file or pipe that nobody knows of."""
        for left in reversed(range(TRIES)):
            try:
                _make(self.folder)
                draft = f"{self.folder}/.{secrets.token_hex(8)}"
                return draft, make(draft)
            except FileNotFoundError:  # the last one there has just taken the folder away
                if not left:
                    raise
            except OSError:
                with suppress(OSError):  # others are there
                    os.rmdir(self.folder)
                raise
        raise AssertionError("unreachable")

    def _sweep(self) -> None:
        """Take away what was left in any pool's folder."""
        for folder in (f"{self._root}/{name}" for name in os.listdir(self._root)):
            with suppress(OSError):  # it has just gone, or others are there
                if _is_ours(folder):
                    for entry in os.listdir(folder):
                        _is_left(f"{folder}/{entry}")
                    os.rmdir(folder)

    @staticmethod
    def room() -> int:
        """Bytes that files here may take in all: half of what there is, as others need some."""
        found = os.statvfs(MEMORY)
        return found.f_bavail * found.f_frsize // 2

    def path(self, kind: Kind, name: str) -> str:
        """The file of one that is there."""
        return f"{self.folder}/{kind}-{name}"

    def look(self, kind: Kind) -> dict[str, str]:
        """Who of a kind is there: the path of each file, by name."""
        found = {}
        try:
            entries = os.listdir(self.folder) if _is_ours(self.folder) else []
        except OSError:
            return {}
        for entry in entries:
            path = f"{self.folder}/{entry}"
            if entry.startswith(f"{kind}-") and not _is_left(path):
                found[entry.removeprefix(f"{kind}-")] = path
        return found


class Membership:
    """One's own file in a folder, until one leaves, or nobody knows of this any more. A fork of the
    process is not there by it."""

    def __init__(self, lock: int, path: str) -> None:
        self._path = path
        self._which = which(os.fstat(lock))
        self._end = weakref.finalize(self, _leave, lock, self._which, path, os.getpid())
        _MEMBERSHIPS.add(self)

    def leave(self) -> None:
        """Be there no longer."""
        self._end()

    @property
    def is_there(self) -> bool:
        """Whether others find it: a system may take files of shared memory away."""
        try:
            return self._end.alive and which(os.stat(self._path)) == self._which
        except OSError:
            return False


_MEMBERSHIPS: Final[weakref.WeakSet[Membership]] = weakref.WeakSet()


def _after_fork() -> None:
    for membership in list(_MEMBERSHIPS):
        membership.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _leave(lock: int, mine: tuple[int, int], path: str, whose: int) -> None:
    close_own(lock, mine)
    if os.getpid() != whose:
        return
    with suppress(OSError):
        os.unlink(path)
    with suppress(OSError):  # others are there yet
        os.rmdir(os.path.dirname(path))


def which(file: os.stat_result) -> tuple[int, int]:
    """What tells a file from all others that there are now."""
    return file.st_dev, file.st_ino


def close_own(file: int, mine: tuple[int, int]) -> None:
    """Close a file unless its number is another's, as after all were closed, which daemons do."""
    with suppress(OSError):
        if which(os.fstat(file)) == mine:
            os.close(file)


class Neighbours:
    """Those of a kind, looked for when somebody came or went, and now and then. For any threads."""

    def __init__(self, neighbourhood: Neighbourhood, kind: Kind) -> None:
        self._neighbourhood = neighbourhood
        self._kind: Kind = kind
        self._looking = threading.Lock()
        self._changed = 0
        """When the folder last changed, in ns; below 0 while another change may have that time."""
        self._next = 0.0
        self._found: dict[str, str] = {}

    def look(self) -> dict[str, str]:
        """The path of each one's file, by name: the same object as long as nothing has changed."""
        before = time.time_ns()
        try:
            changed = os.stat(self._neighbourhood.folder).st_mtime_ns
        except OSError:
            changed = 0
        after = time.time_ns()
        if changed == self._changed and time.monotonic() < self._next:
            return self._found
        with self._looking:
            found = self._neighbourhood.look(self._kind) if changed else {}
            settled = changed < before - UNSETTLED * 1e9 or changed > after + UNSETTLED * 1e9
            self._changed = changed if settled else -1
            self._next = time.monotonic() + LOOK_EVERY
            if found != self._found:
                self._found = found
            return self._found


def _file(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _pipe(path: str) -> int:
    os.mkfifo(path, 0o600)
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # both ends: it is open for who reads
    except OSError:
        os.unlink(path)
        raise


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _make(folder: str) -> None:
    """A folder for this user alone. Raises `OSError` for one that others may write to."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_ours(folder):
        raise PermissionError(f"{folder} is another user's, or open to others")


def _is_ours(folder: str) -> bool:
    found = os.lstat(folder)
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == _user()
        and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    )


def _is_left(path: str) -> bool:
    """Whether nobody holds a file any more: then it is taken away, but for one that may be about to
    be held."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    try:
        found = os.fstat(file)
        is_draft = os.path.basename(path).startswith(".")
        if is_draft and abs(time.time() - found.st_mtime) < DRAFT_SECONDS:
            return False
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if which(os.stat(path)) == which(found):  # not one that has just come under its name
            os.unlink(path)
    except OSError:  # it is held; or another took it away
        return not os.path.exists(path)
    finally:
        os.close(file)
    return True
