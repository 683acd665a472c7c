"""Connections to the primary of the moment, as Sentinels name it."""

from __future__ import annotations

from typing import Any

from redis.connection import Connection, ConnectionPool
from redis.sentinel import Sentinel, SentinelConnectionPool


class PrimaryPool(SentinelConnectionPool):
    """redis-py's, which gives back what never found its primary.

    redis-py forgets such a connection but goes on counting it: where one is all that there may be,
    a single answer of no Sentinel would be "Too many connections" for ever.
    """

    def __init__(self, service: str, sentinels: Sentinel, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]

    def owns_connection(self, connection: Connection) -> bool:
        return bool(ConnectionPool.owns_connection(self, connection))

    def release(self, connection: Connection) -> None:
        if (connection.host, connection.port) != self.master_address:
            connection.disconnect()  # the next command asks the Sentinels
        super().release(connection)
