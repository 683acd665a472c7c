"""What a pool takes along when it moves to other shards: adapters, counters, dead letters.

Every worker brings it, again and again for a while; each thing is taken over once. What is set
aside in the old shard stays there until the new one has it, so that a worker may die in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import redis.exceptions

from lmpool.commands import Entry, Fields, Server, Value
from lmpool.errors import WireError
from lmpool.keys import COUNTERS_TTL_MS, PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.scripts import script
from lmpool.server import get_string
from lmpool.servers import Servers
from lmpool.worker.dead_letters import DEAD_MOST
from lmpool.worker.membership import OLD_KEYS_MS, lasting_keys
from lmpool.worker.result_store import ResultStore

T = TypeVar("T")

AT_ONCE: Final = 100
"""Dead letters that travel together."""
REMEMBERED_MS: Final = OLD_KEYS_MS
"""How long it is known what was taken over: as long as there may be something to bring."""


def without(shards: Sequence[ShardKeys], others: Sequence[ShardKeys]) -> list[ShardKeys]:
    """The shards whose keys are not those of `others`."""
    known = {shard.prefix for shard in others}
    return [shard for shard in shards if shard.prefix not in known]


# --- adapters ----------------------------------------------------------------------------------


def enter(
    servers: Servers, keys: PoolKeys, info: ModelInfo, before: Sequence[ShardKeys] = ()
) -> bool:
    """Give the shards of `info` the registry of adapters, as it is where the pool lay before, and
    what was changed there since it was last brought. Of one without a layout that is `before`.

    A shard that was away, or has lost its data, has it as the others of its layout. False, and
    nothing is done, once the pool lies elsewhere: who has yet to see that calls no shard by a
    former name. Raises redis-py's exceptions, where shards fail apart only what is no loss, or if
    it cannot be said where the pool lies.
    """
    held = get_string(servers.for_key(keys.info), keys.info)
    with suppress(WireError):
        if ModelInfo.unpack(held or b"").follows(info):
            return False
    heirs = info.shard_keys(keys)
    if info.layout:
        source = _source(servers, keys, info)
        if source is None and any(layout.shards == info.shards for layout in info.layouts):
            # The pool is back where it was: what is changed there from now on counts.
            source = _Source(heirs, None)
        came = set() if source is None else {shard.prefix for shard in source.shards}
        in_it = [heir for heir in heirs if _name(servers, heir) == info.layout]
        sister = _sister(servers, in_it, info.layout) if len(in_it) < len(heirs) else None
    else:
        source = _registry(servers, before or heirs)
        came, in_it, sister = set(), [], None
    for heir in heirs:
        if sister is not None and heir not in in_it:
            give = partial(_enter_too, heir, info.layout, sister)
        elif source is not None:
            registry = None if heir.prefix in came else source.registry
            give = partial(_enter, heir, info.layout, registry)
        else:
            continue
        if servers.apart([heir], give):
            servers.settle(servers.for_shard(heir))
    return True


class _Sister(NamedTuple):
    """What a shard knows that is in the layout."""

    registry: Fields
    brought: Fields
    known_for: int
    """What was brought last, if that is known still, and for how many ms."""


def _sister(servers: Servers, shards: Sequence[ShardKeys], layout: str) -> _Sister | None:
    """What one of these shards knows, which all are in a layout: one that has adapters if any has,
    as a registry that something else damaged begins anew."""

    def read(shard: ShardKeys, server: Server) -> _Sister | None:
        name, registry = _look(shard, server)
        if name != layout or registry is None:
            return None
        brought = _unless_damaged(lambda: server.hgetall(shard.brought))
        return _Sister(registry, brought or {}, server.pttl(shard.brought) if brought else 0)

    best = None
    for shard in shards:
        found = servers.apart([shard], partial(read, shard))
        if found is not None and found.registry:
            return found
        best = best or found
    return best


class _Source(NamedTuple):
    shards: Sequence[ShardKeys]
    registry: Fields | None
    """That each of them has; None where nobody can say."""


def _source(servers: Servers, keys: PoolKeys, info: ModelInfo) -> _Source | None:
    """Where the pool was last, as far as any worker came there; where it is if it never was
    elsewhere. None where nobody can say."""
    for layout in reversed(info.layouts):
        shards = keys.shards(info.fingerprint8, layout.shards)
        names = [layout.name]
        if layout.shards == info.shards:
            names.append(info.layout)  # of whoever came back first
        found = _registry(servers, shards, names)
        if found is None or found.shards:
            return found
    return _Source(info.shard_keys(keys), None)


def _registry(
    servers: Servers, shards: Sequence[ShardKeys], layouts: Collection[str] = ()
) -> _Source | None:
    """These shards and their registry; no shards where the pool did not lie there under one of
    these names, if it is to. Else that of one that has adapters if any has: a node may have lost
    its data. None where all of them are away."""
    best: _Source | None = None
    for shard in shards:
        found = servers.apart([shard], partial(_look, shard))
        if found is None:
            continue
        name, registry = found
        was_there = not layouts or name in layouts
        if was_there and registry is not None and (layouts or registry):
            return _Source(shards, registry)
        if best is None or (was_there and best.registry is None):
            best = _Source(shards if was_there else (), registry if was_there else None)
    return best


def _look(shard: ShardKeys, server: Server) -> tuple[str | None, Fields | None]:
    """The name of the layout in which the pool is there, None where nothing shows that it was, and
    the registry, None where something else has damaged it."""
    registry = _unless_damaged(lambda: server.hgetall(shard.adapters))
    name = _unless_damaged(lambda: server.hget(shard.bounds, "layout"))
    if name is None:
        # Bounds that have ended may have been written again, but not by a worker that serves.
        served = _unless_damaged(lambda: server.hget(shard.bounds, "backlog"))
        return ("" if served or registry else None), registry
    return name.decode("utf-8", "replace"), registry


def _name(servers: Servers, shard: ShardKeys) -> str | None:
    """The layout by whose name a shard goes; None for none, or one that is away."""

    def read(server: Server) -> bytes | None:
        return _unless_damaged(lambda: server.hget(shard.bounds, "layout"))

    found = servers.apart([shard], read)
    return None if found is None else found.decode("utf-8", "replace")


def _unless_damaged(read: Callable[[], T]) -> T | None:
    """What it reads; None where the key has another type."""
    try:
        return read()
    except redis.exceptions.ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        return None


def _enter(
    heir: ShardKeys, layout: str, registry: Mapping[bytes, bytes] | None, server: Server
) -> bool:
    arguments: list[Value] = [layout, int(registry is not None), OLD_KEYS_MS, COUNTERS_TTL_MS]
    for pair in (registry or {}).items():
        arguments += pair
    keys = [heir.adapters, heir.brought, heir.bounds, heir.workers]
    return bool(script("enter")(server, keys, arguments))


def _enter_too(heir: ShardKeys, layout: str, sister: _Sister, server: Server) -> bool:
    known = _listed(sister.registry), _listed(sister.brought)
    arguments = [layout, COUNTERS_TTL_MS, sister.known_for, *known[0], *known[1]]
    return bool(script("enter_too")(server, [heir.adapters, heir.brought, heir.bounds], arguments))


# --- counters and dead letters -----------------------------------------------------------------


class _Parted(NamedTuple):
    """What a shard that the pool has left says of itself."""

    is_left: bool
    is_served: bool
    heir: ShardKeys
    name: bytes
    """Of the counters that were set aside; b"" for none."""
    counted: Fields


def carry_over(
    servers: Servers,
    shard: ShardKeys,
    info: ModelInfo,
    heirs: Sequence[ShardKeys],
    *,
    empty: bool = False,
) -> Sequence[ShardKeys] | None:
    """Give the heirs the counters and dead letters of a shard that the pool has left. Once nobody
    is served there have its keys end, free its results, and with `empty` drop its jobs. Of one that
    the pool is back in they are given what was set aside before.

    Returns those that were given anything: what they were called by whoever parted first, maybe
    shards that the pool has left, too. None where one is away, for the next time. Raises redis-py's
    exceptions as `Servers.apart` does.
    """
    left = [layout.name for layout in info.layouts] if info.layout else [""]
    if not without([shard], heirs):
        left = []  # also while it goes by a former name
    heir = heirs[shard.number % len(heirs)]
    found = servers.apart([shard], partial(_part, shard, heir, left, b"", True, empty))
    if found is None:
        return None
    if not found:
        return ()  # the pool is back, and has it all
    (parted,) = found
    if not parted.is_served:
        store = ResultStore(servers, [shard], None)
        if servers.apart([shard], partial(_free, shard, store)) is None:
            return None
    heir, name, counted, start = parted.heir, parted.name, parted.counted, "-"
    given: Sequence[ShardKeys] = ()
    while True:
        letters: list[Entry] | None = []
        if parted.is_left:
            letters = servers.apart([shard], partial(_letters, shard, start))
        if letters is None:
            return None
        if not (name or letters):
            return given
        give = partial(_inherit, heir, whose=shard, name=name, counted=counted, letters=letters)
        if servers.apart([heir], give) is None:
            return None
        given = (heir,)
        servers.settle(servers.for_shard(heir))
        if name:
            counted_it = partial(_part, shard, heir, left, name, False, False)
            if servers.apart([shard], counted_it) is None:
                return None
        if letters:
            drop = partial(_drop, shard, [entry for entry, _ in letters])
            if servers.apart([shard], drop) is None:
                return None
        name, counted = b"", {}
        if len(letters) < AT_ONCE:
            return given
        start = f"({letters[-1][0].decode()}"


def end_lanes(servers: Servers, wide: ShardKeys, now: ShardKeys, *, empty: bool = False) -> bool:
    """Have the streams end that a shard has no more, and with `empty` their jobs. False where it is
    away."""
    keys = [key for key in lasting_keys(wide) if key not in lasting_keys(now)]

    def narrow(server: Server) -> Any:
        return script("narrow")(server, [now.bounds, *keys], [OLD_KEYS_MS, int(empty)])

    return servers.apart([now], narrow) is not None


def _free(shard: ShardKeys, store: ResultStore, server: Server) -> bool:
    store.free(shard)
    return True


def _letters(shard: ShardKeys, start: str, server: Server) -> list[Entry]:
    return server.xrange(shard.dead, start, "+", AT_ONCE)


def _drop(shard: ShardKeys, entries: Sequence[bytes], server: Server) -> int:
    return server.xdel(shard.dead, *entries)


def _part(
    shard: ShardKeys,
    heir: ShardKeys,
    left: Sequence[str],
    counted: bytes,
    end: bool,
    empty: bool,
    server: Server,
) -> list[_Parted]:
    """Set the counters of a shard aside that are not yet, and forget those `counted` elsewhere.
    Nothing of a shard that the pool has not left."""
    lasting = lasting_keys(shard) if end else ()
    keys = [shard.parted, shard.counters, shard.workers, shard.bounds, *lasting]
    emptied = len(shard.streams) if empty else 0
    arguments: list[Value] = [
        counted,
        secrets.token_hex(8),
        OLD_KEYS_MS,
        emptied,
        heir.prefix,
        *left,
    ]
    found = script("part")(server, keys, arguments)
    if not found:
        return []
    served, prefix, *values = found
    fields = dict(zip(values[::2], values[1::2], strict=True))
    name = fields.pop(b"", b"")
    return [_Parted(served < 2, served > 0, ShardKeys(prefix.decode()), name, fields)]


def _inherit(
    heir: ShardKeys,
    server: Server,
    *,
    whose: ShardKeys,
    name: bytes,
    counted: Mapping[bytes, bytes],
    letters: Sequence[Entry],
) -> bool:
    arguments: list[Value] = [REMEMBERED_MS, COUNTERS_TTL_MS, DEAD_MOST, name, *_listed(counted)]
    for entry, fields in letters:
        given_up = entry.partition(b"-")[0]  # its id there; where it comes to lie it gets another
        known = {b"given_up_ms": given_up, **fields}
        arguments += (f"{whose.prefix}/{entry.decode()}", *_listed(known))
    script("inherit")(server, [heir.inherited, heir.counters, heir.dead], arguments)
    return True


def _listed(found: Mapping[bytes, bytes]) -> list[Value]:
    """How many there are, then each name with what it has."""
    return [len(found), *(value for pair in found.items() for value in pair)]
