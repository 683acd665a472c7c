"""The shards and lanes of a pool: how they lie, and changing them while the pool is served.

What is changed is the model info. Each worker sees it at its next heartbeat and moves, with its
engine as it is; clients follow once workers are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgpack
import redis.exceptions

from lmpool.commands import Server, Value
from lmpool.errors import (
    NoWorkers,
    PoolMismatch,
    ServerRefused,
    SettingsError,
    UnknownPool,
)
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.liveness import LIFE_MS, living, signs_of_life
from lmpool.model_info import MAX_LANES, MAX_SHARDS, ModelInfo
from lmpool.scripts import ScriptsMissing, script
from lmpool.server import explained, get_string, greet, understood
from lmpool.server_url import mask_url, worker_command
from lmpool.servers import Servers

__all__ = ["PoolShards", "ShardView", "change", "look"]

LOOK_EVERY: Final = 0.1
"""Seconds between two looks at workers that move."""


@dataclass(frozen=True, slots=True)
class ShardView:
    """One shard of a pool."""

    number: int
    slot: int
    node: str
    """``host:port`` of its primary in a Redis Cluster; '' of one server."""
    answers: bool
    """Whether that was there; what follows counts nothing otherwise."""
    jobs: int
    """That wait or run, in all of its lanes."""
    lanes_used: int
    """Of its lanes: as many as the living workers need."""


@dataclass(frozen=True, slots=True)
class PoolShards:
    """How a pool lies."""

    pool: str
    model: str
    lanes: int
    """Of each shard."""
    layout: str
    """The name of how it lies, '' where ``lmpool shards`` has never changed that."""
    shards: tuple[ShardView, ...]
    workers: tuple[str, ...]
    """Those that are alive and serve it so."""
    behind: tuple[str, ...]
    """Those that are alive and have yet to move."""

    @property
    def is_done(self) -> bool:
        """Whether workers serve it so, and none has yet to move."""
        return bool(self.workers) and not self.behind


def look(url: str, pool: str) -> PoolShards:
    """How the pool lies now. Raises `UnknownPool`, `WireError` for what another lmpool wrote, and
    `ServerError`."""
    with _servers(url) as servers, understood(url):
        _, info = _read(servers, PoolKeys(pool), url)
        return _look(servers, PoolKeys(pool), info)


def change(
    url: str,
    pool: str,
    shards: int | None = None,
    lanes: int | None = None,
    *,
    wait: float = 30.0,
    watch: Callable[[PoolShards], None] = lambda found: None,
) -> PoolShards:
    """Give the pool so many shards, of so many lanes each, and wait up to `wait` seconds until all
    of its workers have moved: `watch` is told after each look.

    What is None stays. Nothing is lost; jobs that run at the change may run once more, and rows of
    before are computed again where the number of shards changes. Raises `SettingsError` for numbers
    that cannot be, `UnknownPool`, `NoWorkers` where nobody could move, `PoolMismatch` where another
    changed the pool at the same moment, and `ServerError`.
    """
    for name, given, most in (("shards", shards, MAX_SHARDS), ("lanes", lanes, MAX_LANES)):
        if given is not None and (type(given) is not int or not 1 <= given <= most):
            raise SettingsError(f"{name}={given!r}: write a whole number from 1 to {most}")
    keys = PoolKeys(pool)
    with _servers(url) as servers, explained(url):
        packed, info = _read(servers, keys, url)
        if not signs_of_life(servers.for_key(keys.serving), [keys.serving])[0]:
            raise NoWorkers(
                f"pool {pool!r} has no worker alive that could move: start one with "
                f"{worker_command(url, pool)}, then write lmpool shards again"
            )
        wanted = (shards or info.shards, lanes or info.lanes)
        if wanted != (info.shards, info.lanes):
            info = info.moved_to(*wanted)
            _write(servers, keys, packed, info, url)
        until = time.monotonic() + wait
        while True:
            found = _look(servers, keys, info)
            now = _read(servers, keys, url)[1]
            if now.follows(info):
                raise _changed(keys, now)
            watch(found)
            if found.is_done or time.monotonic() >= until:
                return found
            time.sleep(LOOK_EVERY)


@contextmanager
def _servers(url: str) -> Iterator[Servers]:
    with closing(Servers.of_url(url, name="lmpool-shards")) as servers:
        with understood(url):
            greet(servers.anywhere, url)
        yield servers


def _read(servers: Servers, keys: PoolKeys, url: str) -> tuple[bytes, ModelInfo]:
    """What the pool serves, as it is written, and what that says."""
    packed = get_string(servers.for_key(keys.info), keys.info)
    if packed is None:
        raise UnknownPool(
            f"no pool {keys.pool!r} on {mask_url(url)}: start a worker with "
            f"{worker_command(url, keys.pool)}, or check the name"
        )
    return packed, ModelInfo.unpack(packed)


def _write(servers: Servers, keys: PoolKeys, held: bytes, info: ModelInfo, url: str) -> None:
    """Have the pool served so, if it is still served as it was `held`."""
    server = servers.for_key(keys.info)
    serving = get_string(server, keys.serving) or b""
    arguments: list[Value] = [held, info.pack(), serving, info.mark(), LIFE_MS]
    try:
        if not script("replace")(server, [keys.info, keys.serving], arguments):
            raise _changed(keys, _read(servers, keys, url)[1])
    except (redis.exceptions.NoPermissionError, ScriptsMissing):
        raise ServerRefused(
            f"{mask_url(url)} does not let this user change a pool: use a URL with the user "
            "operator (deploy/redis/users.acl)"
        ) from None
    servers.settle(server)


def _changed(keys: PoolKeys, now: ModelInfo) -> PoolMismatch:
    return PoolMismatch(
        f"pool {keys.pool!r} was changed by another at the same moment and has "
        f"{now.in_words()} now: write the command again if that is not what you want"
    )


def _look(servers: Servers, keys: PoolKeys, info: ModelInfo) -> PoolShards:
    shards = info.shard_keys(keys)
    there: set[str] = set()
    alive: set[str] = set()
    # Who moves is in both for a moment: looked for in this order nobody is missed.
    for shard in (*info.left_shards(keys), *shards):
        for name, layout in servers.apart([shard], partial(_beats, shard)) or ():
            alive.add(name)
            if layout == info.layout:
                there.add(name)
    views = []
    for shard in shards:
        found = servers.apart([shard], partial(_of_shard, shard))
        jobs, used = found or (0, 0)
        place = servers.place(shard)
        views.append(ShardView(shard.number, shard.slot, place, found is not None, jobs, used))
    return PoolShards(
        keys.pool,
        info.model,
        info.lanes,
        info.layout,
        tuple(views),
        tuple(sorted(there)),
        tuple(sorted(alive - there)),
    )


def _of_shard(shard: ShardKeys, server: Server) -> tuple[int, int]:
    """The jobs of a shard, and how many of its lanes are in use."""
    with server.pipeline(transaction=False) as pipeline:
        for stream in shard.streams:
            pipeline.xlen(stream.key)
        lengths = pipeline.execute(raise_on_error=False)
    used = server.hget(shard.bounds, "used") or b"1"
    jobs = sum(length for length in lengths if isinstance(length, int))
    return jobs, min(shard.lanes, int(used) if used.isdigit() else 1)


def _beats(shard: ShardKeys, server: Server) -> list[tuple[str, str]]:
    """The workers that beat in a shard, and the layout that each of them serves."""
    names = living(server, shard)
    packed = server.mget([shard.alive(name) for name in names]) if names else []
    beats = zip(names, packed, strict=True)
    return [(name, _layout(beat)) for name, beat in beats if beat is not None]


def _layout(beat: bytes) -> str:
    try:
        said: Any = msgpack.unpackb(beat).get("layout", "")
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
        return ""
    return said if isinstance(said, str) else ""
