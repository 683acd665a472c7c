"""Connections to the primary of the moment, as Sentinels name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.connection import Connection, ConnectionPool
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelConnectionPoolProxy

from lmpool.address import Address


class PrimaryPool(SentinelConnectionPool):
    """redis-py's, which gives back what never found its primary, and says where it found another.

    redis-py forgets such a connection but goes on counting it: where one is all that there may be,
    a single answer of no Sentinel would be "Too many connections" for ever.
    """

    def __init__(self, service: str, sentinels: Sentinel, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]
        self.proxy = _Proxy(  # type: ignore[no-untyped-call]
            connection_pool=self,
            is_master=True,
            check_connection=self.check_connection,
            service_name=service,
            sentinel_manager=sentinels,
        )
        self.connection_kwargs["connection_pool"] = self.proxy
        self.on_move: Callable[[Address], None] = lambda address: None
        """Told of the primary that the Sentinels name in another's place, whoever asked them."""

    def owns_connection(self, connection: Connection) -> bool:
        return bool(ConnectionPool.owns_connection(self, connection))

    def release(self, connection: Connection) -> None:
        if (connection.host, connection.port) != self.master_address:
            connection.disconnect()  # the next command asks the Sentinels
        super().release(connection)

    def disconnect(self, inuse_connections: bool = True) -> None:
        """End the connections, all or those that are idle; with all of them those to the Sentinels,
        which redis-py leaves open. For the thread that asks these."""
        super().disconnect(inuse_connections)
        if inuse_connections:  # else it is redis-py, in the midst of asking them
            for sentinel in self.sentinel_manager.sentinels:
                sentinel.connection_pool.disconnect()

    def knows(self, address: Address) -> bool:
        """Take `address` for the primary's; whether it was taken for it already."""
        known: bool = self.proxy.master_address == address
        self.proxy.master_address = address
        return known


class _Proxy(SentinelConnectionPoolProxy):
    """What connections ask for the primary."""

    def get_master_address(self) -> Address:
        former = self.master_address
        found: Address = super().get_master_address()  # type: ignore[no-untyped-call]
        pool = self.connection_pool_ref()
        if former is not None and found != former and pool is not None:
            pool.on_move(found)
        return found
