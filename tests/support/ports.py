"""TCP ports of the loopback interface that no other test of this machine takes meanwhile."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final

PORTS: Final = range(12_700, 22_000)
"""No connection has one of these ports at its own end, nor that of a bus: who is started again
finds its port free, and who connects meanwhile is refused, and never connected to itself. Those of
`lmpool demo` lie between these and their buses."""

BUS: Final = 10_000
"""What a node of a cluster adds to its port for the port of the bus, unless it is told another."""

KEPT: Final = 400
"""How many ports a process holds; the oldest goes back first, as its test is over."""


class PortHolder:
    """Ports that one process has picked, and no other picks while it lives and holds them.

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
        for port in chain(self._ports[first:], self._ports[:first]):
            wanted = [port, *(port + more for more in further)]
            if not self._lock(wanted):
                continue
            if all(_is_free(host, each) for each in wanted):
                self._held.extend(wanted)
                while len(self._held) > self._kept:
                    self._unlock(self._held.popleft())
                return port
            self._unlock(*wanted)
        raise OSError(f"no port of {self._ports} is free")

    def _lock(self, ports: list[int]) -> bool:
        if any(port in self._held for port in ports):
            return False
        for at, port in enumerate(ports):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            except OSError:
                self._unlock(*ports[:at])
                return False
        return True

    def _unlock(self, *ports: int) -> None:
        for port in ports:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, port)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe, suppress(OSError):
        probe.bind((host, port))
        return True
    return False


_HOLDER: Final = PortHolder(Path(tempfile.gettempdir()) / f"lmpool-test-ports-{os.getuid()}")


def free_port(*further: int) -> int:
    """A TCP port of the loopback interface on which nothing listens, nor that much further up."""
    return _HOLDER.pick("127.0.0.1", *further)


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
