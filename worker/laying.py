"""Laying large rows where clients of this machine read them, beside storing them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lmpool.commands import Value
from lmpool.keys import ShardKeys
from lmpool.neighbours import MEMORY, Membership, Neighbourhood, Neighbours
from lmpool.row_ring import IS_ORDERED, RowRing
from lmpool.rows import PackedRow
from lmpool.scripts import script
from lmpool.wants import Digest
from lmpool.worker.transaction import Call

logger = logging.getLogger(__name__)

TOLD_MOST: Final = 64
"""Clients that are told; for others rows come from the server."""
IN_VAIN_MOST: Final = 8
"""Writes in succession of which nobody near was told: then it rests."""
REST: Final = 5.0
"""Seconds for which it does, unless somebody comes or goes."""
LEAST_BYTES: Final = 1 << 20
"""Of a ring, where there is no room for what it should have."""


class Laying:
    """The ring of one worker, for the clients of `neighbourhood`; made once there is one. For one
    thread at a time."""

    def __init__(self, neighbourhood: Neighbourhood, size: int) -> None:
        self._neighbourhood = neighbourhood
        self._size = size
        self._clients = Neighbours(neighbourhood, "client")
        self._known: Mapping[str, str] = {}
        """The clients at the last look."""
        self._ring: RowRing | None = None
        self._name = ""
        self._membership: Membership | None = None
        self._is_possible = size > 0 and IS_ORDERED
        self._in_vain = 0
        """How often in succession nobody was told."""
        self._rests_until = 0.0

    def lay(
        self, shard: ShardKeys, digests: Sequence[Digest], values: Sequence[bytes | PackedRow]
    ) -> Call | None:
        """Lay the large rows among what is stored. What tells who waits, if anybody is near."""
        clients = self._clients.look() if self._is_possible else None
        if not clients or (clients is self._known and time.monotonic() < self._rests_until):
            return None
        large = [
            (digest, value)
            for digest, value in zip(digests, values, strict=True)
            if isinstance(value, PackedRow)
        ]
        ring = self._ring_for(clients) if large else None
        if ring is None:
            return None
        laid = [digest for digest, value in large if ring.lay(digest, value)]
        if not laid:
            return None
        near = [*clients][:TOLD_MOST]
        arguments: list[Value] = [
            *(shard.prefix, b"".join(laid).hex(), self._name, f" {' '.join(near)} "),
        ]
        return Call(script("near"), [shard.reply(near[0])], arguments)

    def hear(self, told: Any) -> None:
        """So many clients waited for what was laid last, or nobody knows: laying rests where none
        of those that are near have for a while."""
        self._in_vain = 0 if told else self._in_vain + 1
        if self._in_vain >= IN_VAIN_MOST:
            self._in_vain, self._rests_until = 0, time.monotonic() + REST

    def close(self) -> None:
        """Nobody finds the ring any more; who has found it keeps it."""
        self._is_possible = False
        self._drop()

    def _drop(self) -> None:
        self._ring = None
        if self._membership is not None:
            self._membership.leave()

    def _ring_for(self, clients: Mapping[str, str]) -> RowRing | None:
        """The ring, which those who came lately find, too."""
        if clients is not self._known:
            self._known = clients
            if self._membership is not None and not self._membership.is_there:
                self._drop()  # the system has taken it away
        if self._ring is None:
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
                "rows", name, lambda file: rings.append(RowRing(file, size))
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
