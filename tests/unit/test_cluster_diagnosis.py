"""What the doctor finds in a cluster, in facts that no server has to produce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lmpool.cluster_diagnosis import ClusterFacts, ClusterNode, advised_shards, examine_cluster
from lmpool.diagnosis import Facts, Finding
from lmpool.keys import PoolKeys
from lmpool.slots import SLOTS
from tests.unit.test_diagnosis import HEALTHY, MODEL, worst

CONFIG = {
    "save": "",
    "timeout": "0",
    "protected-mode": "yes",
    "requirepass": "",
    "cluster-require-full-coverage": "no",
    "cluster-node-timeout": "2000",
    "repl-backlog-size": str(256 << 20),
}


def node(number: int, primary: str = "", **changes: Any) -> ClusterNode:
    """A healthy one, at a host of its own."""
    info = {**HEALTHY, "role": "slave" if primary else "master", **changes.pop("info", {})}
    facts = Facts(
        f"redis://h{number}:1",
        info,
        {**CONFIG, **changes.pop("config", {})},
        [0.0001 * number],
        changes.pop("clock_offset", 0.0),
    )
    return ClusterNode(f"h{number}:1", primary, **{"facts": facts, "state": "ok", **changes})


def spread(primaries: Sequence[str]) -> list[str | None]:
    """Slots that lie evenly, in one range each."""
    return [primaries[slot * len(primaries) // SLOTS] for slot in range(SLOTS)]


def cluster(primaries: int = 3, replicas: bool = True, **changes: Any) -> ClusterFacts:
    """A healthy one, with its pool of two shards a primary, but for the changes."""
    nodes = [node(number) for number in range(1, primaries + 1)]
    owners = spread([each.address for each in nodes])
    if replicas:
        nodes += [node(10 + n, each.address) for n, each in enumerate(nodes[:], start=1)]
    for address, change in changes.pop("nodes", {}).items():
        at = next(n for n, each in enumerate(nodes) if each.address == address)
        nodes[at] = node(int(address[1:-2]), nodes[at].primary, **change)
    model = replace(MODEL, shards=changes.pop("shards", 2 * primaries))
    pool = Facts("redis+cluster://h1:1", {}, None, (0.0,), 0.0, model=model, workers={"w": True})
    return replace(ClusterFacts(pool, nodes, owners), **changes)


def said(found: ClusterFacts) -> list[Finding]:
    return worst(examine_cluster(found))


def test_nothing_is_wrong_with_a_healthy_cluster() -> None:
    found = examine_cluster(cluster())
    assert worst(found) == []
    texts = [finding.what for finding in found]
    assert "all 6 nodes: Redis 7.2.4 answers" in texts
    assert "all 16,384 slots are assigned, to 3 primaries" in texts
    assert "the pool's 6 shards lie 2 on h1:1, 2 on h2:1, 2 on h3:1" in texts
    # Of what is alike the slowest is shown, once.
    assert sum("answers in" in text for text in texts) == 1
    assert any("all 6 nodes: the server answers in 1.30 ms" in text for text in texts)


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"nodes": {"h2:1": {"info": {"maxmemory_policy": "allkeys-lru"}}}}, "wrong",
         "h2:1: maxmemory-policy allkeys-lru"),
        ({"nodes": {"h11:1": {"config": {"save": "3600 1"}}}}, "note", "h11:1: snapshots are on"),
        ({"nodes": {"h1:1": {"info": {"redis_version": "6.2.0"}}}}, "wrong", "6.2.0"),
        ({"nodes": {"h3:1": {"facts": None, "error": "refused"}}}, "wrong",
         "a primary is at h3:1, and this machine does not reach it there: refused"),
        ({"nodes": {"h13:1": {"facts": None, "error": "refused", "is_down": True}}}, "wrong",
         "h13:1 (replica) is down"),
        ({"nodes": {"h13:1": {"facts": None, "error": "WRONGPASS", "refuses": True}}}, "wrong",
         "h13:1 (replica) refuses this user"),
        ({"nodes": {"h2:1": {"state": "fail"}}}, "wrong", "h2:1: the cluster is down"),
        ({"nodes": {"h2:1": {"config": {"cluster-require-full-coverage": "yes"}}}}, "note",
         "h2:1: cluster-require-full-coverage yes"),
        ({"nodes": {"h2:1": {"clock_offset": 2.5}}}, "note", "h2:1 and h1:1 are 2.5 s apart"),
        ({"nodes": {"h11:1": {"info": {"master_link_status": "down"}}}}, "wrong",
         "h11:1: a replica that has lost its primary, h1:1"),
        ({"nodes": {"h1:1": {"info": {"master_repl_offset": 1 << 30, "slave0": {
            "ip": "h11", "port": 1, "state": "online", "offset": 1 << 29, "lag": 1}}}}}, "note",
         "h11:1: a replica of h1:1 that is 512 MiB behind"),
        ({"nodes": {"h1:1": {"info": {"master_repl_offset": 5, "slave0": {
            "ip": "h11", "port": 1, "state": "wait_bgsave", "offset": 0, "lag": 1}}}}}, "note",
         "(wait_bgsave)"),
        ({"nodes": {"h1:1": {"moving": (1,)}}}, "note", "none of pool default's shards"),
        ({"owners": [None] * 5 + spread(["h1:1", "h2:1", "h3:1"])[5:]}, "wrong", "5 of 16,384"),
        ({"replicas": False}, "note", "all 3 primaries: no replica"),
        ({"primaries": 2}, "note", "there are 2 primaries"),
        ({"shards_away": (0, 1)}, "wrong", "shards 0, 1 of pool default do not answer"),
        ({"shards": 1}, "note", "the pool's only shard lies on h"),
    ],
)  # fmt: skip
def test_what_is_not_well_is_found_with_a_remedy(
    changes: dict[str, Any], level: str, text: str
) -> None:
    found = said(cluster(**changes))
    matching = [finding for finding in found if text in finding.what]
    assert [finding.level for finding in matching] == [level], found
    assert matching[0].remedy or "6.2.0" in text
    assert len(found) <= 2, found  # a node that is no more like the others changes nothing else


def test_directives_of_every_node_are_one_finding() -> None:
    each = {f"h{n}:1": {"config": {"cluster-node-timeout": "15000"}} for n in (1, 2, 3, 11, 12, 13)}
    (found,) = said(cluster(nodes=each))
    assert "all 6 nodes: cluster-node-timeout 15000: calls wait 15 s" in found.what
    found_two = said(cluster(nodes={"h1:1": each["h1:1"]}))
    assert [f.what.partition(":")[0] for f in found_two] == [
        "h1", "nodes differ in cluster-node-timeout",
    ]  # fmt: skip


def test_a_hasty_node_timeout_and_a_small_backlog_are_noted() -> None:
    config = {"cluster-node-timeout": "500", "repl-backlog-size": str(1 << 20)}
    found = said(cluster(nodes={f"h{n}:1": {"config": config} for n in (1, 2, 3, 11, 12, 13)}))
    assert [
        text for f in found for text in ("taken for death", "copies everything") if text in f.what
    ]
    assert {f.level for f in found} == {"note"}


def test_a_slot_on_its_way_stops_the_shard_in_it() -> None:
    first, *_ = PoolKeys("default").shards(MODEL.fingerprint8, 6)
    slow = said(cluster(nodes={"h1:1": {"moving": (first.slot,)}}))
    assert [f.level for f in slow] == ["wrong"]
    assert "shards 0 of pool default stand still" in slow[0].what
    assert "Valkey 9" in slow[0].remedy
    valkey = {f"h{n}:1": {"info": {"valkey_version": "9.1.2"}} for n in (2, 3, 11, 12, 13)}
    moving = {"info": {"valkey_version": "9.1.2"}, "moving": (first.slot,)}
    (fast,) = said(cluster(nodes={**valkey, "h1:1": moving}))
    assert "Move slots by CLUSTER MIGRATESLOTS" in fast.remedy


def test_rows_are_of_all_primaries_together() -> None:
    # 4 KiB a row: 700 on each of three primaries are enough, 600 are not.
    sizes = {f"h{n}:1": {"info": {"maxmemory": 700 * 4096, "used_memory": 0}} for n in (1, 2, 3)}
    assert said(cluster(nodes=sizes)) == []
    sizes = {f"h{n}:1": {"info": {"maxmemory": 600 * 4096, "used_memory": 0}} for n in (1, 2, 3)}
    (found,) = said(cluster(nodes=sizes))
    assert "holds 1,800 of them" in found.what


def test_a_replica_on_its_primarys_host_is_noted() -> None:
    found = cluster()
    nodes = [replace(each, address=f"one:{n}") for n, each in enumerate(found.nodes)]
    nodes = [replace(e, primary=e.primary and f"one:{n - 3}") for n, e in enumerate(nodes)]
    owners = spread([each.address for each in nodes[:3]])
    (noted,) = said(replace(found, nodes=nodes, owners=owners))
    assert "all 3 replicas: on the same host" in noted.what


def test_what_a_user_may_not_see_is_no_finding() -> None:
    found = cluster()
    hidden = [
        replace(each, facts=Facts("redis://h", {}, None, [0.001], 0.0), state="")
        for each in found.nodes
    ]
    noted = said(replace(found, nodes=hidden))
    assert not [finding for finding in noted if finding.level == "wrong"]


def rebalanced(before: int, after: int) -> list[str | None]:
    """Slots of `before` primaries, each of which gave the last of its to those that were added."""
    owners = spread([f"h{n}:1" for n in range(1, before + 1)])
    new = [f"h{n}:1" for n in range(before + 1, after + 1)]
    spare = [
        slot
        for n in range(1, before + 1)
        for slot in [s for s, owner in enumerate(owners) if owner == f"h{n}:1"][SLOTS // after :]
    ]
    for count, slot in enumerate(spare):
        owners[slot] = new[count * len(new) // len(spare)]
    return owners


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 8), (3, 8), (1, 3)])
def test_more_shards_are_due_after_primaries_were_added(before: int, after: int) -> None:
    owners = rebalanced(before, after)
    found = cluster(after, owners=owners, shards=2 * before)
    (finding,) = said(found)
    due = advised_shards(found)
    assert finding.remedy.startswith(f"lmpool shards {due} ")
    assert 2 * after <= due <= 64
    # With so many the doctor has nothing more to say.
    assert said(cluster(after, owners=owners, shards=due)) == []


def test_a_pool_of_another_name_or_none_is_no_reason_for_shards() -> None:
    found = cluster()
    (noted,) = said(replace(found, pool=replace(found.pool, model=None)))
    assert "there is no pool 'default' yet" in noted.what
