"""A worker's recovery: jobs of the dead, one at a time, from every stream, and of nobody else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import redis

from lmpool.connections import OwnWordsPipeline
from lmpool.keys import GROUP, PRIORITIES, JobStream, Priority, ShardKeys, streams
from lmpool.liveness import LIFE_MS
from lmpool.servers import Servers
from lmpool.wants import Digester
from lmpool.wire import Job, pack_job
from lmpool.worker import recovery as recovery_module
from lmpool.worker.batching import Batcher, Delivery
from lmpool.worker.dead_letters import DeadLetters
from lmpool.worker.intake import create_groups
from lmpool.worker.recovery import Recovery
from lmpool.worker.status import WorkerStatus
from tests.support.fake import FakeServer
from tests.support.heartbeats import beating
from tests.support.parts import Guarded, SplitServers
from tests.support.protocol import (
    FINGERPRINT,
    Caller,
    Consumer,
    be_steady,
    entries_of,
    new_job,
    shard_of_pool,
)
from tests.support.waiting import until


class CountedRecovery(Recovery):
    """Says how often it has looked."""

    looks = 0

    def _look_everywhere(self) -> Exception | None:
        found = super()._look_everywhere()
        self.looks += 1
        return found


class Worker:
    """A recovery at work on a thread of its own, and a batcher whose jobs the test runs."""

    def __init__(self, servers: Servers, shards: list[ShardKeys]) -> None:
        self.servers = servers
        self.status = WorkerStatus({}, lambda: None)
        self.batcher = Batcher(8, 0.0, 10_000)
        create_groups(servers, shards, "me")
        for shard in shards:
            be_steady(servers.for_shard(shard), shard)  # type: ignore[arg-type]
        self.recovery = CountedRecovery(
            servers, shards, "me", self.batcher, self.status, Digester(FINGERPRINT),
            DeadLetters(servers, "me"), 3,
        )  # fmt: skip
        self.thread = Guarded(self.recovery.run)

    def take(self) -> Delivery:
        """The job that it took over, when it has its turn."""
        until(self.batcher.alone_is_next, what="a job to be run alone")
        (delivery,) = self.batcher.take()
        self.batcher.done()
        return delivery

    def settle(self, delivery: Delivery) -> None:
        """As the publisher does, once it is answered."""
        server = self.servers.for_shard(delivery.stream.shard)
        server.xack(delivery.stream.key, GROUP, delivery.entry)
        server.xdel(delivery.stream.key, delivery.entry)  # type: ignore[attr-defined]
        self.status.let_go([delivery])

    def looks_again(self) -> None:
        """Wait until it has looked through all of its streams from now on."""
        seen = self.recovery.looks
        until(lambda: self.recovery.looks >= seen + 2)

    def stop(self) -> None:
        self.status.stopping.set()
        self.thread.end()


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def shards(pool_name: str) -> list[ShardKeys]:
    return [shard_of_pool(pool_name, shard=number) for number in range(3)]


Start = Callable[..., Worker]


@pytest.fixture
def start(
    fake_url: str, shards: list[ShardKeys], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    monkeypatch.setattr(recovery_module, "LOOK_EVERY", 0.01)
    workers: list[Worker] = []

    def start(servers: Servers | None = None) -> Worker:
        workers.append(Worker(servers or Servers.of_url(fake_url), shards))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()
        worker.servers.close()


def leave_behind(
    server: Any,
    shard: ShardKeys,
    *jobs: Job,
    priority: Priority = "interactive",
    owner: str = "dead",
) -> list[bytes]:
    """Jobs that a worker without a heartbeat holds."""
    for job in jobs:
        server.xadd(shard.stream(priority).key, {"job": pack_job(job)})
    return Consumer(server, shard, owner, priority).read()


def consumers(server: Any, stream: JobStream) -> dict[bytes, int]:
    return {c["name"]: c["pending"] for c in server.xinfo_consumers(stream.key, GROUP)}


def test_jobs_of_the_dead_are_run_from_every_stream_of_every_shard(
    start: Start, server: redis.Redis, shards: list[ShardKeys], caplog: pytest.LogCaptureFixture
) -> None:
    left: dict[tuple[str, bytes], Job] = {}
    for shard in shards:
        for priority in PRIORITIES:
            job = new_job(shard.number, PRIORITIES.index(priority), 5)
            (entry,) = leave_behind(server, shard, job, priority=priority)
            left[shard.stream(priority).key, entry] = job
    worker = start()
    found = {}
    for _ in left:
        delivery = worker.take()
        found[delivery.place] = delivery.job
        assert delivery.place in worker.status.held
        assert delivery.settled is not None
        worker.settle(delivery)
    assert found == left
    worker.looks_again()
    for stream in streams(shards):
        assert consumers(server, stream) == {b"me": 0}  # the dead one holds nothing: it is gone
    assert caplog.text.count("took over 2 jobs of dead, which is gone") == 3


def test_jobs_of_a_consumer_whose_name_is_no_utf8_are_run(
    start: Start, server: redis.Redis, shards: list[ShardKeys], caplog: pytest.LogCaptureFixture
) -> None:
    worker = start()
    for number in range(2):
        server.xadd(shards[0].stream().key, {"job": pack_job(new_job(number))})
    server.xreadgroup(GROUP, b"de\xffad", {shards[0].stream().key: ">"})
    for number in range(2):
        delivery = worker.take()
        assert delivery.job == new_job(number)
        worker.settle(delivery)
    worker.looks_again()
    assert consumers(server, shards[0].stream()) == {b"me": 0}
    assert "took over 2 jobs of de\ufffdad, which is gone" in caplog.text


def test_shards_on_several_servers_are_looked_through_where_they_lie(
    start: Start, shards: list[ShardKeys]
) -> None:
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        for shard in shards:
            leave_behind(clients[shard.number % 2], shard, new_job(shard.number))
        worker = start(SplitServers(clients))
        found = set()
        for _ in shards:
            delivery = worker.take()
            found.add((delivery.stream.shard.number, delivery.job.digest))
            worker.settle(delivery)
        assert found == {(number, new_job(number).digest) for number in range(3)}
        worker.stop()


def test_the_next_is_taken_over_only_when_the_last_is_answered(
    start: Start, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    shard = shards[1]
    entries = leave_behind(server, shard, new_job(1), new_job(2), new_job(3))
    worker = start()
    for entry in entries:
        delivery = worker.take()
        assert delivery.entry == entry
        # Only this one counts another delivery; the rest is still the dead one's.
        pending: Any = server.xpending_range(shard.stream().key, GROUP, "-", "+", 10)
        counts = {item["message_id"]: item["times_delivered"] for item in pending}
        assert counts == {e: 2 if e == entry else 1 for e in entries if e >= entry}
        assert not worker.batcher.alone_is_next()
        worker.settle(delivery)


def test_the_living_lose_nothing_however_long_it_takes(
    start: Start, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    shard = shards[2]
    leave_behind(server, shard, new_job(1), owner="slow")
    with beating(server, shard, "slow"):
        worker = start()
        worker.looks_again()
        assert consumers(server, shard.stream()) == {b"me": 0, b"slow": 1}
    delivery = worker.take()
    assert delivery.job == new_job(1)
    worker.settle(delivery)


def test_a_heartbeat_in_another_shard_keeps_nothing_here(
    start: Start, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    leave_behind(server, shards[2], new_job(1))
    server.set(shards[0].alive("dead"), b"")
    worker = start()
    worker.settle(worker.take())


def test_after_a_gap_in_a_shard_nobody_there_is_taken_for_dead(
    start: Start, server: redis.Redis, shards: list[ShardKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    life_ms = 12 * LIFE_MS  # half of it does not go by meanwhile
    monkeypatch.setattr(recovery_module, "LIFE_MS", life_ms)
    worker = start()
    be_steady(server, shards[0], for_ms=life_ms // 2)
    be_steady(server, shards[1], for_ms=life_ms)
    for shard in shards[:2]:
        leave_behind(server, shard, new_job(1))
    delivery = worker.take()
    assert delivery.stream.shard == shards[1]
    worker.settle(delivery)
    worker.looks_again()
    assert consumers(server, shards[0].stream())[b"dead"] == 1
    be_steady(server, shards[0], for_ms=life_ms)
    worker.settle(worker.take())


def redeliver(server: Any, shard: ShardKeys, entry: bytes, times: int) -> None:
    """Let an entry have been delivered so often."""
    server.xclaim(shard.stream().key, GROUP, "dead", 0, [entry], retrycount=times, justid=True)


@pytest.mark.parametrize(("deliveries", "runs"), [(1, True), (2, True), (3, False), (9, False)])
def test_a_job_that_kills_its_workers_is_given_up(
    deliveries: int, runs: bool, start: Start, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    shard, job, innocent = shards[1], new_job(1), new_job(2)
    caller = Caller(server, shard)
    caller.enqueue(job, innocent)
    entry, _ = Consumer(server, shard, "dead").read()
    redeliver(server, shard, entry, deliveries)
    worker = start()
    found = [worker.take()]
    worker.settle(found[0])
    if runs:
        assert found[0].job == job
        found.append(worker.take())
        worker.settle(found[1])
    assert found[-1].job == innocent
    worker.looks_again()
    dead = entries_of(server, shard.dead)
    assert len(dead) == (0 if runs else 1)
    if not runs:
        fields = dead[0][1]
        assert fields[b"job"] == pack_job(job)
        assert fields[b"deliveries"] == str(deliveries).encode()
        assert fields[b"worker"] == b"dead"
        (notice,) = caller.notices()
        assert (notice.digest, notice.status) == (job.digest, "failed")
        assert f"given up after {deliveries} deliveries" in notice.error
        assert "the last one dead" in notice.error
        assert server.hget(shard.counters, "failed") == b"1"
    assert server.xlen(shard.stream().key) == 0


@pytest.mark.parametrize(
    "fields",
    [{"job": b"garbage"}, {"other": b"field"}, {"job": pack_job(new_job(1, fingerprint="f" * 32))}],
    ids=["garbage", "no job", "of another model"],
)
def test_what_is_no_job_of_this_pool_is_put_aside(
    fields: dict[Any, Any], start: Start, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    shard = shards[1]
    server.xadd(shard.stream().key, fields)
    leave_behind(server, shard, new_job(1))
    worker = start()
    delivery = worker.take()
    assert delivery.job == new_job(1)
    worker.settle(delivery)
    ((_, dead),) = entries_of(server, shard.dead)
    assert dead[b"job"] == fields.get("job", b"")
    assert dead[b"worker"] == b"me"


def test_what_was_withdrawn_is_let_go(
    start: Start, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    shard = shards[0]
    gone, kept = leave_behind(server, shard, new_job(1), new_job(2))
    server.xdel(shard.stream().key, gone)
    worker = start()
    delivery = worker.take()
    assert delivery.entry == kept
    worker.settle(delivery)
    until(lambda: consumers(server, shard.stream()) == {b"me": 0})


def test_what_it_has_forgotten_itself_comes_back_and_what_it_holds_does_not(
    start: Start,
    server: redis.Redis,
    shards: list[ShardKeys],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = shards[2]
    monkeypatch.setattr(recovery_module, "FORGOTTEN_MS", 60_000)
    worker = start()
    # Younger ones may be on their way to it.
    forgotten, held = leave_behind(server, shard, new_job(1), new_job(2), owner="me")
    worker.status.held.add((shard.stream().key, held))
    worker.looks_again()
    assert not worker.batcher.alone_is_next()
    monkeypatch.setattr(recovery_module, "FORGOTTEN_MS", -1)
    delivery = worker.take()
    assert delivery.entry == forgotten
    worker.settle(delivery)
    worker.looks_again()
    assert not worker.batcher.alone_is_next()
    assert "took over 1 jobs forgotten here" in caplog.text


def test_what_it_has_forgotten_comes_back_where_the_servers_clock_was_set_back_since(
    start: Start, server: redis.Redis, shards: list[ShardKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the server says of each look that it was delivered at that very moment."""
    monkeypatch.setattr(recovery_module, "FORGOTTEN_MS", 50)
    execute = OwnWordsPipeline.execute

    def execute_then(pipeline: Any, raise_on_error: bool = True) -> list[Any]:
        answers = execute(pipeline, raise_on_error)
        for held in chain.from_iterable(filter(is_list, answers)):
            held["time_since_delivered"] = 0
        return answers

    monkeypatch.setattr(OwnWordsPipeline, "execute", execute_then)
    stream = shards[1].stream()
    (forgotten,) = leave_behind(server, shards[1], new_job(1), owner="me")
    worker = start()
    delivery = worker.take()
    assert delivery.place == (stream.key, forgotten)
    worker.settle(delivery)


def is_list(answer: object) -> bool:
    return isinstance(answer, list)


def test_the_same_entry_of_another_stream_is_another(
    start: Start, server: redis.Redis, shards: list[ShardKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_module, "FORGOTTEN_MS", -1)
    for number in (0, 1):
        key = shards[number].stream().key
        server.xadd(key, {"job": pack_job(new_job(number))}, id="7-1")
        Consumer(server, shards[number], "me").read()
    worker = start()
    worker.status.held.add((shards[0].stream().key, b"7-1"))
    delivery = worker.take()
    assert delivery.place == (shards[1].stream().key, b"7-1")
    worker.settle(delivery)


def test_it_stops_while_a_job_is_not_answered(
    start: Start, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    leave_behind(server, shards[0], new_job(1), new_job(2))
    worker = start()
    delivery = worker.take()
    worker.stop()
    assert not worker.batcher.alone_is_next()  # the second one is for others
    assert delivery.place in worker.status.held


def test_a_lost_server_is_waited_for(
    start: Start,
    server: redis.Redis,
    shards: list[ShardKeys],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = redis.exceptions.ConnectionError("gone")
    look, failures = Recovery._look, [gone, OSError("gone"), gone]

    def fail(self: Recovery, shard: ShardKeys) -> None:
        if failures:
            raise failures.pop()
        look(self, shard)

    monkeypatch.setattr(Recovery, "_look", fail)
    leave_behind(server, shards[0], new_job(1))
    with caplog.at_level(logging.WARNING):
        worker = start()
        worker.settle(worker.take())
    assert caplog.text.count("jobs of dead workers cannot be looked for") == 2  # reasons


def test_one_stream_that_cannot_be_read_keeps_no_other_from_being_looked_through(
    start: Start, server: redis.Redis, shards: list[ShardKeys]
) -> None:
    worker = start()
    server.xgroup_destroy(shards[0].stream().key, GROUP)
    leave_behind(server, shards[2], new_job(1))
    delivery = worker.take()
    assert delivery.job == new_job(1)
    worker.settle(delivery)


def test_one_server_that_is_lost_keeps_no_other_from_being_looked_through(
    start: Start, shards: list[ShardKeys]
) -> None:
    with FakeServer() as first, FakeServer() as second:
        clients = [first.client(), second.client()]
        leave_behind(clients[1], shards[1], new_job(1))
        asked: list[int] = []

        def refuse(**options: Any) -> None:
            asked.append(worker.recovery.looks)
            raise redis.exceptions.ConnectionError("gone")

        worker = start(SplitServers(clients))
        clients[0].pipeline = refuse  # type: ignore[method-assign]
        delivery = worker.take()
        assert delivery.job == new_job(1)
        asked.clear()
        worker.settle(delivery)
        until(lambda: len(asked) >= 3)
        assert len(set(asked)) == len(asked)  # once a look, not once a shard
        worker.stop()
