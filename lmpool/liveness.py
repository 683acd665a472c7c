"""Who serves a pool right now."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import redis.exceptions

from lmpool.commands import Server
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.server import is_lost
from lmpool.servers import Servers

LIFE_MS: Final = 5000
"""How long a worker counts as alive after its last sign of life."""
BEAT_MS: Final = LIFE_MS // 3
"""How often a worker gives a sign of life."""
GAP_MS: Final = LIFE_MS // 2
"""How long a shard goes, at most, without a sign of life of any worker: beyond that its server was
away. Across a shorter gap no living worker's ends, as `BEAT_MS` + `GAP_MS` < `LIFE_MS`."""


def consumers(server: Server, shard: ShardKeys) -> list[str]:
    """The names of a shard's consumers, alive or not. Raises redis-py's exceptions, also of who may
    not know."""
    try:
        found = server.xinfo_consumers(shard.stream().key, GROUP)
    except redis.exceptions.ResponseError as error:
        if is_lost(error) or isinstance(error, redis.exceptions.NoPermissionError):
            raise
        return []  # no stream or no group yet
    return [consumer["name"].decode("utf-8", "replace") for consumer in found]


def signs_of_life(server: Server, keys: Sequence[str]) -> list[bool]:
    """Which of these keys a living worker renewed within `LIFE_MS`.

    One that ends later than that was set before the server's clock was set back, and one that never
    ends was brought back by what restores keys without their lives: if its worker lives, it is
    right again at the next beat.
    """
    with server.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.pttl(key)
        return [0 <= left <= LIFE_MS for left in pipeline.execute()]


def living(server: Server, shard: ShardKeys) -> list[str]:
    """The names of a shard's consumers that have a heartbeat."""
    names = consumers(server, shard)
    if not names:
        return []
    beats = signs_of_life(server, [shard.alive(name) for name in names])
    return [name for name, beats_on in zip(names, beats, strict=True) if beats_on]


def any_alive(server: Server, shard: ShardKeys) -> bool:
    """Whether any worker of a shard has a heartbeat."""
    return bool(living(server, shard))


def are_in(servers: Servers, shards: Sequence[ShardKeys]) -> bool:
    """Whether any worker is in each of these shards, of those that answer."""
    return all(servers.apart([s], partial(any_alive, shard=s)) is not False for s in shards)


def as_served(
    servers: Servers, keys: PoolKeys, info: ModelInfo, known: ModelInfo | None = None
) -> ModelInfo:
    """What a pool serves, laid as its workers have it: while none has come to where it lies now,
    they and all that is registered are where it lay before, which may be where it is `known`.

    Where nobody is anywhere it stays `known`: who comes back may be there. Raises redis-py's
    exceptions as `Servers.apart` does.
    """
    before = [*info.former(), *filter(None, [known])]
    for laid in (info, *before) if before else ():
        if are_in(servers, laid.shard_keys(keys)):
            return laid
    return info if known is None else known
