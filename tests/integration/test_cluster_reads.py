"""What a worker asks of several shards of a cluster at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import redis.exceptions

from lmpool.affinity import own_lanes
from lmpool.cluster import NodeConnection, SlotMigrating
from lmpool.commands import Pipeline, Server
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.servers import Servers
from lmpool.wants import Digester
from lmpool.worker.batching import Batcher
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.homes import Homes
from lmpool.worker.intake import Intake, create_groups
from lmpool.worker.status import WorkerStatus
from lmpool.worker.stealing import Thief, look
from tests.support.cluster import Cluster
from tests.support.protocol import FINGERPRINT, Caller, new_job
from tests.support.waiting import until

LANES = 64
ROOM = 32
WORKERS = ["a", "b"]


@pytest.fixture(scope="module")
def _cluster(server_binary: str) -> Iterator[Cluster]:
    """Whose nodes miss none, however busy the machine."""
    with Cluster(3, 0, node_timeout=15.0, cluster_require_full_coverage="no") as cluster:
        yield cluster


@pytest.fixture
def servers(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setattr("lmpool.cluster_servers.ANSWER_WITHIN", 60.0)  # nor is one slow for long
    servers = Servers.of_url(cluster.url, blocks_for=1.0, bounded=True)
    yield servers
    servers.close()


def shards_of(pool: str, servers: Servers, count: int = 6) -> tuple[ShardKeys, ...]:
    """Shards whose lanes are all in use."""
    shards = PoolKeys(pool).shards(FINGERPRINT[:8], count, LANES)
    for shard in shards:
        servers.for_shard(shard).hset(shard.bounds, "used", LANES)
    return shards


class Waits:
    """How often answers are waited for: however much was sent before, that is once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._sent = False
        send, read = NodeConnection.send_packed_command, NodeConnection.read_response

        def sending(connection: NodeConnection, *args: Any, **options: Any) -> None:
            self._sent = True
            send(connection, *args, **options)

        def reading(connection: NodeConnection, *args: Any, **options: Any) -> Any:
            self.count, self._sent = self.count + self._sent, False
            return read(connection, *args, **options)

        monkeypatch.setattr(NodeConnection, "send_packed_command", sending)
        monkeypatch.setattr(NodeConnection, "read_response", reading)


@pytest.mark.parametrize("shards", [6, 12])
@pytest.mark.parametrize("room", [ROOM, 100_000], ids=["few fit", "all fit"])
def test_a_batch_is_waited_for_a_few_times_however_many_shards_there_are(
    room: int, shards: int, servers: Servers, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_pool, me = shards_of(pool_name, servers, shards), WORKERS[0]
    homes, status = Homes(of_pool, me), WorkerStatus({}, lambda: None)
    status.patience = lambda: 0.0  # type: ignore[method-assign]
    for shard in of_pool:
        homes.update(shard, b"-1", LANES, WORKERS)
    create_groups(servers, of_pool, me)
    letters = DeadLetters(servers, me)
    batcher = Batcher(room, 0.001, 100_000)
    intake = Intake(
        servers, of_pool, me, batcher, status, Digester(FINGERPRINT), letters, False, homes=homes
    )
    for number, shard in enumerate(of_pool):
        lanes = own_lanes(me, WORKERS, number, LANES)
        other = next(lane for lane in range(LANES) if lane not in lanes)
        caller: Any = Caller(servers.for_shard(shard), shard)  # type: ignore[arg-type]
        caller.enqueue(new_job(number, 1), lane=lanes[0])
        caller.enqueue(new_job(number, 2), lane=lanes[1])
        caller.enqueue(new_job(number, 3), lane=other)
    intake._read_in(0, None)  # the servers know the scripts
    waits = Waits(monkeypatch)
    until(lambda: all(thief.due_in(idle=False) == 0 for thief in intake._thieves.values()))
    jobs = intake._read_in(room, None)
    assert (status.own_jobs, status.stolen_jobs) == (2 * shards, min(shards, room - 2 * shards))
    assert len(jobs) == status.own_jobs + status.stolen_jobs
    # Which lanes wait, where there are too many, and their jobs; others' lanes, and theirs.
    assert waits.count <= 4


ANSWERS = [b"0", b"1", b"2"]


def ask_thrice(pipeline: Pipeline) -> None:
    for answer in ANSWERS:
        pipeline.execute_command("ECHO", answer.decode())


def test_what_one_shard_refuses_others_of_its_node_answer(
    cluster: Cluster, servers: Servers, pool_name: str
) -> None:
    shards = shards_of(pool_name, servers)
    source = cluster.owner(shards[0].slot)
    moving, beside = [shard for shard in shards if cluster.owner(shard.slot) is source]
    target = next(node for node in cluster.primaries() if node is not source)
    lost: list[tuple[ShardKeys, Exception]] = []

    def read(shard: ShardKeys, pipeline: Pipeline) -> None:
        pipeline.hget(shard.bounds, "used")
        ask_thrice(pipeline)

    def ask() -> dict[ShardKeys, list[Any]]:
        asks = {shard: partial(read, shard) for shard in (moving, beside)}
        return servers.together(asks, lambda *what: lost.append(what))

    def look_on() -> None:
        assert ask() == {beside: [b"64", *ANSWERS]}
        ((shard, error),) = lost
        assert shard is moving
        assert isinstance(error, SlotMigrating)

    connection = servers.for_shard(beside).connection_pool.get_connection()._sock
    cluster.move_slot(moving.slot, target, keys=1000, meanwhile=look_on)
    until(lambda: ask() == {moving: [b"64", *ANSWERS], beside: [b"64", *ANSWERS]})
    assert servers.for_shard(beside).connection_pool.get_connection()._sock is connection


def test_a_node_that_is_away_takes_no_answer_from_others(
    cluster: Cluster, servers: Servers, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmpool.cluster_servers.PAUSES", (100.0, 100.0))
    shards = shards_of(pool_name, servers)
    victim = cluster.owner(shards[0].slot)
    away = {shard for shard in shards if cluster.owner(shard.slot) is victim}
    asks = dict.fromkeys(shards, ask_thrice)
    assert [*servers.together(asks).values()] == [ANSWERS] * 6
    victim.kill()
    lost: list[ShardKeys] = []
    found = servers.together(asks, lambda shard, error: lost.append(shard))
    assert found.keys() == set(shards) - away
    assert set(lost) == away
    servers.together(asks, lambda shard, error: lost.append(shard))
    assert len(lost) == len(away)  # asked again after a while


SLOW = "for n = 1, 2e7 do end return 'late'"  # a script's clock may stand still


def test_what_is_refused_for_good_is_raised_and_what_comes_late_answers_nothing_else(
    cluster: Cluster, servers: Servers, pool_name: str
) -> None:
    shards = shards_of(pool_name, servers)

    def spoil(pipeline: Pipeline) -> None:
        pipeline.execute_command("XLEN", shards[0].bounds)

    def be_slow(pipeline: Pipeline) -> None:
        pipeline.execute_command("EVAL", SLOW, 0)

    asks = dict.fromkeys(shards, ask_thrice)
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        servers.together({shards[0]: spoil, shards[-1]: be_slow})
    assert [*servers.together(asks).values()] == [ANSWERS] * 6


def test_lanes_are_looked_at_though_servers_have_forgotten_the_scripts(
    cluster: Cluster, servers: Servers, pool_name: str
) -> None:
    shards = shards_of(pool_name, servers)
    status, homes = WorkerStatus({}, lambda: None), Homes(shards, "a")
    for shard in shards:
        server: Any = servers.for_shard(shard)
        server.xgroup_create(shard.stream(lane=5).key, GROUP, id="0", mkstream=True)
        Caller(server, shard).enqueue(new_job(shard.number), lane=5)
    for node in cluster.primaries():
        node.command("SCRIPT", "FLUSH")
    thieves = [Thief(shard, homes, "a", status) for shard in shards]
    found = look(servers, thieves, "list", lambda shard, error: pytest.fail(str(error)))
    assert {stream.key for stream, _ in found} == {shard.stream(lane=5).key for shard in shards}


def test_notices_of_all_shards_are_waited_for_at_once(servers: Servers, pool_name: str) -> None:
    """What comes to one is there at once, however long the others are waited for."""
    shards = shards_of(pool_name, servers)
    lost: list[ShardKeys] = []

    def note_lost(shard: ShardKeys, error: Exception) -> None:
        lost.append(shard)

    for shard in (shards[4], shards[1]):
        entry = servers.for_shard(shard).xadd(shard.reply("me"), {"ok": "1"})

        def ask(server: Server, some: Sequence[ShardKeys]) -> Any:
            return server.xread({each.reply("me"): "0-0" for each in some}, count=9, block=60_000)

        (found,) = servers.read([shard, *shards[2:4]], ask, 10.0, note_lost)
        ((name, entries),) = found[1]
        assert (name, entries) == (shard.reply("me").encode(), [(entry, {b"ok": b"1"})])
        assert not lost
        servers.forget(shards)
