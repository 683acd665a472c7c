"""What is wrong with a Redis Cluster that holds a pool, from what `lmpool.inspection` read of it.

Every check of `lmpool.diagnosis` is of each node; those here are of all of them together.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lmpool.diagnosis import (
    ROWS_ENOUGH,
    Facts,
    Finding,
    check_connection,
    check_eviction,
    check_lanes,
    check_persistence,
    check_pool,
    check_server,
    check_threads,
    in_bytes,
    row_bytes,
)
from lmpool.keys import PoolKeys
from lmpool.model_info import MAX_SHARDS
from lmpool.slots import SLOTS

UNEVEN: Final = 1.34
"""Times the mean that a primary may have of a pool's shards: with more, others wait for it."""
EVEN: Final = 1.26
"""What a number of shards that is worth a change comes to at most."""
SLOW_FAILOVER: Final = 5.0
HASTY_FAILOVER: Final = 1.0
"""Seconds of ``cluster-node-timeout``: above, calls wait long; below, a pause looks like death."""
BEHIND: Final = 16 << 20
"""Bytes by which a replica may trail its primary."""
SMALL_BACKLOG: Final = 64 << 20
CLOCKS_APART: Final = 1.0
"""Seconds between the clocks of two nodes."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One node, as those say that know it, and as it was found."""

    address: str
    """``host:port``, as clients are told it."""
    primary: str = ""
    """The address of the primary that it is a replica of, or ''."""
    facts: Facts | None = None
    """None for one that does not answer, or not to this user."""
    error: str = ""
    """Why it does not."""
    refuses: bool = False
    """Whether it answers, and refuses the user."""
    is_down: bool = False
    """Whether the cluster takes it for dead."""
    state: str = ""
    """``cluster_state`` as it says; '' where this user may not ask."""
    moving: tuple[int, ...] = ()
    """Slots that it is giving away, or getting."""

    @property
    def host(self) -> str:
        """Without the port."""
        return self.address.rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What was read of a cluster and one of its pools."""

    pool: Facts
    """Of the pool; what is in it of a server is of no one node."""
    nodes: Sequence[ClusterNode]
    owners: Sequence[str | None] = field(default_factory=lambda: [None] * SLOTS)
    """The primary of each slot."""
    shards_away: Sequence[int] = ()
    """Shards of the pool that did not answer."""

    @property
    def primaries(self) -> list[ClusterNode]:
        """The nodes that slots are assigned to."""
        return [node for node in self.nodes if not node.primary]

    def setting(self, name: str) -> dict[str, list[str]]:
        """What the nodes have for a directive: value to addresses, of those that show it."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            config = None if node.facts is None else node.facts.config
            if config is not None and name in config:
                found.setdefault(config[name], []).append(node.address)
        return found

    def shards(self, count: int | None = None) -> list[str | None]:
        """The primary of each of the pool's shards, or of so many as it might have."""
        model = self.pool.model
        assert model is not None
        shards = PoolKeys(self.pool.pool).shards(model.fingerprint8, count or model.shards)
        return [self.owners[shard.slot] for shard in shards]


CHECKS_OF_A_NODE: Final = (
    check_server, check_eviction, check_persistence, check_connection, check_threads,
)  # fmt: skip


def check_nodes(found: ClusterFacts) -> Iterator[Finding]:
    """Every check of a server, of each node that answers."""
    nodes = [node for node in found.nodes if node.facts is not None]
    # Of what is alike the first is shown.
    nodes.sort(key=lambda node: statistics.median(_facts(node).latencies), reverse=True)
    for check in CHECKS_OF_A_NODE:
        groups: dict[tuple[str, str, str], tuple[Finding, list[str]]] = {}
        for node in nodes:
            # Rows are of all nodes together; that a node is a replica is what it is there for.
            facts = replace(_facts(node), model=None)
            facts = replace(facts, info={k: v for k, v in facts.info.items() if k != "role"})
            for finding in check(facts):
                alike = re.sub(r"\([^)]*\)|[\d.]+ ms", "", finding.what)
                key = finding.level, alike, finding.remedy
                groups.setdefault(key, (finding, []))[1].append(node.address)
        for finding, addresses in groups.values():
            yield replace(finding, what=f"{_named(addresses, len(nodes))}: {finding.what}")


def check_reach(found: ClusterFacts) -> Iterator[Finding]:
    """That this machine reaches the nodes, and they let it in."""
    for node in found.nodes:
        if node.facts is not None:
            continue
        kind = "replica" if node.primary else "primary"
        if node.refuses:
            yield Finding(
                "wrong",
                f"{node.address} ({kind}) refuses this user or password: {node.error}",
                "give every node the same users: after a failover nobody would get in",
            )
        elif node.is_down:
            yield Finding(
                "wrong",
                f"{node.address} ({kind}) is down: {node.error}",
                "start it again"
                + ("" if node.primary else "; a replica takes its place, where it has one in sync"),
            )
        else:
            yield Finding(
                "wrong",
                f"the cluster says that a {kind} is at {node.address}, and this machine does not "
                f"reach it there: {node.error}",
                "have nodes announce what clients reach (cluster-announce-ip and "
                "cluster-announce-port, or cluster-announce-hostname with "
                "cluster-preferred-endpoint-type hostname), or open the way to it",
            )


def check_slots(found: ClusterFacts) -> Iterator[Finding]:
    """That every slot has a primary, and none is on its way."""
    missing = sum(owner is None for owner in found.owners)
    if missing:
        yield Finding(
            "wrong",
            f"{missing:,} of {SLOTS:,} slots are assigned to no node",
            "redis-cli --cluster fix HOST:PORT",
        )
    else:
        yield Finding(
            "ok", f"all {SLOTS:,} slots are assigned, to {len(found.primaries)} primaries"
        )
    down = [node.address for node in found.nodes if node.state == "fail"]
    if down:
        yield Finding(
            "wrong",
            f"{_named(down, len(found.nodes))}: the cluster is down, as this node sees it",
            "see which nodes are down: redis-cli --cluster check HOST:PORT",
        )
    moving = {slot for node in found.nodes for slot in node.moving}
    atomic = _moves_at_once(found)
    if moving:
        here: list[int] = []
        if found.pool.model is not None:
            keys = PoolKeys(found.pool.pool)
            shards = found.pool.model.shard_keys(keys)
            here = [shard.number for shard in shards if shard.slot in moving]
        stand = (
            f"; shards {', '.join(map(str, here))} of pool {found.pool.pool} stand still meanwhile"
            if here
            else f"; none of pool {found.pool.pool}'s shards"
        )
        numbers = ", ".join(map(str, sorted(moving)[:5])) + (", ..." if len(moving) > 5 else "")
        yield Finding(
            "wrong" if here else "note",
            f"{len(moving):,} slots are on their way key by key ({numbers}){stand}",
            "let the move end, or end it: redis-cli --cluster fix HOST:PORT. "
            + (
                "Move slots by CLUSTER MIGRATESLOTS, which takes milliseconds of a shard's time"
                if atomic
                else "Valkey 9 moves them at once (CLUSTER MIGRATESLOTS)"
            ),
        )
    elif atomic:
        yield Finding("ok", "no slot is on its way; move some by CLUSTER MIGRATESLOTS, at once")
    else:
        yield Finding(
            "ok",
            "no slot is on its way (this server moves them key by key, and a shard stands still "
            "meanwhile: with gigabytes for tens of seconds; Valkey 9 moves them at once)",
        )


def check_replicas(found: ClusterFacts) -> Iterator[Finding]:
    """That a primary may die."""
    primaries = found.primaries
    if len(primaries) < 3:
        yield Finding(
            "note",
            f"there are {len(primaries)} primaries: when one dies no majority of them is left to "
            "let a replica take its place",
            "have three primaries or more",
        )
    followers = Counter(node.primary for node in found.nodes if node.primary)
    alone = [node.address for node in primaries if not followers[node.address]]
    if alone:
        yield Finding(
            "note",
            f"{_named(alone, len(primaries), 'primaries')}: no replica: when one dies its shards "
            "are away until it is back",
            "give each primary a replica: redis-cli --cluster add-node HOST:PORT HOST:PORT "
            "--cluster-slave --cluster-master-id ID",
        )
    near = [
        node.address
        for node in found.nodes
        if node.primary and node.host == node.primary.rpartition(":")[0]
    ]
    if near:
        yield Finding(
            "note",
            f"{_named(near, sum(followers.values()), 'replicas')}: on the same host as its primary",
            "put a primary and its replica on different machines",
        )
    late = list(_out_of_sync(found))
    yield from late
    if not alone and not late:
        yield Finding("ok", "each primary has a replica in sync")


def _out_of_sync(found: ClusterFacts) -> Iterator[Finding]:
    for node in found.nodes:
        if node.facts is None:
            continue
        info = node.facts.info
        if node.primary and info.get("master_link_status") == "down":
            yield Finding(
                "wrong",
                f"{node.address}: a replica that has lost its primary, {node.primary}",
                "see its log: it must reach that address and log in there (masteruser, masterauth)",
            )
        written = info.get("master_repl_offset")
        for name, follower in info.items():
            if node.primary or not re.fullmatch(r"slave\d+", name):
                continue
            if not isinstance(follower, Mapping) or not isinstance(written, int):
                continue
            who = f"{follower.get('ip')}:{follower.get('port')}"
            behind = written - int(follower.get("offset", 0))
            if follower.get("state") != "online" or behind > BEHIND:
                yield Finding(
                    "note",
                    f"{who}: a replica of {node.address} that is {in_bytes(max(0, behind))} behind "
                    f"({follower.get('state')}): what it lacks is asked again after a failover",
                    "give it time; else a faster network, or fewer bytes (smaller answers)",
                )


def check_settings(found: ClusterFacts) -> Iterator[Finding]:
    """Directives of a cluster."""
    nodes = len(found.nodes)
    covered = found.setting("cluster-require-full-coverage").get("yes", [])
    if covered:
        yield Finding(
            "note",
            f"{_named(covered, nodes)}: cluster-require-full-coverage yes: one primary that is "
            "lost stops all others until a replica has its place",
            "CONFIG SET cluster-require-full-coverage no, on every node",
        )
    timeouts = found.setting("cluster-node-timeout")
    for text, addresses in timeouts.items():
        seconds = int(text) / 1000 if text.isdecimal() else 0.0
        if seconds > SLOW_FAILOVER:
            yield Finding(
                "note",
                f"{_named(addresses, nodes)}: cluster-node-timeout {text}: calls wait {seconds:g} "
                "s and some more when a primary dies",
                "CONFIG SET cluster-node-timeout 5000, on every node (2000 in one data center)",
            )
        elif 0 < seconds < HASTY_FAILOVER:
            yield Finding(
                "note",
                f"{_named(addresses, nodes)}: cluster-node-timeout {text}: a pause of {seconds:g} "
                "s is taken for death",
                "CONFIG SET cluster-node-timeout 2000, on every node",
            )
    if len(timeouts) > 1:
        yield Finding(
            "note",
            f"nodes differ in cluster-node-timeout: {', '.join(sorted(timeouts))}",
            "write the same on every node",
        )
    small = [
        address
        for text, addresses in found.setting("repl-backlog-size").items()
        if text.isdecimal() and int(text) < SMALL_BACKLOG
        for address in addresses
    ]
    if small and any(node.primary for node in found.nodes):
        yield Finding(
            "note",
            f"{_named(small, nodes)}: repl-backlog-size holds a moment's rows: a replica that was "
            "cut off copies everything anew",
            "CONFIG SET repl-backlog-size 256mb, on every node",
        )


def check_clocks(found: ClusterFacts) -> Iterator[Finding]:
    """That nodes agree on the time, which heartbeats and what is awaited next go by."""
    offsets = {n.address: n.facts.clock_offset for n in found.nodes if n.facts is not None}
    if not offsets:
        return
    first, last = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    apart = offsets[last] - offsets[first]
    if apart >= CLOCKS_APART:
        yield Finding(
            "note",
            f"the clocks of {last} and {first} are {apart:.1f} s apart: after a failover from the "
            "one ahead, answers may be noticed late",
            "set the clocks of all nodes (NTP)",
        )


def check_rows(found: ClusterFacts) -> Iterator[Finding]:
    """Room for rows on all primaries together."""
    model = found.pool.model
    bounds = [0 if n.facts is None else n.facts.number("maxmemory") for n in found.primaries]
    if model is None or not bounds or not all(bounds):
        return
    row = row_bytes(model)
    room = sum(bounds) // row
    shown = f"a row takes {in_bytes(row)}: "
    if room < ROWS_ENOUGH:
        yield Finding(
            "wrong",
            f"{shown}the memory of all primaries holds {room:,} of them",
            f"raise maxmemory to {in_bytes(-(-ROWS_ENOUGH * row // len(bounds)))} or more on each",
        )
    else:
        yield Finding("ok", f"{shown}there is room for {room:,} on all primaries together")


def check_shards(found: ClusterFacts) -> Iterator[Finding]:
    """How the pool's shards lie, and whether more are due."""
    if found.pool.model is None:
        return
    if found.shards_away:
        numbers = ", ".join(map(str, found.shards_away))
        yield Finding(
            "wrong",
            f"shards {numbers} of pool {found.pool.pool} do not answer: who asks for what lies "
            "there waits",
            "bring their primary back, or give it a replica that takes its place",
        )
    primaries = [node.address for node in found.primaries]
    count = found.pool.model.shards
    each = Counter(found.shards())
    if count == 1:
        shown = f"the pool's only shard lies on {found.shards()[0] or 'no primary'}"
    else:
        shown = f"the pool's {count} shards lie " + ", ".join(
            f"{each[address]} on {address}" for address in primaries
        )
    if _worst(found, count) <= UNEVEN:
        yield Finding("ok", shown)
        return
    due = advised_shards(found)
    if due == count:
        remedy = "even out the slots: redis-cli --cluster rebalance HOST:PORT"
        yield Finding("note", f"{shown}: unevenly", remedy)
        return
    yield Finding(
        "note",
        f"{shown}: unevenly, and the pool is as slow as the busiest of them",
        f"lmpool shards {due} (the pool is served meanwhile; what is stored is computed again)",
    )


def advised_shards(found: ClusterFacts) -> int:
    """The smallest number of shards, of two or more a primary, that lies evenly as slots are."""
    primaries = max(1, len(found.primaries))
    counts = [n for each in range(2, 17) if (n := each * primaries) <= MAX_SHARDS] or [MAX_SHARDS]
    worst = {count: _worst(found, count) for count in counts}
    even = [count for count in counts if worst[count] <= EVEN]
    return even[0] if even else min(counts, key=worst.__getitem__)


def _worst(found: ClusterFacts, count: int) -> float:
    """How many times the mean the primary has that has the most of so many shards; infinite where
    one could have some and has none."""
    primaries = len(found.primaries)
    each = Counter(found.shards(count))
    if len(each) < min(primaries, MAX_SHARDS):
        return math.inf
    return max(each.values()) * primaries / count


def _moves_at_once(found: ClusterFacts) -> bool:
    versions = [str(n.facts.info.get("valkey_version", "")) for n in found.nodes if n.facts]
    return bool(versions) and all(
        (major := version.partition(".")[0]).isdecimal() and int(major) >= 9 for version in versions
    )


def _facts(node: ClusterNode) -> Facts:
    assert node.facts is not None
    return node.facts


def _named(addresses: Sequence[str], of: int, kind: str = "nodes") -> str:
    if len(addresses) == of and of > 1:
        return f"all {of} {kind}"
    return ", ".join(sorted(addresses))


CHECKS: Final[tuple[Callable[[ClusterFacts], Iterator[Finding]], ...]] = (
    check_reach,
    check_nodes,
    check_slots,
    check_replicas,
    check_settings,
    check_clocks,
    check_rows,
    check_shards,
)


def examine_cluster(found: ClusterFacts) -> list[Finding]:
    """The findings of all checks: nodes, slots, replicas, settings, clocks, rows, shards, pool,
    lanes."""
    findings = [finding for check in CHECKS for finding in check(found)]
    return [*findings, *check_pool(found.pool), *check_lanes(found.pool)]
