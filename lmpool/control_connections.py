"""Connections to the queues of control jobs, for asyncio: arq speaks through them, on both sides.

arq knows no Redis Cluster. All that it reads and writes of a pool lies under one hash tag there,
`PoolKeys.tag`, and a connection goes to whichever node serves that now: one that is refused or
hears nothing is ended, and made anew to the node that the slot map names then.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from redis.asyncio.connection import Connection, ConnectionPool, DefaultParser, SSLConnection
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from lmpool.address import Cluster, Sentinels, is_cluster, is_sentinel, to_sentinels
from lmpool.cluster import SlotErrors, SlotListener, SlotLost, slot_map
from lmpool.keys import PoolKeys

ANSWER_WITHIN: Final = 5.0
"""Seconds after which a command is given up."""
NODE_ANSWERS_WITHIN: Final = 2.0
"""The same on a cluster, where another node soon serves what one that hangs does."""
WITHDRAWN: Final = b""
"""What a control job has in place of a result once it was taken back."""


def control_pool(url: str, keys: PoolKeys) -> ConnectionPool:
    """Connections for the control jobs of a pool, to the server that is meant by `url`."""
    within = NODE_ANSWERS_WITHIN if is_cluster(url) else ANSWER_WITHIN
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": within,
        "socket_connect_timeout": within,
    }
    if is_cluster(url):
        nodes = Cluster.parse(url)
        return ConnectionPool(
            connection_class=_TLSToOwner if nodes.tls else _ToOwner,
            parser_class=_Parser,
            slots=slot_map(url),
            slot=keys.control_slot,
            **{**nodes.options, **options},
        )
    if is_sentinel(url):
        known = Sentinels.parse(url)
        sentinel = Sentinel(known.hosts, sentinel_kwargs=to_sentinels(known))
        given = {**known.options, **known.tls_options, **options}
        return _PrimaryPool(known.service, sentinel, **given)  # type: ignore[no-untyped-call]
    return ConnectionPool.from_url(url, **options)


class _PrimaryPool(SentinelConnectionPool):
    """redis-py's, but whoever ends it ends its connections to the Sentinels, too."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        try:
            await super().disconnect(inuse_connections)
        finally:
            if inuse_connections:  # else it is redis-py, in the midst of asking them
                sentinels = self.sentinel_manager.sentinels
                ends = [sentinel.connection_pool.disconnect() for sentinel in sentinels]
                await asyncio.gather(*ends, return_exceptions=True)


class _Parser(SlotErrors, DefaultParser):  # type: ignore[misc, valid-type]
    """redis-py's, to which refusals about slots are lost connections, and so is that of a node
    which is cut off from the others: another may serve by now."""

    @classmethod
    def parse_error(cls, response: str) -> Any:
        if response.startswith(("CLUSTERDOWN", "MASTERDOWN")):
            return SlotLost(response)
        return super().parse_error(response)


class _Owner(SlotListener):
    """A connection to the node that serves a slot when it is made."""

    def __init__(self, *, slot: int, **options: Any) -> None:
        self._slot = slot
        super().__init__(**options)

    async def connect(self) -> None:
        if self.is_connected:  # type: ignore[attr-defined]
            return
        # In a thread: the map may have to be asked for, of several nodes.
        self.host, self.port = await asyncio.to_thread(self._slots.owner, self._slot)
        try:
            await super().connect()  # type: ignore[misc]
        except Exception as error:
            self._hear(error)
            raise

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*args, **options)  # type: ignore[misc]
        except Exception as error:
            self._hear(error)
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except Exception as error:
            self._hear(error)
            raise


class _ToOwner(_Owner, Connection):
    """Without TLS."""


class _TLSToOwner(_Owner, SSLConnection):
    """With TLS."""
