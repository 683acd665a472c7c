"""What a pool takes along when it moves to other shards: adapters, counters, dead letters.

Every worker brings it, again and again for a while; each thing is taken over once. What is set
aside in the old shard stays there until the new one has it, so that a worker may die in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from lmpool.commands import Entry, Fields, Server, Value
from lmpool.errors import WireError
from lmpool.keys import COUNTERS_TTL_MS, PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.registry import REMOVED_MS, Change
from lmpool.scripts import script
from lmpool.server import get_string, is_wrong_type
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
    """Give the shards of `info` what was done last with each adapter, wherever the pool lay: in any
    of its layouts, and in the shards `before`. Whoever changes one meanwhile is not undone.

    False, and nothing is done, once the pool lies elsewhere: who has yet to see that calls no shard
    by a former name. Raises redis-py's exceptions, where shards fail apart only what is no loss, or
    if it cannot be said where the pool lies.
    """
    held = get_string(servers.for_key(keys.info), keys.info)
    with suppress(WireError):
        if ModelInfo.unpack(held or b"").follows(info):
            return False
    heirs = info.shard_keys(keys)
    former = [*before]
    for layout in info.layouts:
        former += without(keys.shards(info.fingerprint8, layout.shards), former)
    names = {"", info.layout, *(layout.name for layout in info.layouts)}
    found: dict[str, _Found] = {}
    anew: set[str] = set()
    """Shards, by prefix, in which the pool was at another time."""
    registry: dict[bytes, Change] = {}
    for shard in (*former, *without(heirs, former)):
        there = servers.apart([shard], partial(_look, shard))
        if there is None:
            continue
        if info.layout and there.name not in names and shard not in before:
            anew.add(shard.prefix)
            there = there._replace(was_there=False, registry={})
        found[shard.prefix] = there
        for name, entry in (there.registry or {}).items():
            change = Change.parse(entry)
            registry[name] = max(change, registry.get(name, change))
    if info.layout and not _knows(found, former, heirs, info.layout):
        return True  # nobody can say what was registered
    for heir in heirs:
        there = found.get(heir.prefix)
        if there is None:
            continue
        has = there.registry or {}
        lacking = {
            name: change.pack()
            for name, change in registry.items()
            if name not in has or Change.parse(has[name]) < change
        }
        is_in = info.layout == there.name != "" and there.registry is not None
        if is_in and not lacking:
            continue
        give = partial(_enter, heir, info.layout, heir.prefix in anew, lacking)
        if servers.apart([heir], give):
            servers.settle(servers.for_shard(heir))
    return True


class _Found(NamedTuple):
    """What a shard says of itself."""

    name: str
    """Of the layout in which the pool is there; '' for none."""
    was_there: bool
    """Whether anything shows that the pool was."""
    registry: Fields | None
    """None where something else has damaged it."""


def _look(shard: ShardKeys, server: Server) -> _Found:
    with server.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(shard.adapters)
        pipeline.hget(shard.bounds, "layout")
        # Bounds that have ended may have been written again, but not by a worker that serves.
        pipeline.hget(shard.bounds, "backlog")
        answers = pipeline.execute(raise_on_error=False)
    registry, name, served = (_unless_damaged(answer) for answer in answers)
    called = (name or b"").decode("utf-8", "replace")
    return _Found(called, bool(called or served or registry), registry)


def _knows(
    found: Mapping[str, _Found],
    former: Sequence[ShardKeys],
    heirs: Sequence[ShardKeys],
    layout: str,
) -> bool:
    """Whether any shard has what was registered, or none can have: then all of them say so."""
    if any(heir.prefix in found and found[heir.prefix].name == layout for heir in heirs):
        return True
    answers = [found.get(shard.prefix) for shard in former]
    return None not in answers or any(each is not None and each.was_there for each in answers)


def _unless_damaged(answer: Any) -> Any:
    """What was answered; None where the key has another type."""
    if isinstance(answer, Exception):
        if not is_wrong_type(answer):
            raise answer
        return None
    return answer


def _enter(
    heir: ShardKeys, layout: str, anew: bool, changes: Mapping[bytes, bytes], server: Server
) -> bool:
    arguments: list[Value] = [REMOVED_MS, *_listed(changes)]
    arguments += (layout, int(anew), COUNTERS_TTL_MS)
    keys = [heir.adapters, heir.bounds, heir.workers]
    return bool(script("enter")(server, keys, arguments))


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
        # Where it comes to lie it gets another id.
        known = {b"came_from": f"{whose.dead}/{entry.decode()}".encode(), **fields}
        arguments += (f"{whose.prefix}/{entry.decode()}", *_listed(known))
    script("inherit")(server, [heir.inherited, heir.counters, heir.dead], arguments)
    return True


def _listed(found: Mapping[bytes, bytes]) -> list[Value]:
    """How many there are, then each name with what it has."""
    return [len(found), *(value for pair in found.items() for value in pair)]
