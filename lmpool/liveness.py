"""Who serves a pool right now."""

from __future__ import annotations

import redis

from lmpool.commands import Server
from lmpool.keys import GROUP, LaneKeys


def consumers(server: Server, lane: LaneKeys) -> list[str]:
    """The names of a lane's consumers, alive or not."""
    try:
        found = server.xinfo_consumers(lane.jobs, GROUP)
    except redis.exceptions.ResponseError:
        return []  # no stream or no group yet
    return [consumer["name"].decode() for consumer in found]


def any_alive(server: Server, lane: LaneKeys) -> bool:
    """Whether any worker of a lane has a heartbeat."""
    names = consumers(server, lane)
    return bool(names) and bool(server.exists(*(lane.alive(name) for name in names)))
