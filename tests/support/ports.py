"""TCP ports of the loopback interface that no other test of this machine takes meanwhile."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

PORTS: Final = range(10_000, 22_000)
"""No connection has one of these ports at its own end: who is started again finds its port free,
and who connects meanwhile is refused, and never connected to itself."""

BUS: Final = 10_000
"""What a node of a cluster adds to its port for the port of the bus, unless it is told another."""

KEPT: Final = 400
"""How many ports a process holds; the oldest goes back first."""


class PortHolder:
    """Ports that one process has picked, and no other picks while it lives.

    Nothing listens on a port between its picking and a server's start, nor while that server is
    down: a lock on the byte of that number of a common file says that it is taken.
    """

    def __init__(self, file: Path, ports: range = PORTS, kept: int = KEPT) -> None:
        # Never closed by hand: that would give all of the process's locks on the file back.
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._ports = ports
        self._kept = kept
        self._held: deque[int] = deque()
        self._process = os.getpid()

    def pick(self, host: str = "127.0.0.1", *further: int) -> int:
        """A free port of `host`, of which those further up by each of `further` are free too.
        Raises OSError where there is none."""
        if self._process != os.getpid():  # forked: the locks stayed with the parent
            self._held.clear()
            self._process = os.getpid()
        first = random.SystemRandom().randrange(len(self._ports))
        for port in (*self._ports[first:], *self._ports[:first]):
            wanted = [port, *(port + more for more in further)]
            if self._hold(wanted) and all(_is_free(host, each) for each in wanted):
                while len(self._held) > self._kept:
                    self._give_back(self._held.popleft())
                return port
        raise OSError(f"no port of {self._ports} is free")

    def _hold(self, ports: list[int]) -> bool:
        if any(port in self._held for port in ports):
            return False
        for at, port in enumerate(ports):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            except OSError:
                for earlier in ports[:at]:
                    self._give_back(earlier)
                return False
        self._held.extend(ports)
        return True

    def _give_back(self, port: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, port)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe, suppress(OSError):
        probe.bind((host, port))
        return True
    return False


_HOLDER: Final = PortHolder(Path(tempfile.gettempdir()) / f"lmpool-test-ports-{os.getuid()}")


def free_port() -> int:
    """A TCP port of the loopback interface on which nothing listens."""
    return _HOLDER.pick()


def node_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens, nor on that of the bus."""
    return _HOLDER.pick(host, BUS)


def listens(port: int) -> bool:
    """Whether something takes connections on a loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
