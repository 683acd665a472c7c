"""``lmpool shards``: a pool that gets other shards and lanes while it is served."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from typer.testing import CliRunner

from lmpool import PooledLM, dead_letters
from lmpool import shards as shards_module
from lmpool.backends.mock import mock_row
from lmpool.cli import app
from lmpool.errors import (
    LmpoolError,
    NoWorkers,
    PoolMismatch,
    ServerRefused,
    SettingsError,
    UnknownPool,
    WireError,
)
from lmpool.keys import PROTOCOL, PoolKeys, ShardKeys
from lmpool.liveness import as_served
from lmpool.model_info import ModelInfo
from lmpool.pool_view import PoolViewer
from lmpool.producer import base_lm, sender
from lmpool.producer.statistics import PoolStatistics
from lmpool.servers import Servers
from lmpool.shards import PoolShards, change, look
from lmpool.slots import slot_of
from lmpool.worker import moving
from lmpool.worker.adapters import adapter_fingerprint
from tests.integration.test_adapters import registered, write_adapter
from tests.integration.test_cluster_moves import register
from tests.integration.test_streams import drawn_as_read
from tests.support.clients import connected
from tests.support.cluster import Cluster
from tests.support.faults import Faults
from tests.support.gate import Gate
from tests.support.heartbeats import beating, renewed
from tests.support.hold import Hold
from tests.support.pools import Asking, pool_shards, until_at_rest, worker_processes
from tests.support.redis_client import open_redis
from tests.support.server import RealServer
from tests.support.streams import Reader, continuation
from tests.support.waiting import until
from tests.support.workers import InProcessWorker, in_process_worker, worker_process

VOCAB = 256
DELAY = 0.4
"""Seconds for which an engine holds its batch: at each change something is in flight."""


@dataclass
class Askers:
    """Callers who ask one call after another, and compare every row with the right one."""

    url: str
    pool: str
    asked: int = 0
    failures: list[Any] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    resubmitted: int = 0

    def run(self, number: int) -> None:
        random = np.random.default_rng(number)
        with connected(self.url, self.pool, cache_bytes=0) as lm:
            while not self.ended.is_set():
                prompts = random.integers(0, VOCAB, (12, 8)).tolist()
                try:
                    rows = lm.batch_next_token_logprobs_sync(prompts, timeout=60)
                    for prompt, row in zip(prompts, rows, strict=True):
                        np.testing.assert_array_equal(row, mock_row(prompt, VOCAB))
                except Exception as error:
                    self.failures.append(error)
                self.asked += 1
            self.resubmitted += lm.statistics()["resubmitted"]

    def wait_for_more(self, calls: int = 8) -> None:
        """Until so many calls more were answered: two of each caller, one of which began later."""
        before = self.asked
        until(lambda: self.asked > before + calls or self.failures, what="calls")
        assert not self.failures, self.failures[:3]


@contextmanager
def asking(url: str, pool: str, callers: int = 4) -> Iterator[Askers]:
    askers = Askers(url, pool)
    with ThreadPoolExecutor() as threads:
        running: list[Future[None]] = [threads.submit(askers.run, n) for n in range(callers)]
        try:
            yield askers
        finally:
            askers.ended.set()
        for done in running:
            done.result(60)
    assert not askers.failures, askers.failures[:3]


def slow(folder: Path) -> dict[str, Any]:
    """Settings of an engine that holds its jobs for a while."""
    return {**Faults(folder).settings(delay=DELAY), "batch_size": 16}


def moved(found: PoolShards, shards: int, lanes: int, workers: int) -> bool:
    """Whether the pool lies so and none of its `workers` has yet to move. On a busy machine one may
    be late to say that it lives, which is nobody's then."""
    assert (len(found.shards), found.lanes, found.behind) == (shards, lanes, ()), found
    assert 0 < len(found.workers) <= workers, found
    return True


def test_shards_and_lanes_change_under_load(server_url, redis_client, pool_name, tmp_path):
    with worker_processes(server_url, pool_name, 2, shards=1, lanes=1, **slow(tmp_path)) as workers:
        pids = {worker.pid for worker in workers}
        with asking(server_url, pool_name) as askers:
            askers.wait_for_more()
            for shards, lanes in ((4, None), (2, None), (None, 64), (None, 8), (3, 2), (1, 1)):
                before = look(server_url, pool_name)
                found = change(server_url, pool_name, shards, lanes)
                moved(found, shards or len(before.shards), lanes or before.lanes, 2)
                assert found.layout not in ("", before.layout)
                askers.wait_for_more()
        with connected(server_url, pool_name) as lm:
            assert lm.info.shards == lm.info.lanes == 1

            def is_all_there() -> bool:
                found = lm.pool_statistics_sync()
                there = {worker["pid"] for worker in found["workers"]}
                return there == pids and found["computed"] >= 12 * askers.asked

            until(is_all_there, what="the workers, and what they counted before")
        assert askers.resubmitted > 0  # else nothing was in flight
        assert all(worker.log.count(" serves ") == 1 for worker in workers)
        until_at_rest(redis_client, pool_name)
        assert len(pool_shards(redis_client, pool_name)) == 1


def test_a_pool_on_a_cluster_moves_under_load(server_binary, pool_name, tmp_path):
    with (
        Cluster(3, node_timeout=2.0) as cluster,
        worker_processes(cluster.url, pool_name, 2, shards=2, lanes=1, **slow(tmp_path)) as workers,
    ):
        with asking(cluster.url, pool_name) as askers:
            askers.wait_for_more()
            for shards, lanes in ((6, None), (None, 64), (None, 8), (4, 1)):
                before = look(cluster.url, pool_name)
                found = change(cluster.url, pool_name, shards, lanes)
                moved(found, shards or len(before.shards), lanes or before.lanes, 2)
                assert {shard.node for shard in found.shards} <= {
                    f"127.0.0.1:{node.cluster_port}" for node in cluster.primaries()
                }
                askers.wait_for_more()
        assert askers.resubmitted > 0
        assert all(worker.log.count(" serves ") == 1 for worker in workers)
        with open_redis(cluster.url) as client:
            until_at_rest(client, pool_name)


def test_a_pool_moves_while_a_primary_dies(server_binary, pool_name, tmp_path):
    with (
        Cluster(3, 1, node_timeout=2.0) as cluster,
        worker_processes(cluster.url, pool_name, 2, shards=3, lanes=8, **slow(tmp_path)),
        asking(cluster.url, pool_name) as askers,
    ):
        askers.wait_for_more()
        slot = slot_of(PoolKeys(pool_name).info)
        others = [shard.slot for shard in look(cluster.url, pool_name).shards]
        other = next(o for o in others if cluster.owner(o) is not cluster.owner(slot))
        node = cluster.owner(other)
        node.kill()
        change(cluster.url, pool_name, 6, wait=0.0)  # what is away cannot be seen
        cluster.wait_for_failover(other, node)
        until(lambda: not look(cluster.url, pool_name).behind, what="the workers to move")
        node.start()
        cluster.wait_until_ok()
        askers.wait_for_more(40)
        # The one that holds the model info.
        node = cluster.owner(slot)
        asked = ThreadPoolExecutor().submit(eventually, lambda: change(cluster.url, pool_name, 4))
        node.kill()
        cluster.wait_for_failover(slot, node)
        found = asked.result(150)
        assert (len(found.shards), found.lanes) == (4, 8)
        # Who has just lost that primary may be late to say that it lives.
        until(lambda: len(look(cluster.url, pool_name).workers) == 2, what="both to move")
        node.start()
        cluster.wait_until_ok()
        askers.wait_for_more(40)


def eventually(do: Any) -> Any:
    """What it does once it can."""
    until_then = time.monotonic() + 60
    while True:
        try:
            return do()
        except LmpoolError:
            if time.monotonic() > until_then:
                raise
        time.sleep(0.1)


def test_adapters_counters_and_dead_letters_come_along(
    server_url, redis_client, pool_name, tmp_path
):
    one, two = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two", "two")
    options = {"adapter_dirs": [str(tmp_path)], "shards": 1, "lanes": 1}
    with (
        worker_processes(server_url, pool_name, 2, **options),
        connected(server_url, pool_name, cache_bytes=0) as lm,
        connected(server_url, pool_name) as idle,
    ):
        assert len(idle.shards) == 1
        lm.add_new_lora(one, "one")
        lm.add_new_lora(two, "two")
        prints = registered(redis_client, pool_name)
        lm.batch_next_token_logprobs_sync([[n, 1] for n in range(50)])
        (shard,) = pool_shards(redis_client, pool_name)
        for number in range(150):  # more than travel together
            fields = {"job": b"x", "reason": f"so {number}", "deliveries": 2, "worker": "w"}
            redis_client.xadd(shard.dead, fields, id=f"{1000 + number}-0")
        counted, letters = 50, [f"so {number}" for number in range(150)]
        for shards in (3, 2, 1):
            old = pool_shards(redis_client, pool_name)
            moved(change(server_url, pool_name, shards), shards, 1, 2)
            # Who asks for nothing finds it, too.
            wait_for(idle, counted, letters)
            found = dead_letters.read(lm)
            times = sorted(round(letter.given_up.timestamp() * 1000) for letter in found)
            assert times == list(range(1150 - len(letters), 1150))
            assert len(idle.shards) == shards
            # Each job was taken once, and counted once.
            until(lambda: is_taken_once(idle.pool_statistics_sync()), what="the jobs taken")
            # It was there as the first worker was.
            assert registered(redis_client, pool_name) == prints
            row = lm.next_token_logprobs_sync([shards, 9], lora_name="two")
            np.testing.assert_array_equal(row, mock_row([shards, 9], 256, f"two@{prints['two']}"))
            assert dead_letters.drop(lm, [min(found, key=lambda letter: letter.given_up)]) == 1
            counted, letters = counted + 1, letters[1:]
            until(lambda old=old: all(ends(redis_client, s) for s in old), what="the old to end")
        # What was removed meanwhile is not there again.
        lm.remove_lora("one")
        moved(change(server_url, pool_name, 2), 2, 1, 2)
        assert registered(redis_client, pool_name).keys() == {"two"}
        with pytest.raises(LmpoolError, match="known: two"):
            idle.next_token_logprobs_sync([1], lora_name="one")


def is_taken_once(found: PoolStatistics) -> bool:
    """Whether workers say of no job twice that they took it, but for those that one gave back."""
    return 0 < found["own_jobs"] + found["stolen_jobs"] < 1.5 * found["computed"]


def wait_for(lm: PooledLM, computed: int, letters: Sequence[str]) -> None:
    """Until the counter and the dead letters are these."""
    until(lambda: lm.pool_statistics_sync()["computed"] == computed, what="the counters")
    wanted = sorted(letters)
    until(
        lambda: sorted(letter.reason for letter in dead_letters.read(lm)) == wanted,
        what="the dead letters",
    )


def ends(client: redis.Redis, shard: ShardKeys) -> bool:
    """Whether every key of a shard ends by itself."""
    keys = list(client.scan_iter(f"{shard.prefix}:*", count=1000))
    return all(client.pttl(key) != -1 for key in keys)


def test_workers_that_are_busy_or_frozen_keep_nobody_waiting(
    server_url, redis_client, pool_name, tmp_path
):
    gate = Gate(tmp_path)
    with (
        worker_process(server_url, pool_name, shards=1, lanes=1, **gate.settings()) as busy,
        connected(server_url, pool_name) as lm,
    ):
        held = Asking(lm, [[1, 2]])
        gate.wait_for_batch()
        with (
            worker_process(server_url, pool_name, shards=1, lanes=1) as frozen,
            worker_process(server_url, pool_name, shards=1, lanes=1),
        ):
            (shard,) = pool_shards(redis_client, pool_name)
            frozen_id = frozen.wait_until_alive()["id"]
            beat = redis_client.get(shard.alive(frozen_id))
            frozen.pause()
            # It counts as living until the others have moved.
            with beating(redis_client, shard, frozen_id, beat):
                change(server_url, pool_name, 3, wait=0.0)

                def the_others_moved() -> bool:
                    found = look(server_url, pool_name)
                    behind = any(str(frozen.pid) in b for b in found.behind)
                    return behind and len(found.workers) == 2

                until(the_others_moved, what="all but the frozen one to move")
            # What the busy one runs is asked for where others are idle.
            np.testing.assert_array_equal(held.rows(), [mock_row([1, 2], 256)])
            gate.open()
            until(
                lambda: not look(server_url, pool_name).behind,
                what="a worker that gives no sign of life to be none",
            )
            frozen.resume()
            until(lambda: len(look(server_url, pool_name).workers) == 3, what="it to move")
            rows = lm.batch_next_token_logprobs_sync([[n] for n in range(40)], timeout=60)
            np.testing.assert_array_equal(rows, [mock_row([n], 256) for n in range(40)])
        assert busy.log.count(" serves ") == 1


def test_settings_of_workers_do_not_take_a_change_back(server_url, redis_client, pool_name):
    with worker_process(server_url, pool_name, shards=1, lanes=1) as first:
        moved(change(server_url, pool_name, 3, 2), 3, 2, 1)
        for settings, said in (
            ({}, ""),
            ({"shards": 3}, ""),
            ({"shards": 1}, "LMPOOL_SHARDS=1"),
            ({"lanes": 4, "replace": True}, "LMPOOL_LANES=4"),
            ({"shards": 5, "lanes": 4}, "LMPOOL_SHARDS=5, LMPOOL_LANES=4"),
        ):
            with worker_process(server_url, pool_name, **settings) as worker:
                moved(look(server_url, pool_name), 3, 2, 2)
                told = f"gave the pool 3 shards of 2 lanes: not taken of this worker: {said}\n"
                assert (told in worker.log) == bool(said)
                assert said or "not taken" not in worker.log
        first.terminate()
        assert first.wait() == 0
    # Nor when nobody was there meanwhile.
    with worker_process(server_url, pool_name, shards=1):
        moved(look(server_url, pool_name), 3, 2, 1)
        moved(change(server_url, pool_name, 1, 1), 1, 1, 1)
    # Another model is another pool.
    with worker_process(server_url, pool_name, shards=2, model="x", engine_opts={"vocab_size": 9}):
        assert len(look(server_url, pool_name).shards) == 2


def test_what_died_in_the_midst_is_taken_along_by_the_next(
    server_url, redis_client, pool_name, tmp_path
):
    one, options = write_adapter(tmp_path / "one"), {"adapter_dirs": [str(tmp_path)]}
    with worker_process(server_url, pool_name, shards=1, lanes=1, **options) as worker:
        with connected(server_url, pool_name, cache_bytes=0) as lm:
            lm.batch_next_token_logprobs_sync([[n] for n in range(30)])
            lm.add_new_lora(one, "one")
            adapted = lm.next_token_logprobs_sync([7], lora_name="one")
        (shard,) = pool_shards(redis_client, pool_name)
        redis_client.xadd(shard.dead, {"job": b"x", "reason": "so"})
        worker.pause()
        change(server_url, pool_name, 2, wait=0.0)
        worker.kill()
        with (
            worker_process(server_url, pool_name, **options),
            connected(server_url, pool_name, cache_bytes=0) as lm,
        ):
            assert len(lm.shards) == 2
            until(lambda: lm.pool_statistics_sync()["computed"] == 31, what="the counters")
            found = lm.next_token_logprobs_sync([7], lora_name="one")
            np.testing.assert_array_equal(found, adapted)
            until(lambda: len(dead_letters.read(lm)) == 1, what="the dead letter")


def test_a_server_that_was_restored_does_not_bring_the_old_back(
    any_server, redis_client, pool_name
):
    keys = PoolKeys(pool_name)
    with in_process_worker(any_server, pool_name, shards=1, lanes=1) as worker:
        before, serving = redis_client.get(keys.info), redis_client.get(keys.serving)
        moved(change(any_server, pool_name, 3), 3, 1, 1)
        after = redis_client.get(keys.info)
        redis_client.set(keys.info, before)
        redis_client.set(keys.serving, serving, px=5000)
        until(
            lambda: ModelInfo.unpack(redis_client.get(keys.info)).shards == 3,
            what="the worker to say it again",
        )
        redis_client.delete(keys.info)  # lost
        until(lambda: redis_client.get(keys.info), what="it to be said again")
        assert ModelInfo.unpack(redis_client.get(keys.info)) == ModelInfo.unpack(after)
        assert worker.service.status.failure is None


@pytest.mark.parametrize("lost", ["everything", "bounds", "their keys"])
def test_who_comes_after_a_loss_takes_no_adapter_away(
    lost, any_server, redis_client, pool_name, tmp_path
):
    options = {"adapter_dirs": [str(tmp_path)], "shards": 1, "lanes": 1}
    path = write_adapter(tmp_path / "one")
    with in_process_worker(any_server, pool_name, **options) as worker:
        moved(change(any_server, pool_name, 2), 2, 1, 1)
        worker.service.loop.call(lambda: worker.service.adapters.add("one", path)).result(60)
        shards = pool_shards(redis_client, pool_name)
        if lost == "everything":
            redis_client.delete(*redis_client.keys(f"*{pool_name}*"))
        elif lost == "their keys":
            redis_client.delete(*(shard.bounds for shard in shards))
        else:
            for shard in shards:
                redis_client.set(shard.bounds, "damaged")

        def is_back() -> bool:
            # What a worker had said again by then may have been deleted last.
            return bool(redis_client.exists(PoolKeys(pool_name).info)) and all(
                redis_client.type(shard.bounds) == b"hash"
                and redis_client.hget(shard.bounds, "layout")
                and redis_client.hexists(shard.adapters, "one")
                for shard in shards
            )

        until(is_back, what="the pool, the layout's name and the adapters")
        with in_process_worker(any_server, pool_name, **options):
            assert registered(redis_client, pool_name).keys() == {"one"}


def test_a_worker_of_an_older_release_takes_no_change_back(any_server, redis_client, pool_name):
    """It knows of no layouts: what it publishes, and says that it serves, has none."""
    keys = PoolKeys(pool_name)
    with in_process_worker(any_server, pool_name, shards=1, lanes=1):
        moved(change(any_server, pool_name, 3), 3, 1, 1)
        after = ModelInfo.unpack(redis_client.get(keys.info))
        older = replace(after, layout="", layouts=())
        redis_client.set(keys.info, older.pack())
        redis_client.set(keys.serving, older.mark(), px=5000)
        until(
            lambda: ModelInfo.unpack(redis_client.get(keys.info)) == after,
            what="the worker to say it again",
        )
        # Nor is what is asked for as that one has just started.
        redis_client.set(keys.info, older.pack())
        redis_client.set(keys.serving, older.mark(), px=5000)
        eventually(lambda: moved(change(any_server, pool_name, 2), 2, 1, 1))


def test_there_and_back_within_a_beat(any_server, redis_client, pool_name):
    with (
        in_process_worker(any_server, pool_name, shards=1, lanes=1),
        connected(any_server, pool_name, cache_bytes=0) as lm,
    ):
        lm.next_token_logprobs_sync([1])
        change(any_server, pool_name, 2, wait=0.0)
        moved(change(any_server, pool_name, 1), 1, 1, 1)
        row = lm.next_token_logprobs_sync([2], timeout=60)
        np.testing.assert_array_equal(row, mock_row([2], 256))
        until(lambda: lm.pool_statistics_sync()["computed"] == 2, what="the counters")
        moved(change(any_server, pool_name, 2), 2, 1, 1)


def test_streams_of_lanes_that_are_gone_end(any_server, redis_client, pool_name, monkeypatch):
    monkeypatch.setattr(moving, "CARRY_AFTER", (0.0, 0.5))
    settings = {"shards": 1, "lanes": 8, "engine_opts": {"delay": 1.0}, "batch_size": 2}
    with (
        in_process_worker(any_server, pool_name, **settings),
        connected(any_server, pool_name, cache_bytes=0) as lm,
        Hold() as hold,
    ):
        (wide,) = pool_shards(redis_client, pool_name)
        redis_client.hset(wide.bounds, "used", 8)  # as if there were more workers
        prompts = [[n, n] for n in range(12)]
        held = Asking(lm, prompts)
        until(lambda: look(any_server, pool_name).shards[0].jobs == 12, what="the jobs")
        hold.open()
        moved(change(any_server, pool_name, lanes=2), 1, 2, 1)
        np.testing.assert_array_equal(held.rows(), [mock_row(p, 256) for p in prompts])
        gone = [stream.key for stream in wide.streams if stream.lane >= 2]
        until(
            lambda: all(redis_client.pttl(key) > 0 and not redis_client.xlen(key) for key in gone),
            what="the streams to end",
        )
        # And they are there again with their lanes.
        moved(change(any_server, pool_name, lanes=8), 1, 8, 1)
        assert all(redis_client.pttl(key) == -1 for key in gone)


@contextmanager
def staying(*workers: InProcessWorker) -> Iterator[None]:
    """Workers do not move with the pool while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        for worker in workers:
            assert worker.service.seat is not None
            patch.setattr(worker.service.seat.heartbeat, "_on_moved", lambda info: None)
        yield


def asked_of(lm: PooledLM, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The workers that are asked when all are to do something."""
    asked: set[str] = set()
    with monkeypatch.context() as patch:
        patch.setattr(base_lm, "ask_workers", lambda _, workers, *a, **k: asked.update(workers))
        lm.clear_kv_cache()
    return asked


def test_workers_that_move_while_they_are_looked_for_are_asked(
    any_server: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        in_process_worker(any_server, pool_name, shards=1, lanes=1) as worker,
        connected(any_server, pool_name) as lm,
    ):
        looks, real = list[int](), base_lm.pool_statistics

        def look_later(*given: Any, **options: Any) -> PoolStatistics:
            looks.append(len(given[1]))
            if len(looks) == 1:  # the client has seen where the pool is, which so moves
                moved(change(any_server, pool_name, 2), 2, 1, 1)
            return real(*given, **options)

        monkeypatch.setattr(base_lm, "pool_statistics", look_later)
        assert asked_of(lm, monkeypatch) == {worker.id}
        assert looks == [1, 2]


def test_who_comes_before_any_worker_has_moved_finds_all_that_is_there(
    any_server, pool_name, tmp_path, monkeypatch
):
    path = write_adapter(tmp_path / "one")
    options = {"shards": 1, "lanes": 1, "adapter_dirs": [str(tmp_path)]}
    with (
        in_process_worker(any_server, pool_name, **options) as worker,
        connected(any_server, pool_name) as idle,
    ):
        register(worker, "one", path)
        right = mock_row([1], VOCAB, f"one@{adapter_fingerprint(tmp_path / 'one')}")
        moved(change(any_server, pool_name, 2), 2, 1, 1)
        with staying(worker):
            for shards in (3, 4):
                change(any_server, pool_name, shards, wait=0.0)
            with connected(any_server, pool_name) as new:
                # The one has never heard of the layout in which the worker is.
                for lm in (idle, new):
                    assert len(lm.shards) == 2
                    np.testing.assert_array_equal(
                        lm.next_token_logprobs_sync([1], "one", timeout=60), right
                    )
                    found = lm.pool_statistics_sync()
                    assert [each["id"] for each in found["workers"]] == [worker.id]
                    assert asked_of(lm, monkeypatch) == {worker.id}
                with PoolViewer(any_server, pool_name) as viewer:
                    found = viewer.read().statistics
                    assert [each["id"] for each in found["workers"]] == [worker.id]
        moved(change(any_server, pool_name, 4), 4, 1, 1)
        assert len(idle.shards) == 4


@pytest.mark.parametrize("came", ["before", "amid"])
def test_who_asked_nothing_since_the_pool_moved_finds_its_workers(any_server, pool_name, came):
    with (
        in_process_worker(any_server, pool_name, shards=1, lanes=1) as worker,
        connected(any_server, pool_name) as before,
        open_redis(any_server) as server,
        ExitStack() as stack,
    ):
        (left,) = before.shards
        with staying(worker):
            change(any_server, pool_name, 2, wait=0.0)
            amid = stack.enter_context(connected(any_server, pool_name))
            assert amid._client.shards == (left,)
        moved(change(any_server, pool_name, 2), 2, 1, 1)
        until(lambda: not server.exists(left.alive(worker.id)), what="its last sign of life there")
        (before if came == "before" else amid).wait_for_workers_sync(30)


def test_a_pool_that_nobody_serves_is_where_it_was_known_to_be(any_server, pool_name):
    """Its workers may be heard of again there, and may never move."""
    with in_process_worker(any_server, pool_name, shards=1, lanes=1) as worker:
        moved(change(any_server, pool_name, 2), 2, 1, 1)
        with connected(any_server, pool_name) as lm:
            info = lm.info
        shards = info.shard_keys(PoolKeys(pool_name))
    (known,) = info.former()
    with open_redis(any_server) as server, closing(Servers.of_url(any_server)) as servers:
        until(lambda: not any(server.exists(s.alive(worker.id)) for s in shards), what="its end")
        assert as_served(servers, PoolKeys(pool_name), info, known) == known
        assert as_served(servers, PoolKeys(pool_name), info) == info


def test_those_who_have_yet_to_move_are_asked_with_the_others(any_server, pool_name, monkeypatch):
    options = {"shards": 1, "lanes": 1}
    with (
        in_process_worker(any_server, pool_name, **options) as one,
        in_process_worker(any_server, pool_name, **options) as other,
        connected(any_server, pool_name) as lm,
        staying(one),
    ):
        change(any_server, pool_name, 2, wait=0.0)
        until(lambda: look(any_server, pool_name).workers == (other.id,), what="one to move")
        assert len(lm.shards) == 2
        assert asked_of(lm, monkeypatch) == {one.id, other.id}


def test_who_moves_while_the_pool_is_looked_at_is_seen(
    server_url, redis_client, pool_name, monkeypatch
):
    with in_process_worker(server_url, pool_name, shards=2, lanes=1) as worker:
        beats_of = [shard.alive(worker.id) for shard in pool_shards(redis_client, pool_name)]
        looks = 0

        def beats(*arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            found = read(*arguments)
            if looks == 1:
                held.close()
                until(lambda: not redis_client.exists(*beats_of), what="the worker to move")
            return found

        read = shards_module._beats
        with ExitStack() as held:
            held.enter_context(staying(worker))
            change(server_url, pool_name, 1, wait=0.0)
            monkeypatch.setattr(shards_module, "_beats", beats)
            found = look(server_url, pool_name)
        assert (found.workers, found.behind) == ((worker.id,), ())


def test_clients_of_an_older_release_do_not_wait_for_who_is_busy(
    server_url, pool_name, tmp_path, monkeypatch
):
    """Those look elsewhere once nobody is where they are."""
    monkeypatch.setattr(sender, "lies_elsewhere", lambda *_: False)
    gate = Gate(tmp_path)
    with (
        worker_process(server_url, pool_name, shards=1, lanes=1, **gate.settings()),
        connected(server_url, pool_name) as lm,
    ):
        held = Asking(lm, [[1, 2]])
        gate.wait_for_batch()
        with worker_process(server_url, pool_name, shards=1, lanes=1):
            moved(change(server_url, pool_name, 2), 2, 1, 2)
            np.testing.assert_array_equal(held.rows(), [mock_row([1, 2], 256)])
            gate.open()


def test_a_continuation_that_runs_is_told_on(any_server, pool_name):
    slowly = {"shards": 1, "lanes": 1, "engine_opts": {"delay": 0.02}}
    readers: list[Reader] = []
    with (
        in_process_worker(any_server, pool_name, **slowly) as worker,
        connected(any_server, pool_name) as lm,
        # However late it is read, few are drawn ahead. What is told where the client reads no more
        # is told again with the next one.
        drawn_as_read(lambda: 30 + sum(reader.drawn for reader in readers), patience=0.5),
    ):
        reader = Reader(lm, [1, 5], max_tokens=400, seed=3, eos_token_ids=[])
        readers.append(reader)
        until(lambda: len(reader.pieces) > 20, what="the first pieces")
        moved(change(any_server, pool_name, 3), 3, 1, 1)
        assert reader.tokens() == continuation([1, 5], 400, 3)
        assert worker.service.status.failure is None
        # What was drawn while the client moved came together, and then one after another.
        assert reader.pieces[-1].token_ids.size < 50


def test_of_two_changes_at_once_one_is_made(server_url, pool_name):
    with worker_processes(server_url, pool_name, 2, shards=1, lanes=1):
        for _ in range(3):
            before = look(server_url, pool_name)
            with ThreadPoolExecutor() as threads:
                numbers = [n for n in (2, 3, 4, 5) if n != len(before.shards)]
                asked = [threads.submit(change, server_url, pool_name, n) for n in numbers]
                errors = [each.exception(60) for each in asked]
            told = [error for error in errors if error is not None]
            assert all(isinstance(error, PoolMismatch) for error in told), told
            assert all("was changed by another" in str(error) for error in told)
            found = look(server_url, pool_name)
            assert found.layout != before.layout
            until(lambda: len(look(server_url, pool_name).workers) == 2, what="all to move")
            moved(look(server_url, pool_name), len(found.shards), 1, 2)


@pytest.mark.parametrize(
    ("shards", "lanes", "said"),
    [
        (0, None, "shards=0: write a whole number from 1 to 64"),
        (65, None, "shards=65: write a whole number from 1 to 64"),
        (None, 0, "lanes=0: write a whole number from 1 to 1024"),
        (2, 1025, "lanes=1025: write a whole number from 1 to 1024"),
        (True, None, "shards=True: write"),
    ],
)
def test_numbers_that_cannot_be_are_refused(any_server, pool_name, shards, lanes, said):
    with in_process_worker(any_server, pool_name, shards=1, lanes=1):
        with pytest.raises(SettingsError, match=said):
            change(any_server, pool_name, shards, lanes)
        moved(look(any_server, pool_name), 1, 1, 1)


def test_pools_that_cannot_be_changed_say_why(any_server, redis_client, pool_name):
    for ask in (look, lambda url, pool: change(url, pool, 2)):
        with pytest.raises(
            UnknownPool, match=rf"lmpool worker --url .* --pool {pool_name}, or check"
        ):
            ask(any_server, pool_name)
    with in_process_worker(any_server, pool_name, shards=1):
        pass
    with pytest.raises(
        NoWorkers, match=rf"start one with lmpool worker --url .* --pool {pool_name}, then"
    ):
        change(any_server, pool_name, 2)
    keys = PoolKeys(pool_name)
    info = ModelInfo.unpack(redis_client.get(keys.info))
    redis_client.set(keys.info, replace(info, protocols=(PROTOCOL + 1,)).pack())
    with pytest.raises(WireError, match="upgrade this lmpool"):
        change(any_server, pool_name, 2)
    redis_client.set(keys.info, b"nonsense")
    with pytest.raises(WireError, match="model info"):
        change(any_server, pool_name, 2)
    assert redis_client.get(keys.info) == b"nonsense"


def test_the_operator_may_change_a_pool_and_a_producer_may_not(server_binary, pool_name):
    acl = Path(__file__).parents[2] / "deploy" / "redis" / "users.acl"
    with RealServer(binary=server_binary, aclfile=str(acl), tcp=True) as server:
        address = server.url.rpartition("/")[0].removeprefix("redis://")
        urls = {
            role: f"redis://{role}:change-this-{role}@{address}/0"
            for role in ("producer", "worker", "operator")
        }
        with (
            worker_process(urls["worker"], pool_name, shards=1, lanes=1),
            connected(urls["producer"], pool_name) as lm,
        ):
            with pytest.raises(ServerRefused, match=r"the user operator .*users\.acl"):
                change(urls["producer"], pool_name, 2)
            lm.next_token_logprobs_sync([1])
            moved(change(urls["operator"], pool_name, 2, 3), 2, 3, 1)
            row = lm.next_token_logprobs_sync([2], timeout=60)
            np.testing.assert_array_equal(row, mock_row([2], 256))
            until(lambda: len(lm.shards) == 2, what="the client to move")
            until(lambda: lm.pool_statistics_sync()["computed"] == 2, what="the counters")


def test_a_client_that_moves_ends_its_reads_of_before(server_binary, pool_name):
    with (
        Cluster(3, node_timeout=2.0) as cluster,
        in_process_worker(cluster.url, pool_name, shards=6),
        connected(cluster.url, pool_name, cache_bytes=0) as lm,
    ):

        def reads() -> int:
            """Connections whose last command was a blocking read of notices."""
            found = 0
            for node in cluster.primaries():
                with node.client() as client:
                    listed: Any = client.client_list()
                    mine = [c for c in listed if c["name"] == "lmpool-client"]
                    found += sum(c["cmd"] == "xread" for c in mine)
            return found

        lm.next_token_logprobs_sync([1])
        until(lambda: reads() == 6, what="a read of each shard")
        change(cluster.url, pool_name, 2)
        until(lambda: len(lm.shards) == 2, what="the client to move")
        lm.next_token_logprobs_sync([2], timeout=60)
        until(lambda: reads() == 2, what="the others to end")


def test_the_command(server_url, redis_client, pool_name):
    def lmpool(*words: str, status: int = 0) -> str:
        where = ["--url", server_url, "--pool", pool_name]
        found = CliRunner().invoke(app, ["shards", *words, *where])
        assert found.exit_code == status, found.output
        return found.output

    with worker_process(server_url, pool_name, shards=1, lanes=1) as worker:
        shown = lmpool()
        assert f"pool {pool_name}: 1 shard of 1 lane; 1 of 1 worker serves it so" in shown
        assert "lanes in use" in shown
        assert "3 shards of 1 lane; 1 of 1 worker serves it so" in lmpool("3")
        assert "3 shards of 64 lanes" in lmpool("--lanes", "64")
        assert "3 shards of 64 lanes" in lmpool("3", "--lanes", "64")  # as it is
        found = json.loads(lmpool("--json"))
        assert [shard["number"] for shard in found["shards"]] == [0, 1, 2]
        assert (found["lanes"], found["behind"]) == (64, [])
        former = found["layout"]
        assert all(shard["lanes_used"] == 1 for shard in found["shards"])  # of one worker
        found = json.loads(lmpool("2", "--lanes", "2", "--json"))
        assert (len(found["shards"]), found["lanes"]) == (2, 2)
        assert found["layout"] not in ("", former)
        assert "shards=99: write a whole number from 1 to 64" in lmpool("99", status=2)
        name = worker.wait_until_alive()["id"]
        alive = [shard.alive(name) for shard in pool_shards(redis_client, pool_name)]
        beats = {key: redis_client.get(key) for key in alive}
        beats[PoolKeys(pool_name).serving] = b"by somebody"
        worker.pause()
        with ExitStack() as living:  # however long that takes
            for key, beat in beats.items():
                living.enter_context(renewed(redis_client, key, beat))
            for _ in range(2):  # also once it is as it was asked for
                assert f"{name} has not moved yet" in lmpool("4", "--timeout", "0.2", status=1)
        worker.resume()
