"""What a pool takes along when it moves to other shards: adapters, counters, dead letters.

Every worker brings it, again and again for a while; each thing is taken over once. What is set
aside in the old shard stays there until the new one has it, so that a worker may die in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from lmpool.commands import Entry, Fields, Server, Value
from lmpool.keys import COUNTERS_TTL_MS, ShardKeys
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.worker.dead_letters import DEAD_MOST
from lmpool.worker.membership import OLD_KEYS_MS, lasting_keys

AT_ONCE: Final = 100
"""Dead letters that travel together."""
REMEMBERED_MS: Final = 3_600_000
"""How long it is known what was taken over. Whoever brings it again does so within seconds."""


def without(shards: Sequence[ShardKeys], others: Sequence[ShardKeys]) -> list[ShardKeys]:
    """The shards whose keys are not those of `others`."""
    known = {shard.prefix for shard in others}
    return [shard for shard in shards if shard.prefix not in known]


def carry_adapters(
    servers: Servers, former: Sequence[ShardKeys], heirs: Sequence[ShardKeys], moves: int
) -> None:
    """Give each heir the registry, the first time that it is brought in this move of the pool.

    Raises redis-py's exceptions, where shards fail apart only what is no loss.
    """
    registry = None
    for shard in former:
        registry = servers.apart([shard], partial(_registry, shard))
        if registry is not None:
            break
    if not registry:
        return
    for heir in without(heirs, former):
        give = partial(_inherit, heir, moves=moves, registry=registry)
        if servers.apart([heir], give) is not None:
            servers.settle(servers.for_shard(heir))


def register_again(
    servers: Servers, heirs: Sequence[ShardKeys], latest: Mapping[str, str | None]
) -> None:
    """Have the heirs' registries as this worker left it where it was: None for what is removed."""

    def write(shard: ShardKeys, server: Server) -> None:
        for name, entry in latest.items():
            if entry is None:
                server.hdel(shard.adapters, name)
            else:
                server.hset(shard.adapters, name, entry)

    for heir in heirs if latest else ():
        servers.apart([heir], partial(write, heir))


def carry_over(
    servers: Servers,
    former: Sequence[ShardKeys],
    heirs: Sequence[ShardKeys],
    *,
    end: bool = False,
    empty: bool = False,
) -> None:
    """Give the heirs the counters and dead letters of shards that the pool has left. With `end`
    have the keys end of those that nobody serves, with `empty` their jobs at once.

    What is away is left for the next time. Raises redis-py's exceptions as `Servers.apart` does.
    """
    for shard in without(former, heirs):
        heir = heirs[shard.number % len(heirs)]
        counted = servers.apart([shard], partial(_part, shard, b"", end, empty)) or {}
        name = counted.pop(b"", b"")
        start = "-"
        while True:
            letters = servers.apart([shard], partial(_letters, shard, start)) or []
            if not (name or letters):
                break
            give = partial(_inherit, heir, whose=shard, name=name, counted=counted, letters=letters)
            if servers.apart([heir], give) is None:
                return
            servers.settle(servers.for_shard(heir))
            if name:
                servers.apart([shard], partial(_part, shard, name, False, False))
            if letters:
                drop = partial(_drop, shard, [entry for entry, _ in letters])
                if servers.apart([shard], drop) is None:
                    return
            name, counted = b"", {}
            if len(letters) < AT_ONCE:
                break
            start = f"({letters[-1][0].decode()}"


def _registry(shard: ShardKeys, server: Server) -> Fields:
    return server.hgetall(shard.adapters)


def _letters(shard: ShardKeys, start: str, server: Server) -> list[Entry]:
    return server.xrange(shard.dead, start, "+", AT_ONCE)


def _drop(shard: ShardKeys, entries: Sequence[bytes], server: Server) -> int:
    return server.xdel(shard.dead, *entries)


def _part(shard: ShardKeys, counted: bytes, end: bool, empty: bool, server: Server) -> Fields:
    """Set the counters of a shard aside that are not yet, and forget those `counted` elsewhere."""
    lasting = lasting_keys(shard) if end else ()
    keys = [shard.parted, shard.counters, shard.workers, *lasting]
    emptied = len(shard.streams) if empty else 0
    found = script("part")(server, keys, [counted, secrets.token_hex(8), OLD_KEYS_MS, emptied])
    return dict(zip(found[::2], found[1::2], strict=True))


def _inherit(
    heir: ShardKeys,
    server: Server,
    *,
    moves: int = -1,
    registry: Mapping[bytes, bytes] | None = None,
    whose: ShardKeys | None = None,
    name: bytes = b"",
    counted: Mapping[bytes, bytes] | None = None,
    letters: Sequence[Entry] = (),
) -> bool:
    arguments: list[Value] = [REMEMBERED_MS, COUNTERS_TTL_MS, DEAD_MOST, moves]
    arguments += _listed(registry or {})
    arguments += (name, *_listed(counted or {}))
    for entry, fields in letters:
        assert whose is not None
        given_up = entry.partition(b"-")[0]  # its id there; where it comes to lie it gets another
        known = {b"given_up_ms": given_up, **fields}
        arguments += (f"{whose.prefix}/{entry.decode()}", *_listed(known))
    script("inherit")(server, _keys(heir), arguments)
    return True


def _listed(found: Mapping[bytes, bytes]) -> list[Value]:
    """How many there are, then each name with what it has."""
    return [len(found), *(value for pair in found.items() for value in pair)]


def _keys(heir: ShardKeys) -> list[str]:
    return [heir.inherited, heir.counters, heir.dead, heir.adapters, heir.bounds]
