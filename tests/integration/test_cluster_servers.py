"""The clusters of tests: that what is done to them is what happens to them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support import cluster as cluster_module
from tests.support.certificates import certificates, where_tls_is_spoken
from tests.support.cluster import SLOTS, Cluster, ClusterNode, slot_of
from tests.support.processes import wait_until_gone
from tests.support.redis_client import open_redis
from tests.support.waiting import until

PATIENT = 5.0
"""Seconds after which nodes miss one another: none that a busy machine has stand still."""


@pytest.fixture(scope="module")
def cluster(server_binary: str) -> Iterator[Cluster]:
    """Three primaries, three replicas."""
    with Cluster(3, 1, node_timeout=PATIENT) as cluster:
        yield cluster


def test_it_forms(cluster: Cluster) -> None:
    primaries = cluster.primaries()
    assert len(primaries) == 3
    assert [len(cluster.replicas(node)) for node in primaries] == [1, 1, 1]
    assert sorted(slot for node in primaries for slot in cluster.slots(node)) == [*range(SLOTS)]
    owner = cluster.owner(slot_of("{x}a"))
    owner.command("SET", "{x}a", 1)
    other = next(node for node in primaries if node is not owner)
    with pytest.raises(redis.exceptions.ResponseError, match=f"MOVED .*:{owner.port}"):
        other.command("GET", "{x}a")


def test_a_slot_moves_in_the_classic_way(cluster: Cluster) -> None:
    slot = slot_of("{moving}")
    source = cluster.owner(slot)
    target = next(node for node in cluster.primaries() if node is not source)
    keys = [f"{{moving}}{number}" for number in range(25)]
    source.commands(("SET", key, key) for key in keys)
    cluster.move_slot(slot, target, keys=10)
    assert cluster.owner(slot) is target
    assert target.commands(("GET", key) for key in keys) == [key.encode() for key in keys]
    cluster.move_slots([slot], target, source)
    assert cluster.owner(slot) is source
    assert source.commands(("GET", key) for key in keys) == [key.encode() for key in keys]


def test_half_a_slot_is_at_either_node_meanwhile(cluster: Cluster) -> None:
    slot = slot_of("{half}")
    source = cluster.owner(slot)
    target = next(node for node in cluster.primaries() if node is not source)
    source.commands(("SET", f"{{half}}{number}", number) for number in range(20))
    counts = []

    def look() -> None:
        counts.extend(n.command("CLUSTER", "COUNTKEYSINSLOT", slot) for n in (source, target))

    cluster.move_slot(slot, target, keys=5, meanwhile=look)
    assert counts == [15, 5]
    assert target.command("CLUSTER", "COUNTKEYSINSLOT", slot) == 20


def test_a_move_that_was_left_alone_is_ended(cluster: Cluster) -> None:
    slot = slot_of("{left}")
    source = cluster.owner(slot)
    target = next(node for node in cluster.primaries() if node is not source)
    source.command("SET", "{left}", 1)
    with pytest.raises(ZeroDivisionError):
        cluster.move_slot(slot, target, meanwhile=lambda: print(1 / 0))
    assert "MOVED" in str(target.commands([("GET", "{left}")])[0])
    assert "ASK" in str(source.commands([("GET", "{left}")])[0])
    cluster.settle()
    assert source.commands([("GET", "{left}")]) == [None]  # an operator would not give up here
    assert cluster.owner(slot) is source


def test_slots_move_at_once(cluster: Cluster) -> None:
    if not cluster.moves_at_once:
        pytest.skip("Valkey moves slots at once from 9 on")
    slot = slot_of("{at once}")
    source = cluster.owner(slot)
    target = next(node for node in cluster.primaries() if node is not source)
    source.command("SET", "{at once}", 1)
    slots = [slot, *cluster.slots(source)[:3]]
    cluster.move_at_once(slots, target)
    assert {cluster.owner(moved) for moved in slots} == {target}
    assert target.command("GET", "{at once}") == b"1"
    cluster.move_at_once(slots, source)
    assert {cluster.owner(moved) for moved in slots} == {source}


def test_a_replica_takes_the_place_of_a_primary_that_is_killed(cluster: Cluster) -> None:
    (former, *_) = cluster.primaries()
    (replica,) = cluster.replicas(former)
    (slot, *_) = cluster.slots(former)
    former.kill()
    assert 0 < cluster.wait_for_failover(slot, former) < 60
    assert cluster.owner(slot) is replica
    former.start()
    cluster.wait_until_ok()
    assert former in cluster.replicas(replica)
    assert not list(former.folder.glob("*.rdb"))  # what it was sent, and would read as a primary


def test_a_paused_primary_comes_back_as_a_replica(cluster: Cluster) -> None:
    (former, *_) = cluster.primaries()
    (slot, *_) = cluster.slots(former)
    former.pause()
    cluster.wait_for_failover(slot, former)
    former.resume()
    cluster.wait_until_ok()
    until(lambda: former in cluster.replicas(cluster.owner(slot)), what="it to follow")


def test_writes_are_lost_where_a_replica_fell_behind(cluster: Cluster) -> None:
    slot = slot_of("{lost}")
    former = cluster.owner(slot)
    former.command("SET", "{lost}before", 1)
    former.command("WAIT", 1, 5000)

    def write() -> None:
        former.command("SET", "{lost}after", 1)

    cluster.lose_writes(former, write)
    cluster.wait_for_failover(slot, former)
    found = cluster.owner(slot).commands([("GET", "{lost}before"), ("GET", "{lost}after")])
    assert found == [b"1", None]
    former.start()
    cluster.wait_until_ok()


def test_a_node_is_added_and_removed(cluster: Cluster) -> None:
    before = cluster.primaries()
    node = cluster.add_node()
    assert cluster.slots(node) == []
    at_once = cluster.moves_at_once
    cluster.rebalance([*before, node], at_once=at_once)
    assert [len(cluster.slots(primary)) for primary in cluster.primaries()] == [SLOTS // 4] * 4
    assert node in cluster.primaries()
    cluster.remove_node(node, at_once=at_once)
    assert len(cluster.members()) == 6
    assert {len(cluster.slots(primary)) for primary in cluster.primaries()} <= {5461, 5462}


def test_all_nodes_come_back_with_what_they_held(server_binary: str) -> None:
    with Cluster(3, node_timeout=PATIENT, append_only=True) as cluster:
        owner = cluster.owner(slot_of("a"))
        owner.command("SET", "a", 1)
        cluster.restart()
        assert cluster.owner(slot_of("a")) is owner
        assert owner.command("GET", "a") == b"1"


def test_nodes_know_users_tls_and_names(server_binary: str, tmp_path: Path) -> None:
    cluster = Cluster(
        3,
        1,
        node_timeout=PATIENT,
        tls=certificates(tmp_path),
        users="user default off\nuser someone on >secret ~* +@all\n",
        announce=lambda port: {"cluster_announce_hostname": "localhost"},
        cluster_preferred_endpoint_type="hostname",
    )
    with where_tls_is_spoken(cluster):
        client = redis.Redis(
            port=cluster.nodes[0].cluster_port,
            ssl=True,
            ssl_ca_certs=str(tmp_path / "ca.pem"),
            username="someone",
            password="secret",
        )
        with client:
            slots = client.execute_command("CLUSTER", "SLOTS")
        named = {(primary[0], primary[1]) for _, _, primary, *_ in slots}
        assert named == {(b"localhost", node.cluster_port) for node in cluster.nodes[:3]}
        assert cluster.url.startswith("rediss+cluster://test:t@127.0.0.1:")


def test_nodes_speak_ipv6(server_binary: str) -> None:
    with Cluster(3, host="::1") as cluster:
        hosts = {
            node[0] for span in cluster.nodes[0].command("CLUSTER", "SLOTS") for node in span[2:]
        }
        assert hosts == {b"::1"}
        assert f"[::1]:{cluster.nodes[0].cluster_port}" in cluster.url


@pytest.mark.one_server
def test_nodes_that_did_not_meet_in_time_meet_again(
    server_binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a slow machine makes no cluster."""
    meet, tries = cluster_module._meet, itertools.count()

    def too_late_at_first(node: ClusterNode) -> tuple[Any, ...]:
        return meet(node) if next(tries) else ("PING",)

    monkeypatch.setattr(cluster_module, "_meet", too_late_at_first)
    with Cluster(2, binary=server_binary) as cluster:
        assert next(tries) > 1
        cluster.wait_until_ok()


@pytest.mark.one_server
def test_nothing_stays_of_a_cluster_whose_process_is_killed(server_binary: str) -> None:
    program = (
        "from tests.support.cluster import Cluster\n"
        "with Cluster(2, node_timeout=1.0) as cluster:\n"
        "    cluster.nodes[0].pause()\n"
        "    print(cluster.folder, *[node.pid for node in cluster.nodes], flush=True)\n"
        "    import time; time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        folder, *pids = process.stdout.readline().decode().split()
        process.kill()
    wait_until_gone(map(int, pids))
    until(lambda: not Path(folder).exists(), what="its folder to go")


def test_one_connection_reaches_every_node(cluster: Cluster) -> None:
    keys = [f"key {number}" for number in range(30)]
    with open_redis(cluster.url) as client:
        client.flushall()
        for key in keys:
            client.xadd(key, {"a": key})
        assert sorted(client.scan_iter("key *")) == sorted(key.encode() for key in keys)
        assert {client.xlen(key) for key in keys} == {1}
        slot = slot_of(keys[0])
        source = cluster.owner(slot)
        target = next(node for node in cluster.primaries() if node is not source)
        cluster.move_slot(slot, target)
        assert client.xinfo_stream(keys[0])["length"] == 1
        cluster.move_slot(slot, source)
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.xlen(key)
            assert pipe.execute() == [1] * len(keys)
        with client.pipeline(transaction=True) as pipe:
            pipe.set("{x}a", 1).incr("{x}a")
            assert pipe.execute() == [True, 2]
        assert client.eval("return redis.call('TYPE', KEYS[1])", 1, keys[3]) == b"stream"
        assert client.exists(*keys) == 30
        assert client.delete(*keys) == 30
