"""Laying large rows where clients of this machine read them, beside storing them."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from lmpool.neighbours import MEMORY, Membership, Neighbourhood
from lmpool.row_ring import IS_ORDERED, RowRing
from lmpool.rows import PackedRow
from lmpool.wants import Digest
from lmpool.worker.near_clients import NearClients

logger = logging.getLogger(__name__)

TOLD_BYTES: Final = 1 << 20
"""Bytes that are laid before clients are told of them: they copy them while more is laid."""
LEAST_BYTES: Final = 1 << 20
"""Of a ring, where there is no room for what it should have."""


class Laying:
    """The ring of one worker, `owner`, for the clients of `neighbourhood`; made once one of them
    waits for a row. For any thread."""

    def __init__(self, neighbourhood: Neighbourhood, size: int, owner: str) -> None:
        self._neighbourhood = neighbourhood
        self._size = size
        self._owner = owner
        self._clients = NearClients(neighbourhood)
        self._ring: RowRing | None = None
        self._name = ""
        self._membership: Membership | None = None
        self._is_possible = size > 0 and IS_ORDERED
        self._writing = threading.Lock()

    def may_be_ahead(self, digests: Sequence[Digest], size: int) -> list[bool]:
        """Which of these rows, of `size` bytes each, may be laid ahead of others that are to be
        stored before them: those that somebody near waits for, where all who do keep up with what
        they are told. Or the newest would lie over what they have not come to."""
        with self._writing:
            self._look()
            waiting = self._clients.who_wait(digests) if self._is_possible else {}
            most = (self._ring.size if self._ring is not None else self._size) // 2
            found = np.zeros(len(digests), bool)
            for waits in waiting.values():
                found |= waits
            for name, waits in waiting.items():
                if self._clients.unread(name) * size > most:
                    found &= ~waits
            return found.tolist()

    def lay(self, digests: Sequence[Digest], values: Sequence[bytes | PackedRow | None]) -> None:
        """Lay the large rows among these answers that anybody near waits for, and tell them."""
        with self._writing:
            self._lay(digests, values)

    def _lay(self, digests: Sequence[Digest], values: Sequence[bytes | PackedRow | None]) -> None:
        self._look()
        large = [
            (digest, value)
            for digest, value in zip(digests, values, strict=True)
            if isinstance(value, PackedRow)
        ]
        waiting = self._clients.who_wait([digest for digest, _ in large]) if large else {}
        ring = self._ring_at_hand() if waiting else None
        if ring is None:
            return
        who = [
            [name for name, waits in zip(waiting, row, strict=True) if waits]
            for row in np.transpose([*waiting.values()]).tolist()
        ]
        laid: dict[str, list[Digest]] = {name: [] for name in waiting}
        size = 0
        for names, (digest, row) in zip(who, large, strict=True):
            if names and ring.lay(digest, row):
                size += row.nbytes
                for name in names:
                    laid[name].append(digest)
            if size >= TOLD_BYTES:
                self._tell(laid)
                size = 0
        self._tell(laid)

    def _look(self) -> None:
        """See who is near."""
        if not self._is_possible:
            return
        if self._clients.look() and self._membership is not None and not self._membership.is_there:
            self._drop()  # the system has taken it away: who came would not find it

    def _tell(self, laid: dict[str, list[Digest]]) -> None:
        for name, digests in laid.items():
            if digests:
                self._clients.tell(name, self._name, digests)
                laid[name] = []

    def close(self) -> None:
        """Nobody finds the ring any more; who has found it keeps it."""
        with self._writing:
            self._is_possible = False
            self._drop()

    def _drop(self) -> None:
        self._ring = None
        if self._membership is not None:
            self._membership.leave()

    def _ring_at_hand(self) -> RowRing | None:
        if self._ring is None and self._is_possible:
            self._begin()
        return self._ring

    def _begin(self) -> None:
        rings: list[RowRing] = []
        try:
            size = min(self._size, self._neighbourhood.room())
            if size < min(self._size, LEAST_BYTES):
                raise OSError(f"{MEMORY} has room for {size:,} bytes")
            name = secrets.token_hex(8)
            self._membership = self._neighbourhood.enter(
                "rows", name, lambda file: rings.append(RowRing(file, size, self._owner))
            )
        except (OSError, ValueError) as error:
            self._is_possible = False
            logger.warning(
                "clients of this machine get all their rows from the server: %s. Mend that, or set "
                "LMPOOL_NEAR_BYTES=0",
                error,
            )
            return
        self._ring, self._name = rings[0], name
        logger.info("clients of this machine read rows in %.0f MiB of memory", size / (1 << 20))
