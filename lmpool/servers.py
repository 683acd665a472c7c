"""From a shard to the server that holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import redis.exceptions

from lmpool.commands import Server
from lmpool.keys import ShardKeys
from lmpool.server import open_server


class Servers:
    """One thread's connections to the servers of a pool; each connects at its first command.

    `for_shard` is the only way from a shard to a connection: today every shard lies on one server.
    """

    def __init__(self, open_one: Callable[[], Server]) -> None:
        self._server = open_one()
        self._is_cut = False

    @classmethod
    def of_url(
        cls, url: str, *, blocks_for: float = 0.0, name: str = "lmpool", bounded: bool = False
    ) -> Servers:
        """Those of `url`; see `open_server`."""
        return cls(lambda: open_server(url, blocks_for=blocks_for, name=name, bounded=bounded))

    @property
    def pool(self) -> Server:
        """Where the keys lie that belong to the pool and to no shard."""
        return self._server if not self._is_cut else _no_server()

    def for_shard(self, shard: ShardKeys) -> Server:
        """Where a shard lies."""
        return self._server if not self._is_cut else _no_server()

    def by_connection(self, shards: Sequence[ShardKeys]) -> list[tuple[Server, list[ShardKeys]]]:
        """The shards that one blocking read covers, by the connection that it uses."""
        found: dict[int, tuple[Server, list[ShardKeys]]] = {}
        for shard in shards:
            server = self.for_shard(shard)
            found.setdefault(id(server), (server, []))[1].append(shard)
        return list(found.values())

    def cut(self) -> None:
        """End reads that may be blocked on connections that will never answer, and connect no more.

        Whoever reads gets an error, of redis-py or of what it stumbles over.
        """
        self._is_cut = True
        self._server.connection_pool.disconnect()

    def close(self) -> None:
        """Close every connection."""
        self._server.close()
        self._server.connection_pool.disconnect()


def _no_server() -> NoReturn:
    raise redis.exceptions.ConnectionError("the connection was cut")
