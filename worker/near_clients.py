"""The clients of a worker's machine: what they wait for, and how they are told."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from lmpool.near_notices import NearNotice, NoticeWriter
from lmpool.neighbours import Neighbourhood, Neighbours
from lmpool.wait_list import WaitListError, WaitListReader, halves_of
from lmpool.wants import Digest

logger = logging.getLogger(__name__)

CLIENTS_MOST: Final = 128
"""Names that are told, each of which takes two descriptors, and of which a client may have two; for
others rows come from the server."""


class NearClient:
    """One of them."""

    def __init__(self, waits: WaitListReader, pipe: NoticeWriter) -> None:
        self.waits = waits
        self.pipe = pipe


class NearClients:
    """Those of a neighbourhood, as they are now. For one thread at a time."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self._neighbourhood = neighbourhood
        self._neighbours = Neighbours(neighbourhood, "client")
        self._known: dict[str, str] = {}
        """Their paths at the last look, by name."""
        self._clients: dict[str, NearClient] = {}

    def look(self) -> bool:
        """See who is there. Whether anybody came or went."""
        there = self._neighbours.look()
        if there is self._known:
            return False
        self._neighbourhood.look("notices")  # those of the dead are taken away by that
        known = [name for name in self._clients if name in there]
        names = [*known, *(name for name in there if name not in self._clients)][:CLIENTS_MOST]
        clients = {name: self._clients.get(name) or self._open(name) for name in names}
        self._clients = {name: client for name, client in clients.items() if client is not None}
        self._known = there
        return True

    def who_wait(self, digests: Sequence[Digest]) -> dict[str, npt.NDArray[np.bool_]]:
        """Which of these answers each waits for that waits for any: bool [digests], by name."""
        if not self._clients:
            return {}
        halves = halves_of(digests)
        found = {name: client.waits.has(halves) for name, client in self._clients.items()}
        return {name: waits for name, waits in found.items() if waits.any()}

    def unread(self, name: str) -> int:
        """Of how many rows one of them was told that it has not come to."""
        client = self._clients.get(name)
        try:
            return 0 if client is None else client.pipe.unread()
        except OSError as error:  # as if it were gone: it is not told of any either
            logger.debug("%s is told of no rows any more: %s", name, error)
            del self._clients[name]
            return 0

    def tell(self, name: str, ring: str, digests: list[Digest]) -> None:
        """Tell one of them where the rows lie that it waits for."""
        client = self._clients.get(name)
        try:
            if client is not None:
                client.pipe.tell(NearNotice(ring, digests))
        except OSError as error:  # nobody reads any more
            logger.debug("%s is told of no rows any more: %s", name, error)
            del self._clients[name]

    def _open(self, name: str) -> NearClient | None:
        try:
            path = self._neighbourhood.path("client", name)
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    raise WaitListError("it is no file of this user's")
                waits = WaitListReader(file)
            finally:
                os.close(file)
            return NearClient(waits, NoticeWriter(self._neighbourhood.path("notices", name)))
        except (OSError, ValueError, WaitListError) as error:
            logger.debug("%s is told of no rows: %s", name, error)
            return None
