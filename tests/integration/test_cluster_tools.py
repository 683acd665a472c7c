"""What operators look at, on a real cluster: that every figure is right, also while a part of it is
away, and that the doctor finds what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import redis

import lmpool
from lmpool import inspection
from lmpool.cluster import slot_map
from lmpool.cluster_servers import ANSWER_WITHIN
from lmpool.diagnosis import Finding
from lmpool.errors import ServerUnreachable
from lmpool.exporter import ANSWERS_WITHIN
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.pool_view import PoolView, PoolViewer
from lmpool.producer.statistics import PATIENCE
from lmpool.slots import slot_of
from tests.support.clients import connected
from tests.support.cluster import Cluster
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import InProcessWorker, clean_environment, in_process_worker

VOCAB = 512
ROOT = Path(__file__).parents[2]
MEMORY = 64 << 20
QUIET = {
    "cluster_require_full_coverage": "no",
    "maxmemory": str(MEMORY),
    "repl_backlog_size": "128mb",
}
"""What the doctor asks for, as far as one machine can do it."""


PATIENT = 5.0
"""Seconds after which nodes miss one another: none of a machine that is busy, and no more than the
doctor takes for well."""


@pytest.fixture(autouse=True)
def _at_any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor finds nothing in how long a server takes to answer, and nobody takes one for away
    that is slow."""
    monkeypatch.setattr("lmpool.diagnosis.SLOW", 60.0)
    monkeypatch.setattr("lmpool.cluster_diagnosis.CLOCKS_APART", 60.0)
    monkeypatch.setattr("lmpool.cluster_servers.ANSWER_WITHIN", 60.0)
    monkeypatch.setattr("lmpool.producer.statistics.PATIENCE", 60.0)


@pytest.fixture
def _at_the_usual_pace(monkeypatch: pytest.MonkeyPatch, _at_any_pace: None) -> None:
    """For tests that have nodes stand still."""
    monkeypatch.setattr("lmpool.cluster_servers.ANSWER_WITHIN", ANSWER_WITHIN)
    monkeypatch.setattr("lmpool.producer.statistics.PATIENCE", PATIENCE)


@pytest.fixture(scope="module")
def cluster(server_binary: str) -> Iterator[Cluster]:
    """Three primaries, each with a replica, which tests leave as it is."""
    with Cluster(3, 1, node_timeout=PATIENT, **QUIET) as cluster:
        yield cluster


@pytest.fixture
def own_cluster(server_binary: str) -> Iterator[Cluster]:
    """The same, for one test."""
    with Cluster(3, 1, node_timeout=PATIENT, **QUIET) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def _bare(server_binary: str) -> Iterator[Cluster]:
    with Cluster(3, node_timeout=PATIENT, **QUIET) as cluster:
        yield cluster


@pytest.fixture
def bare(_bare: Cluster) -> Cluster:
    """Three primaries without replicas: what one holds is away with it."""
    _bare.mend()
    return _bare


def worker_of(cluster: Cluster, pool: str) -> AbstractContextManager[InProcessWorker]:
    return in_process_worker(cluster.url, pool, engine_opts={"vocab_size": VOCAB})


def ask(lm: lmpool.PooledLM, count: int, start: int = 0) -> None:
    """For rows of so many prompts, of all shards."""
    numbers = range(start, start + count)
    lm.batch_next_token_logprobs_sync([[n % VOCAB, n // VOCAB, 3] for n in numbers])


def command(cluster_url: str, pool: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What `lmpool` says."""
    environment = {
        **clean_environment(), "LMPOOL_URL": cluster_url, "LMPOOL_POOL": pool, "COLUMNS": "200",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "lmpool", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def not_well(found: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.level for finding in found if finding.level != "ok"}


# --- looking -----------------------------------------------------------------------------------


@pytest.mark.one_server
def test_every_figure_is_that_of_all_nodes(cluster: Cluster, pool_name: str) -> None:
    with (
        worker_of(cluster, pool_name) as one,
        worker_of(cluster, pool_name) as two,
        connected(cluster.url, pool_name) as lm,
        PoolViewer(cluster.url, pool_name) as viewer,
    ):
        ask(lm, 600)
        stats = lm.pool_statistics_sync()
        assert stats["computed"] == 600
        assert stats["backlog"] == 0
        assert stats["shards_away"] == []
        assert [worker["id"] for worker in stats["workers"]] == sorted((one.id, two.id))
        assert stats["held_bytes"] >= 600 * VOCAB * 4
        for shard in lm.shards:  # two dead letters in each
            owner = cluster.owner(shard.slot)
            for _ in range(2):
                owner.command("XADD", shard.dead, "*", "job", "x", "reason", "y")
        view = viewer.read()
        assert view.dead_letters == 2 * len(lm.shards) == 12

        def say_the_same() -> bool:  # unless a worker says something new between the two
            seen, told = viewer.read().statistics, lm.pool_statistics_sync()
            return {**seen, "oldest_seconds": 0} == {**told, "oldest_seconds": 0}

        until(say_the_same, what="the viewer and the client to say the same")
        assert view.memory_max_bytes == 3 * MEMORY
        primaries = cluster.primaries()
        assert {node["address"] for node in view.nodes} == {
            f"127.0.0.1:{node.cluster_port}" for node in primaries
        }
        used = 0
        for node in primaries:
            with node.client() as client:
                used += client.info("memory")["used_memory"]
        assert view.memory_bytes == pytest.approx(used, rel=0.1)
        for node in view.nodes:
            owner = next(n for n in primaries if str(n.cluster_port) in node["address"])
            mine = [s.number for s in lm.shards if cluster.owner(s.slot) is owner]
            assert node["shards"] == mine
            assert len(mine) == 2


@pytest.mark.one_server
def test_a_backlog_is_that_of_all_shards(cluster: Cluster, pool_name: str) -> None:
    with worker_of(cluster, pool_name), connected(cluster.url, pool_name) as lm:
        shards = lm.shards
    for shard in shards:  # nobody is there to take them
        owner = cluster.owner(shard.slot)
        for priority in ("interactive", "batch", "batch"):
            owner.command("XADD", shard.stream(priority).key, "*", "job", "x")
    with PoolViewer(cluster.url, pool_name) as viewer:
        view = viewer.read()
    assert view.statistics["backlog"] == 3 * len(shards) == 18
    assert (view.queues["interactive"]["jobs"], view.queues["batch"]["jobs"]) == (6, 12)
    assert [node["jobs"] for node in view.nodes] == [6, 6, 6]
    assert view.workers == []
    assert json.loads(command(cluster.url, pool_name, "stats", "--json").stdout)["backlog"] == 18


def view_without(viewer: PoolViewer, *away: str) -> PoolView:
    """What it shows once these nodes are away, and no other that is slow to answer just then."""

    def look() -> PoolView | None:
        view = viewer.read()
        return view if view.nodes_away == [*away] else None

    return until(look, what=f"none but {away} to be away")


@pytest.mark.one_server
@pytest.mark.usefixtures("_at_the_usual_pace")
def test_one_node_away_leaves_the_figures_of_the_others(bare: Cluster, pool_name: str) -> None:
    with (
        worker_of(bare, pool_name) as worker,
        connected(bare.url, pool_name) as lm,
        PoolViewer(bare.url, pool_name) as viewer,
    ):
        ask(lm, 300)
        whole = view_without(viewer)
        lost = bare.owner(slot_of(PoolKeys(pool_name).info))  # the worst of them
        mine = [shard.number for shard in lm.shards if bare.owner(shard.slot) is lost]
        lost.pause()
        began = time.monotonic()
        viewer.read()
        assert time.monotonic() - began < 30
        view = view_without(viewer, f"127.0.0.1:{lost.cluster_port}")
        assert view.statistics["shards_away"] == mine
        # What only grows must not shrink: somebody draws lines of it.
        assert view.statistics["computed"] == whole.statistics["computed"] == 300
        assert view.statistics["held_bytes"] < whole.statistics["held_bytes"]
        assert [one["id"] for one in view.workers] == [worker.id]
        assert view.model == whole.model
        assert view.memory_max_bytes == 2 * MEMORY

        def without_it() -> bool:
            stats = lm.pool_statistics_sync(timeout=60)
            return stats["shards_away"] == mine and 0 < stats["computed"] < 300

        until(without_it, what="the client to see the others")
        lost.resume()
        again = view_without(viewer)
        assert again.statistics["held_bytes"] == whole.statistics["held_bytes"]


@pytest.mark.one_server
def test_commands_say_which_node_is_away(bare: Cluster, pool_name: str) -> None:
    url = bare.url_of(seeds=3)
    with worker_of(bare, pool_name), connected(bare.url, pool_name) as lm:
        ask(lm, 300)
        info = bare.owner(slot_of(PoolKeys(pool_name).info))
        lost = next(node for node in bare.primaries() if node is not info)
        mine = [shard.number for shard in lm.shards if bare.owner(shard.slot) is lost]
        lost.kill()
        top = command(url, pool_name, "top", "--once")
        assert f"127.0.0.1:{lost.cluster_port}: the figures are of the others" in top.stdout
        stats = command(url, pool_name, "stats").stdout
        assert f"shards {mine[0]}, {mine[1]} of 6 do not answer" in stats
        assert (
            f"127.0.0.1:{lost.cluster_port} does not answer"
            in command(url, pool_name, "ping").stdout
        )
        doctor = command(url, pool_name, "doctor", "--json")
        assert doctor.returncode == 1
        texts = [each["what"] for each in json.loads(doctor.stdout)["findings"]]
        assert any(f"127.0.0.1:{lost.cluster_port}" in text for text in texts), texts
        assert any(f"shards {mine[0]}, {mine[1]} of pool" in text for text in texts), texts
        assert sum("answers in" in text for text in texts) == 1
        lost.start()
        bare.wait_until_ok()


def test_who_connects_as_a_node_dies_is_served_by_the_others(bare: Cluster, pool_name: str) -> None:
    """Whichever it is: nobody knows yet that it is away."""
    with worker_of(bare, pool_name):
        info = bare.owner(slot_of(PoolKeys(pool_name).info))
        for lost in [node for node in bare.primaries() if node is not info]:
            lost.kill()
            with lmpool.connect(bare.url_of(seeds=3), pool_name, framework="numpy") as lm:
                away = lm.pool_statistics_sync()["shards_away"]
                assert away == [s.number for s in lm.shards if bare.owner(s.slot) is lost]
            lost.start()
            bare.wait_until_ok()


@pytest.mark.one_server
@pytest.mark.usefixtures("_at_the_usual_pace")
def test_a_cluster_that_is_away_is_an_error_and_found_again(bare: Cluster, pool_name: str) -> None:
    with (
        worker_of(bare, pool_name),
        PoolViewer(bare.url, pool_name, answers_within=ANSWERS_WITHIN) as viewer,
    ):
        until(lambda: _has_workers(viewer), what="the pool to be seen", every=0.1)
        for node in bare.nodes:
            node.pause()
        began = time.monotonic()
        with pytest.raises(ServerUnreachable):
            viewer.read()
        assert time.monotonic() - began < 30
        for node in bare.nodes:
            node.resume()
        until(lambda: _has_workers(viewer), what="the pool to be seen again", every=0.1)


def _has_workers(viewer: PoolViewer) -> bool:
    try:
        return bool(viewer.read().workers)
    except ServerUnreachable:
        return False


@pytest.mark.one_server
def test_commands_print_what_a_cluster_holds(cluster: Cluster, pool_name: str) -> None:
    with worker_of(cluster, pool_name) as worker, connected(cluster.url, pool_name) as lm:
        ask(lm, 50)
        # Of a node that is late to answer a command says so, and the next one has it.
        nodes = [f"127.0.0.1:{node.cluster_port}" for node in cluster.primaries()]

        def pings() -> bool:
            ping = command(cluster.url, pool_name, "ping")
            told = [f"{node} " in ping.stdout for node in nodes]
            return ping.returncode == 0 and all(told) and worker.id in ping.stdout

        def counts() -> bool:
            stats = json.loads(command(cluster.url, pool_name, "stats", "--json").stdout)
            return stats["computed"] == 50 and stats["shards_away"] == []

        def shows() -> bool:
            top = command(cluster.url, pool_name, "top", "--once").stdout
            return all(f"{node}: " in top for node in nodes)

        for says in (pings, counts, shows):
            until(says, what="every node to answer")


# --- the doctor --------------------------------------------------------------------------------


def test_the_doctor_finds_nothing_wrong_with_a_cluster_as_it_should_be(
    cluster: Cluster, pool_name: str
) -> None:
    with worker_of(cluster, pool_name), connected(cluster.url, pool_name) as lm:
        ask(lm, 10)
        found = inspection.diagnose(cluster.url, pool_name)
        assert list(not_well(found)) == [
            "all 3 replicas: on the same host as its primary",
        ]
        texts = [finding.what for finding in found]
        assert "all 16,384 slots are assigned, to 3 primaries" in texts
        assert "each primary has a replica in sync" in texts
        assert any(text.startswith("the pool's 6 shards lie 2 on ") for text in texts)
        assert any("1 worker alive" in text for text in texts)


def test_the_doctor_says_what_a_fresh_cluster_lacks(server_binary: str, pool_name: str) -> None:
    with Cluster(3, node_timeout=15.0, maxmemory=str(MEMORY), maxmemory_policy="allkeys-lru") as c:
        c.nodes[1].command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        found = not_well(inspection.diagnose(c.url, pool_name))
    first, second, third = (f"127.0.0.1:{node.cluster_port}" for node in c.nodes)
    (evicting,) = [text for text in found if "allkeys-lru" in text]
    assert evicting.startswith(", ".join(sorted((first, third))))
    assert second not in evicting
    assert found[evicting] == "wrong"
    for text in (
        "all 3 nodes: cluster-require-full-coverage yes",
        "all 3 nodes: cluster-node-timeout 15000: calls wait 15 s",
        "all 3 primaries: no replica",
        f"there is no pool '{pool_name}' yet",
    ):
        assert sum(text in what for what in found) == 1, (text, found)


@pytest.mark.one_server
def test_the_doctor_finds_a_node_that_is_gone(own_cluster: Cluster, pool_name: str) -> None:
    with worker_of(own_cluster, pool_name):
        (first, *_) = own_cluster.primaries()
        (replica,) = own_cluster.replicas(first)
        replica.kill()
        found = not_well(inspection.diagnose(own_cluster.url, pool_name))
        assert any(str(replica.cluster_port) in text for text in found), found


@pytest.mark.one_server
def test_the_doctor_finds_an_address_that_leads_nowhere(server_binary: str, pool_name: str) -> None:
    told: list[int] = []

    def announce(port: int) -> dict[str, str]:
        told.append(port)
        if len(told) != 3:
            return {}
        # As behind a NAT that nobody told it of: other nodes reach its bus, and clients nothing.
        return {"cluster_announce_port": "1", "cluster_announce_bus_port": str(port + 10_000)}

    with Cluster(3, node_timeout=PATIENT, announce=announce, **QUIET) as cluster:
        found = inspection.diagnose(cluster.url, pool_name)
    (away,) = [finding for finding in found if "does not reach it there" in finding.what]
    assert away.level == "wrong"
    assert "a primary is at 127.0.0.1:1," in away.what
    assert "cluster-announce-port" in away.remedy


@pytest.mark.one_server
def test_the_doctor_says_when_more_shards_are_due(own_cluster: Cluster, pool_name: str) -> None:
    with worker_of(own_cluster, pool_name), connected(own_cluster.url, pool_name) as lm:
        ask(lm, 10)
        added = [own_cluster.add_node(), own_cluster.add_node()]
        primaries = [*own_cluster.primaries(), *added]
        own_cluster.rebalance(primaries, at_once=own_cluster.moves_at_once)
        found = inspection.diagnose(own_cluster.url, pool_name)
        (due,) = [finding for finding in found if "unevenly" in finding.what]
        assert due.level == "note"
        assert due.remedy.startswith(("lmpool shards 1", "lmpool shards 2"))
        number = int(due.remedy.split()[2])
    shards = PoolKeys(pool_name).shards(lm.info.fingerprint8, number)
    each = [own_cluster.owner(shard.slot) for shard in shards]
    most = max(each.count(node) for node in own_cluster.primaries())
    assert most * 5 / number <= 1.34


def test_what_has_just_moved_is_not_away_to_the_doctor(cluster: Cluster, pool_name: str) -> None:
    with in_process_worker(cluster.url, pool_name), connected(cluster.url, pool_name) as lm:
        ask(lm, 10)
        known = slot_map(cluster.url)
        for slot in {slot_of(PoolKeys(pool_name).info), *(shard.slot for shard in lm.shards)}:
            owner = known.owner(slot)
            known.move(slot, next(other for other in known.nodes() if other != owner))
        found = not_well(inspection.diagnose(cluster.url, pool_name))
        assert not any("away" in text or "do not answer" in text for text in found), found


def test_the_doctor_finds_a_shard_on_its_way(cluster: Cluster, pool_name: str) -> None:
    with worker_of(cluster, pool_name), connected(cluster.url, pool_name) as lm:
        ask(lm, 10)
        shard: ShardKeys = lm.shards[4]
        source = cluster.owner(shard.slot)
        target = next(node for node in cluster.primaries() if node is not source)
        target.command("CLUSTER", "SETSLOT", shard.slot, "IMPORTING", source.id)
        source.command("CLUSTER", "SETSLOT", shard.slot, "MIGRATING", target.id)
        found = not_well(inspection.diagnose(cluster.url, pool_name))
        assert any("shards 4 of pool" in text and "stand still" in text for text in found), found
        cluster.settle()
        found = not_well(inspection.diagnose(cluster.url, pool_name))
        assert not any("stand still" in text for text in found)


def acl_users() -> str:
    """Those of `deploy/redis`, as they are."""
    return (ROOT / "deploy" / "redis" / "users.acl").read_text("utf-8")


def test_each_user_sees_what_it_may(
    server_binary: str, pool_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Cluster(3, 1, node_timeout=PATIENT, users=acl_users(), **QUIET) as cluster:
        url = {
            name: cluster.url_of(name, f"change-this-{name}")
            for name in ("producer", "worker", "exporter", "operator")
        }
        with in_process_worker(url["worker"], pool_name, engine_opts={"vocab_size": VOCAB}):
            with connected(url["producer"], pool_name) as lm:
                ask(lm, 100)
                assert lm.pool_statistics_sync()["computed"] == 100
            with PoolViewer(url["exporter"], pool_name) as viewer:
                view = viewer.read()
                assert view.statistics["computed"] == 100
                assert view.dead_letters == 0
                assert view.nodes_away == []
            found = {name: inspection.diagnose(each, pool_name) for name, each in url.items()}
        assert "not allowed what workers do" not in caplog.text
        for name, findings in found.items():
            wrong = [finding.what for finding in findings if finding.level == "wrong"]
            assert not wrong, (name, wrong)
            assert any("1 worker alive" in finding.what for finding in findings), findings
        assert len(found["operator"]) > len(found["producer"])
        rights = {
            name: next((each.what for each in findings if "this user may" in each.what), "")
            for name, findings in found.items()
        }
        assert rights["producer"].endswith("do what clients do, and take no jobs as workers do")
        assert rights["exporter"].endswith("exporter` does, and neither ask nor take jobs")
        # Of replicas those that the cluster knows by then.
        assert re.fullmatch(
            r"all \d nodes: this user may do what clients and workers do", rights["worker"]
        )
        # A replica without the users: after a failover nobody would get in.
        replica = cluster.replicas()[0]
        replica.command("ACL", "DELUSER", "operator")
        (refused,) = [
            finding
            for finding in inspection.diagnose(url["operator"], pool_name)
            if "refuses this user" in finding.what
        ]
        assert str(replica.cluster_port) in refused.what
        assert "change-this" not in refused.what


@pytest.mark.one_server
def test_a_url_of_the_other_kind_says_what_to_write(
    cluster: Cluster, server_binary: str, pool_name: str
) -> None:
    plain_url = f"redis://127.0.0.1:{cluster.nodes[0].cluster_port}/0"
    for words in (["ping"], ["stats"], ["top", "--once"], ["doctor"]):
        said = command(plain_url, pool_name, *words)
        assert said.returncode == (1 if words == ["doctor"] else 2)
        text = said.stdout + said.stderr
        assert "a node of a Redis Cluster: write redis+cluster://" in " ".join(text.split())
    with RealServer(binary=server_binary, tcp=True) as server:
        url = server.url.replace("redis://", "redis+cluster://").rpartition("/")[0]
        for words in (["ping"], ["stats"], ["top", "--once"], ["doctor"]):
            said = command(url, pool_name, *words)
            assert said.returncode == (1 if words == ["doctor"] else 2)
            text = " ".join((said.stdout + said.stderr).split())
            assert "is no node of a Redis Cluster: write redis://host:port/db" in text


def test_the_configuration_of_a_node_is_taken_and_asks_for_nothing_more(
    server_binary: str, pool_name: str
) -> None:
    text = (ROOT / "deploy" / "redis" / "cluster.conf").read_text("utf-8")
    said = dict(line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    for ours in ("include", "cluster-enabled"):
        del said[ours]
    options = {name.replace("-", "_"): value for name, value in said.items()}
    node_timeout = int(options.pop("cluster_node_timeout")) / 1000
    cluster = Cluster(3, 1, node_timeout=node_timeout, maxmemory=str(MEMORY), **options)
    with cluster, worker_of(cluster, pool_name):
        found = not_well(inspection.diagnose(cluster.url, pool_name))
    assert list(found) == ["all 3 replicas: on the same host as its primary"]


def test_replicas_log_in_as_the_user_that_is_theirs(server_binary: str, tmp_path: Path) -> None:
    folder = ROOT / "deploy" / "redis"
    said = (folder / "cluster-users.acl").read_text("utf-8")
    login = re.search(r"^user (\S+) on >(\S+) ", said)
    assert login is not None
    users = tmp_path / "users.acl"
    users.write_text((folder / "users.acl").read_text("utf-8") + said)
    with (
        RealServer(binary=server_binary, tcp=True, aclfile=str(users)) as primary,
        RealServer(
            binary=server_binary, tcp=True, masteruser=login[1], masterauth=login[2]
        ) as replica,
    ):
        port = primary.url.rpartition(":")[2].partition("/")[0]
        with redis.Redis.from_url(replica.url, protocol=2) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", port)

            def follows() -> bool:
                return client.info("replication")["master_link_status"] == "up"  # type: ignore[index]

            until(follows, what="the replica to be let in", every=0.05)
            client.execute_command("REPLICAOF", "NO", "ONE")
