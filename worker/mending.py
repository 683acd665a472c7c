"""Mending what is the workers' own: job streams, their bounds, dead letters, counters, registry."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import redis.exceptions

from lmpool.commands import Server
from lmpool.keys import COUNTERS_TTL_MS, GROUP, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.scripts import load_client_scripts, script
from lmpool.servers import Servers
from lmpool.worker.homes import Homes

logger = logging.getLogger(__name__)


def mend(
    servers: Servers,
    shards: Sequence[ShardKeys],
    info: ModelInfo,
    homes: Homes,
    joining: set[str],
) -> list[str]:
    """Take away what only damage can have made, and load what clients run.

    A worker that joins says how many jobs may wait, looks at all streams, and has none of them end
    any more, in the shards of these prefixes, which are taken out as it has; others keep to what is
    said, and look at those of their own lanes.

    Jobs that were passed over, as no worker has them and none will be given them, are taken off.

    Returns the keys that were taken away: streams want groups again, registries their entries. And
    the bounds of shards that have yet to come into the layout of `info`, which were away or have
    lost its name.
    """
    damaged: list[bytes] = []
    behind: list[str] = []
    loaded: set[int] = set()
    for shard in shards:

        def mend_one(server: Server, shard: ShardKeys = shard) -> None:
            joins = shard.prefix in joining
            own = (*(stream.key for stream in homes.own(shard)), *shard.calls)
            is_behind, passed, *taken = script("mend")(
                server,
                shard.groups if joins else own,
                [
                    *(shard.prefix, info.max_backlog, shard.lanes, COUNTERS_TTL_MS),
                    *(int(joins), info.layout, GROUP),
                ],
            )
            damaged.extend(taken)
            if passed:
                logger.error(
                    "%d jobs of %s had been passed over by something else that writes here: "
                    "whoever waits for them asks again",
                    *(passed, shard.prefix),
                )
            if is_behind and shard.bounds.encode() not in taken:
                behind.append(shard.bounds)
            joining.discard(shard.prefix)
            if id(server) not in loaded:
                _load(server)
                loaded.add(id(server))

        servers.apart([shard], mend_one)
    _report(damaged)
    return [*(key.decode() for key in damaged), *behind]


def _load(server: Server) -> None:
    try:
        load_client_scripts(server)
    except redis.exceptions.NoPermissionError as error:
        logger.debug("clients have to send their scripts: %s", error)


def _report(damaged: Iterable[bytes]) -> None:
    for key in damaged:
        logger.error("%s was damaged by something else that writes here: made anew", key.decode())
