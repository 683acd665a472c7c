"""Who serves a pool right now."""

from __future__ import annotations

import redis.exceptions

from lmpool.commands import Server
from lmpool.keys import GROUP, ShardKeys


def consumers(server: Server, shard: ShardKeys) -> list[str]:
    """The names of a shard's consumers, alive or not."""
    try:
        found = server.xinfo_consumers(shard.stream().key, GROUP)
    except redis.exceptions.ResponseError:
        return []  # no stream or no group yet
    return [consumer["name"].decode("utf-8", "replace") for consumer in found]


def any_alive(server: Server, shard: ShardKeys) -> bool:
    """Whether any worker of a shard has a heartbeat."""
    names = consumers(server, shard)
    return bool(names) and bool(server.exists(*(shard.alive(name) for name in names)))
