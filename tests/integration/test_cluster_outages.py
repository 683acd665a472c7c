"""A pool on a real cluster of which a part is away: the other part goes on, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import pytest

import lmpool
import lmpool.testing.worker as worker_module
import lmpool.worker.intake as intake_module
import lmpool.worker.publishing as publishing_module
from lmpool.backends.mock import mock_row
from lmpool.cluster_servers import ClusterServers
from lmpool.errors import NoWorkers, ServerRefused, ServerUnreachable
from lmpool.inspection import read_facts
from lmpool.keys import PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.slots import slot_of
from lmpool.worker.adapters import adapter_fingerprint
from tests.integration.test_adapters import write_adapter
from tests.support.clients import connected
from tests.support.cluster import Cluster, ClusterNode
from tests.support.hold import Hold
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

VOCAB = 1000


@pytest.fixture
def lm(cluster: Cluster, pool_name: str) -> Iterator[lmpool.PooledLM]:
    with (
        in_process_worker(cluster.url, pool_name, engine_opts={"vocab_size": VOCAB}),
        in_process_worker(cluster.url, pool_name, engine_opts={"vocab_size": VOCAB}),
        connected(cluster.url, pool_name, cache_bytes=0, reconnect_timeout=30.0) as lm,
    ):
        lm.next_token_logprobs_sync([1])
        yield lm


def prompts_of(lm: lmpool.PooledLM, shard: ShardKeys, count: int, start: int) -> list[list[int]]:
    """Prompts that belong to a shard."""
    found = []
    for number in range(start, start + 100_000):
        prompt = [number % VOCAB, number // VOCAB % VOCAB, 7]
        packed = np.array(prompt, "<u4").tobytes()
        if lm.info.placement().of(packed, None)[0] == shard.number:
            found.append(prompt)
            if len(found) == count:
                return found
    raise AssertionError("no such prompts")


def assert_right(lm: lmpool.PooledLM, prompts: list[list[int]], timeout: float = 60.0) -> None:
    rows = lm.batch_next_token_logprobs_sync(prompts, timeout=timeout)
    for prompt, row in zip(prompts, rows, strict=True):
        np.testing.assert_allclose(row, mock_row(prompt, VOCAB), atol=1e-5)


def connected_info(url: str, pool: str) -> ModelInfo:
    with connected(url, pool) as lm:
        return lm.info


def victim_of(cluster: Cluster, lm: lmpool.PooledLM) -> tuple[ClusterNode, ShardKeys, ShardKeys]:
    """A node without the pool's own keys; a shard there, and one that is not."""
    info = cluster.owner(slot_of(f"lmpool:{lm.pool}"))
    victim = next(node for node in cluster.primaries() if node is not info)
    slots = set(cluster.slots(victim))
    away = next(shard for shard in lm.shards if shard.slot in slots)
    there = next(shard for shard in lm.shards if shard.slot not in slots)
    return victim, away, there


def times_of(lm: lmpool.PooledLM, shard: ShardKeys, start: int, seconds: float) -> list[float]:
    """How long calls to a shard take, one after another: for so long, and nine at least."""
    took: list[float] = []
    until_then = time.monotonic() + seconds
    while time.monotonic() < until_then or len(took) < 9:
        prompts = prompts_of(lm, shard, 5, start + 100 * len(took))
        began = time.monotonic()
        assert_right(lm, prompts)
        took.append(time.monotonic() - began)
    return took


@pytest.mark.one_server
def test_a_cluster_has_two_shards_for_each_primary(cluster: Cluster, lm: lmpool.PooledLM) -> None:
    owners = [cluster.owner(shard.slot) for shard in lm.shards]
    assert [owners.count(node) for node in cluster.primaries()] == [2, 2, 2]
    assert_right(lm, [[i % VOCAB, i // VOCAB] for i in range(1500)])
    for shard in lm.shards:
        assert cluster.owner(shard.slot).command("EXISTS", shard.stream().key) == 1


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_other_shards_are_served_meanwhile(cluster: Cluster, lm: lmpool.PooledLM, how: str) -> None:
    victim, away, there = victim_of(cluster, lm)
    late = prompts_of(lm, away, 40, 0)
    usual = median(times_of(lm, there, 5_000, 0.0))  # for this machine as it is
    with ThreadPoolExecutor() as pool:
        victim.kill() if how == "killed" else victim.pause()
        waiting = pool.submit(assert_right, lm, late)
        took = times_of(lm, there, 10_000, 4.0)
        assert not waiting.done()
        # Who is silent is found out by a command that times out, of each thread: few calls wait.
        assert max(took) < 30
        assert median(took) < 0.4 + 10 * usual
        victim.start() if how == "killed" else victim.resume()
        waiting.result(60)
    assert lm.statistics()["failed"] == 0


@pytest.mark.one_server
def test_who_waits_for_too_long_is_told_which_shard(cluster: Cluster, lm: lmpool.PooledLM) -> None:
    victim, away, there = victim_of(cluster, lm)
    victim.kill()
    said = f"shard {away.number} of pool .* may be well"
    with connected(cluster.url, lm.pool, cache_bytes=0, reconnect_timeout=3.0) as hasty:
        with pytest.raises(ServerUnreachable, match=said):
            assert_right(hasty, prompts_of(lm, away, 3, 0))
        assert_right(hasty, prompts_of(lm, there, 20, 0))
    victim.start()
    cluster.wait_until_ok()
    assert_right(lm, prompts_of(lm, away, 20, 500))


@pytest.mark.one_server
def test_who_waits_for_a_slot_that_nobody_serves_is_told_so(
    cluster: Cluster, lm: lmpool.PooledLM
) -> None:
    owner, away, there = victim_of(cluster, lm)
    said = f"all is refused by .* shard {away.number} of pool .* may be well. The last was: "
    for node in cluster.nodes:
        node.command("CLUSTER", "DELSLOTS", away.slot)
    try:
        with connected(cluster.url, lm.pool, cache_bytes=0, reconnect_timeout=3.0) as hasty:
            with pytest.raises(ServerUnreachable, match=said):
                assert_right(hasty, prompts_of(lm, away, 3, 0))
            assert_right(hasty, prompts_of(lm, there, 20, 0))
    finally:
        owner.command("CLUSTER", "ADDSLOTS", away.slot)
    cluster.wait_until_ok()
    assert_right(lm, prompts_of(lm, away, 20, 500))


def test_rows_of_a_shard_that_is_away_wait_for_it(cluster: Cluster, pool_name: str) -> None:
    """A worker that holds them computes and writes others meanwhile."""
    opts = {"vocab_size": VOCAB, "delay": 0.5}
    with (
        in_process_worker(cluster.url, pool_name, engine_opts=opts),
        connected(cluster.url, pool_name, cache_bytes=0) as lm,
        ThreadPoolExecutor() as pool,
        Hold(after=1) as hold,
    ):
        lm.next_token_logprobs_sync([1])
        victim, away, there = victim_of(cluster, lm)
        waiting = pool.submit(assert_right, lm, prompts_of(lm, away, 10, 0))
        assert hold.begun.wait(60)  # the engine has them
        victim.kill()
        hold.open()
        for number in range(4):
            assert_right(lm, prompts_of(lm, there, 3, 5000 * number))
        victim.start()
        waiting.result(60)


def test_all_nodes_away_and_back(cluster: Cluster, lm: lmpool.PooledLM) -> None:
    with ThreadPoolExecutor() as pool:
        for node in cluster.nodes:
            node.kill()
        waiting = pool.submit(assert_right, lm, [[i, 3] for i in range(50)])
        time.sleep(1.0)
        for node in cluster.nodes:
            node.start()
        cluster.wait_until_ok()
        waiting.result(60)
    assert lm.statistics()["failed"] == 0


def test_a_plain_url_of_a_node_is_answered_with_what_to_write(cluster: Cluster) -> None:
    plain = f"redis://127.0.0.1:{cluster.nodes[0].cluster_port}/0"
    with (
        pytest.raises(ServerRefused, match=r"write redis\+cluster://"),
        lmpool.connect(plain, pool="p") as lm,
    ):
        lm.next_token_logprobs_sync([1])


def test_a_cluster_url_of_a_plain_server_is_answered_with_what_to_write(
    server_binary: str,
) -> None:
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        pytest.raises(ServerRefused, match="write redis://host:port/db"),
    ):
        read_facts(server.url.replace("redis://", "redis+cluster://"), "p")


@pytest.mark.one_server
def test_nobody_serves(cluster: Cluster, pool_name: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(in_process_worker(cluster.url, pool_name))
        with connected(cluster.url, pool_name, workers_timeout=5.0, cache_bytes=0) as lm:
            lm.next_token_logprobs_sync([1])
            stack.close()
            with pytest.raises(NoWorkers):
                lm.next_token_logprobs_sync([2])


# --- reads that are under way ---------------------------------------------------------------------


@pytest.fixture
def long_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle workers of this process read as long as others, and longer."""
    for module in (worker_module, intake_module):
        monkeypatch.setattr(module, "IDLE_BLOCK_MS", 2500)
    monkeypatch.setattr(ClusterServers, "longest_block", 2.5)


def one_of_each(lm: lmpool.PooledLM, start: int) -> list[list[int]]:
    """A prompt of each shard."""
    return [prompts_of(lm, shard, 1, start)[0] for shard in lm.shards]


@pytest.mark.one_server
@pytest.mark.usefixtures("long_reads")
def test_what_comes_to_a_busy_workers_reads_is_run_by_an_idle_one(
    cluster: Cluster, pool_name: str
) -> None:
    opts = {"vocab_size": VOCAB}
    with (
        in_process_worker(cluster.url, pool_name, engine_opts=opts) as busy,
        connected(cluster.url, pool_name, cache_bytes=0) as lm,
        ThreadPoolExecutor() as pool,
        Hold(busy.service.engine) as hold,
    ):
        time.sleep(0.5)  # it waits at every shard
        first, *others = one_of_each(lm, 0)
        waiting = pool.submit(assert_right, lm, [first])
        assert hold.begun.wait(60)  # its other reads go on
        with in_process_worker(cluster.url, pool_name, engine_opts=opts):
            assert_right(lm, others)
            assert not waiting.done()
            hold.open()
            waiting.result(60)


@pytest.mark.one_server
@pytest.mark.usefixtures("long_reads")
def test_a_worker_that_leaves_takes_no_jobs_along(
    cluster: Cluster, pool_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    opts = {"vocab_size": VOCAB}
    leaving = ExitStack()
    worker = leaving.enter_context(
        in_process_worker(cluster.url, pool_name, engine_opts=opts, drain_timeout=150.0)
    )
    with (
        leaving,
        connected(cluster.url, pool_name, cache_bytes=0) as lm,
        ThreadPoolExecutor() as pool,
        Hold(worker.service.engine) as hold,
    ):
        time.sleep(0.5)  # it waits at every shard
        first, *others = one_of_each(lm, 0)
        waiting = pool.submit(assert_right, lm, [first])
        assert hold.begun.wait(60)  # its other reads go on
        ending = pool.submit(leaving.close)
        until(worker.service.status.stopping.is_set, what="it to begin to leave")
        asked = pool.submit(assert_right, lm, others)
        with in_process_worker(cluster.url, pool_name, engine_opts=opts):
            asked.result(60)
            assert not waiting.done()  # they did not wait until it had left
            hold.open()
            waiting.result(60)
            ending.result(60)
            assert "took over" not in caplog.text


@pytest.mark.one_server
def test_a_worker_joins_while_a_part_is_away(cluster: Cluster, pool_name: str) -> None:
    """The part where the vocabulary is, and not the model info."""
    opts = {"vocab_size": VOCAB}
    with ExitStack() as stack:
        with in_process_worker(cluster.url, pool_name, engine_opts=opts):
            fingerprint8 = connected_info(cluster.url, pool_name).fingerprint8
        names = (PoolKeys(f"{pool_name}-{number}") for number in range(99))
        keys, victim = next(
            (keys, owner)
            for keys in names
            if (owner := cluster.owner(slot_of(keys.vocabulary(fingerprint8))))
            is not cluster.owner(slot_of(keys.info))
        )
        with in_process_worker(cluster.url, keys.pool, engine_opts=opts):
            lm = stack.enter_context(connected(cluster.url, keys.pool, cache_bytes=0))
            lm.next_token_logprobs_sync([1])
        there = next(s for s in lm.shards if cluster.owner(s.slot) is not victim)
        victim.kill()
        with in_process_worker(cluster.url, keys.pool, engine_opts=opts):
            assert_right(lm, prompts_of(lm, there, 20, 0))
            victim.start()  # without what it had
            cluster.wait_until_ok()
            assert_right(lm, one_of_each(lm, 100))
            vocabulary = keys.vocabulary(fingerprint8)
            until(lambda: victim.command("EXISTS", vocabulary), what="the vocabulary")


@pytest.mark.one_server
def test_rows_that_nobody_has_room_for_are_computed_again(
    cluster: Cluster, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing_module, "ASIDE_BYTES", 5_000)
    opts = {"vocab_size": VOCAB, "delay": 0.5}
    with (
        in_process_worker(cluster.url, pool_name, engine_opts=opts, batch_size=4),
        connected(cluster.url, pool_name, cache_bytes=0) as lm,
        ThreadPoolExecutor() as pool,
        Hold(after=1) as hold,
    ):
        lm.next_token_logprobs_sync([1])
        victim, away, there = victim_of(cluster, lm)
        waiting = pool.submit(assert_right, lm, prompts_of(lm, away, 12, 0))
        until(lambda: lm.pool_statistics_sync()["backlog"] == 12, what="the jobs to be queued")
        assert hold.begun.wait(60)
        time.sleep(0.3)  # and those of the next batch are read
        victim.kill()
        hold.open()
        for number in range(3):
            assert_right(lm, prompts_of(lm, there, 3, 5000 * number))
        victim.start()
        waiting.result(60)


@pytest.mark.one_server
def test_an_adapter_is_known_while_the_first_shard_is_away(
    cluster: Cluster, pool_name: str, tmp_path: Path
) -> None:
    """A worker that has not loaded it finds it in the registry of another shard."""
    path = write_adapter(tmp_path / "adapter")
    settings = {"engine_opts": {"vocab_size": VOCAB}, "adapter_dirs": (str(tmp_path),)}
    with ExitStack() as stack:
        loaded = ExitStack()
        loaded.enter_context(worker_process(cluster.url, pool_name, **settings))
        lm = stack.enter_context(connected(cluster.url, pool_name, cache_bytes=0))
        lm.sync.add_new_lora(path, "fr")
        reference = f"fr@{adapter_fingerprint(Path(path))}"
        (first, *_) = lm.shards
        victim = cluster.owner(first.slot)
        there = next(shard for shard in lm.shards if cluster.owner(shard.slot) is not victim)
        prompts = [
            prompt
            for prompt in ([number % VOCAB, number // VOCAB] for number in range(200))
            if lm.info.placement().of(np.array(prompt, "<u4").tobytes(), reference)[0]
            == there.number
        ]
        stack.enter_context(worker_process(cluster.url, pool_name, **settings))
        loaded.close()
        victim.kill()
        rows = lm.batch_next_token_logprobs_sync(prompts, lora_name="fr", timeout=60)
        for prompt, row in zip(prompts, rows, strict=True):
            np.testing.assert_allclose(row, mock_row(prompt, VOCAB, reference), atol=1e-5)


# --- a node that is full --------------------------------------------------------------------------


def test_a_node_that_is_full_holds_up_its_own_shards_alone(
    cluster: Cluster, lm: lmpool.PooledLM
) -> None:
    """Of what is not for workers to evict."""
    victim, away, there = victim_of(cluster, lm)
    (before,) = victim.command("CONFIG", "GET", "maxmemory")[1::2]
    with ThreadPoolExecutor() as pool:
        usual = median(times_of(lm, there, 5_000, 0.0))
        victim.command("CONFIG", "SET", "maxmemory", "1mb")
        waiting = pool.submit(assert_right, lm, prompts_of(lm, away, 20, 0))
        took = times_of(lm, there, 10_000, 3.0)
        assert median(took) < 0.4 + 10 * usual
        assert not waiting.done()
        victim.command("CONFIG", "SET", "maxmemory", before)
        waiting.result(60)
        assert_right(lm, prompts_of(lm, away, 20, 60_000))
    assert lm.statistics()["failed"] == 0
    assert len(lm.pool_statistics_sync()["workers"]) == 2


def test_rows_for_a_node_that_is_full_wait_for_it(
    cluster: Cluster, pool_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    opts = {"vocab_size": VOCAB, "delay": 0.5}
    with (
        in_process_worker(cluster.url, pool_name, engine_opts=opts),
        connected(cluster.url, pool_name, cache_bytes=0) as lm,
        ThreadPoolExecutor() as pool,
        Hold(after=1) as hold,
    ):
        lm.next_token_logprobs_sync([1])
        victim, away, there = victim_of(cluster, lm)
        (before,) = victim.command("CONFIG", "GET", "maxmemory")[1::2]
        waiting = pool.submit(assert_right, lm, prompts_of(lm, away, 10, 0))
        assert hold.begun.wait(60)  # the engine has them
        victim.command("CONFIG", "SET", "maxmemory", "1mb")
        hold.open()
        for number in range(4):
            assert_right(lm, prompts_of(lm, there, 3, 5000 * number))
        until(lambda: "memory is full" in caplog.text, what="the worker to be refused")
        assert not waiting.done()
        victim.command("CONFIG", "SET", "maxmemory", before)
        waiting.result(60)
