"""What a server forgets, refuses or loses does not reach the callers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import ServerRefused, UnknownPool
from lmpool.keys import PoolKeys
from lmpool.model_info import ModelInfo
from lmpool.worker import service as service_module
from tests.integration.test_adapters import registered, write_adapter
from tests.support.clients import connected
from tests.support.hold import Hold
from tests.support.pools import Asking, pool_shards, some_prompts, until_at_rest
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import (
    InProcessWorker,
    in_process_worker,
    living_workers,
    worker_process,
)


def right(lm: lmpool.PooledLM, prompt: list[int]) -> None:
    row = lm.next_token_logprobs_sync(prompt, timeout=60)
    np.testing.assert_array_equal(row, mock_row(prompt, 256))


def test_a_pool_whose_model_info_is_lost_is_not_unknown(server_url, redis_client, pool_name):
    with in_process_worker(server_url, pool_name):
        for number in range(2):
            redis_client.delete(f"lmpool:{pool_name}")
            with connected(server_url, pool_name) as lm:
                right(lm, [number])
        # Another's, that appeared on its own, is left alone by whoever does not serve it.
    with pytest.raises(UnknownPool):
        lmpool.connect(server_url, f"{pool_name}-never", workers_timeout=0.2).__enter__()


def test_two_models_that_join_at_once_are_one(server_url, redis_client, pool_name):
    """Of workers with different models that start at the same moment, one kind serves."""
    models = [{"engine_opts": {"vocab_size": size}} for size in (256, 300, 256, 300)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_process(server_url, pool_name, alive=False, **model))
            for model in models
        ]

        def decided() -> bool:
            alive = {worker["pid"] for worker in living_workers(server_url, pool_name)}
            return all(w.process.poll() is not None or w.pid in alive for w in workers)

        until(decided, 150, what="each to serve or to be refused", every=0.05)
        ended = [worker.process.poll() for worker in workers]
        assert sorted(ended, key=str) == [78, 78, None, None]
        assert ended[:2] == ended[2:]
        for worker in workers:
            if worker.process.poll() == 78:
                assert "with living workers" in worker.log


@pytest.mark.one_shard
def test_what_another_model_left_ends(server_url, redis_client, pool_name):
    with in_process_worker(server_url, pool_name):
        (old,) = pool_shards(redis_client, pool_name)
    vocabularies = set(redis_client.scan_iter(f"lmpool:{pool_name}:*:vocabulary"))
    assert {redis_client.ttl(key) for key in (*vocabularies, old.stream().key)} == {-1}
    with in_process_worker(server_url, pool_name, engine_opts={"vocab_size": 300}):
        assert all(0 < redis_client.ttl(key) <= 86_400 for key in (*vocabularies, old.stream().key))
    with in_process_worker(server_url, pool_name):  # and back: nothing of it may end
        assert {redis_client.ttl(key) for key in (*vocabularies, old.stream().key)} == {-1}


@pytest.mark.one_shard
def test_a_stream_of_the_dead_that_cannot_be_written_stops_nobody(
    server_url, redis_client, pool_name
):
    with in_process_worker(server_url, pool_name), connected(server_url, pool_name) as lm:
        (shard,) = pool_shards(redis_client, pool_name)
        redis_client.set(shard.dead, "in the way")
        for _ in range(3):
            redis_client.xadd(shard.stream().key, {"job": b"garbage"})
        right(lm, [1, 2])
        lm.close()
        until_at_rest(redis_client, pool_name)


@pytest.mark.one_shard
def test_a_start_that_fails_leaves_nothing(server_url, redis_client, pool_name, monkeypatch):
    create_groups = service_module.create_groups

    def refuse(*arguments: Any) -> None:
        create_groups(*arguments)
        raise ServerRefused("a test refuses")

    monkeypatch.setattr(service_module, "create_groups", refuse)
    with pytest.raises(ServerRefused), in_process_worker(server_url, pool_name):
        pass
    (shard,) = pool_shards(redis_client, pool_name)
    assert redis_client.xinfo_consumers(shard.stream().key, "workers") == []
    assert not list(redis_client.scan_iter(f"{shard.prefix}:alive:*"))
    assert not redis_client.exists(f"{{lmpool:{pool_name}}}:serving")


def test_withdrawn_is_counted_to_the_last(server_url, pool_name):
    with (
        in_process_worker(server_url, pool_name, batch_size=1),
        connected(server_url, pool_name) as lm,
        Hold(),
    ):
        asking = Asking(lm, some_prompts(20, seed=1))
        until(lambda: lm.statistics()["queued"] == 20)
        lm.close()
        with pytest.raises(lmpool.errors.ClientClosed):
            asking.rows()
        assert lm.statistics()["withdrawn"] == 20


def test_a_full_server_is_waited_for_and_named(server_binary, pool_name, caplog):
    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, pool_name),
        connected(server.url, pool_name, cache_bytes=0, workers_timeout=4) as lm,
        server.client() as admin,
    ):
        right(lm, [1])
        admin.config_set("maxmemory", 1)
        asking = Asking(lm, [[3, 4]])
        time.sleep(7)  # longer than a heartbeat lives and than a pool may be without workers
        assert asking.is_alive()
        admin.config_set("maxmemory", 0)
        np.testing.assert_array_equal(asking.rows(), [mock_row([3, 4], 256)])
    assert "the server's memory is full: raise maxmemory or lower result_ttl" in caplog.text


@pytest.mark.one_shard
def test_adapters_are_registered_again(server_binary, pool_name, tmp_path: Path):
    adapter = tmp_path / "adapters" / "one"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_text("one")
    with (
        RealServer(binary=server_binary) as server,
        worker_process(server.url, pool_name, adapter_dirs=[str(tmp_path / "adapters")]),
        connected(server.url, pool_name, cache_bytes=0) as lm,
        server.client() as admin,
    ):
        lm.add_new_lora(str(adapter), "one")
        before = lm.next_token_logprobs_sync([1, 2], "one", timeout=60)
        admin.flushall()
        (shard,) = lm.shards
        until(lambda: admin.hget(shard.adapters, "one"), what="the adapter to be registered")
        after = lm.next_token_logprobs_sync([1, 2], "one", timeout=60)
        np.testing.assert_array_equal(before, after)


def test_adapters_of_workers_that_are_gone_are_registered_again(
    server_binary, pool_name, tmp_path: Path
):
    style, tone = (write_adapter(tmp_path / name, name) for name in ("style", "tone"))
    options = {"adapter_dirs": [str(tmp_path)]}
    with (
        RealServer(binary=server_binary) as server,
        server.client() as admin,
        ExitStack() as later,
    ):
        with in_process_worker(server.url, pool_name, **options) as worker:
            loop, adapters = worker.service.loop, worker.service.adapters
            assert loop is not None
            assert adapters is not None
            loop.call(lambda: adapters.add("style", style)).result(60)
            loop.call(lambda: adapters.add("tone", tone)).result(60)
            loop.call(lambda: adapters.remove("tone")).result(60)
            later.enter_context(in_process_worker(server.url, pool_name, **options))
        before = registered(admin, pool_name)
        (shard,) = pool_shards(admin, pool_name)
        admin.flushall()
        until(lambda: admin.hlen(shard.adapters) == 2, what="the adapters to be registered")
        assert registered(admin, pool_name) == before
        assert before.keys() == {"style"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, "may drop job streams"),
        ({}, "nothing is saved to disk"),
    ],
)
def test_a_worker_says_what_of_the_server_may_hurt(server_binary, options, said):
    server = RealServer(binary=server_binary, **options)
    with server, worker_process(server.url, "p", alive=False) as worker:
        until(lambda: said in worker.log, what=said)
        assert ("WARNING" in worker.log) == ("maxmemory" in options)
        worker.kill()


@contextmanager
def full(server: RealServer) -> Iterator[tuple[str, ...]]:
    """Its memory is; then not. What a worker that starts meanwhile says."""
    with server.client() as admin:
        admin.config_set("maxmemory", admin.info("memory")["used_memory"])
        yield "are in use, and with noeviction", "its memory is full: raise maxmemory"
        admin.config_set("maxmemory", 0)


@contextmanager
def without_a_disk(server: RealServer) -> Iterator[tuple[str, ...]]:
    """It cannot save, and takes no writes; then it does."""
    taken = server.folder / "dump.rdb"
    taken.mkdir()
    (taken / "in-the-way").touch()
    with server.client() as admin:
        admin.config_set("save", "3600 1")
        admin.bgsave()
        until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
        yield ("is not ready: MISCONF",)
        admin.config_set("save", "")
    (taken / "in-the-way").unlink()
    taken.rmdir()


@contextmanager
def replica(server: RealServer) -> Iterator[tuple[str, ...]]:
    """It follows another; then it is a primary."""
    with server.client() as admin:
        admin.replicaof("127.0.0.1", "1")
        yield ("it is a replica, which takes no writes",)
        admin.replicaof("NO", "ONE")


@pytest.mark.parametrize("state", [full, without_a_disk, replica])
def test_a_worker_waits_for_a_server_that_takes_no_writes_before_it_loads_a_model(
    server_binary, state, monkeypatch, caplog
):
    loads = []
    load_engine = service_module.load_engine
    monkeypatch.setattr(
        service_module, "load_engine", lambda *a, **o: loads.append(a) or load_engine(*a, **o)
    )
    with RealServer(binary=server_binary) as server, ThreadPoolExecutor(1) as others:
        worker = InProcessWorker(server.url, "p")
        try:
            with state(server) as says:
                starting = others.submit(worker.start)
                until(lambda: all(said in caplog.text for said in says), what=" and ".join(says))
                assert not loads
            starting.result(60)
            assert len(loads) == 1
            with connected(server.url, "p") as lm:
                right(lm, [1])
        finally:
            worker.stop()


def test_a_vocabulary_that_nobody_reads_is_not_what_a_full_server_evicts_first(server_binary):
    with (
        RealServer(binary=server_binary) as server,
        in_process_worker(server.url, "p"),
        server.client() as admin,
    ):
        keys = PoolKeys("p")
        info = ModelInfo.unpack(admin.get(keys.info))
        vocabulary = keys.vocabulary(info.fingerprint8)
        until(lambda: admin.object("idletime", vocabulary) >= 1, what="it to be unused")
        until(lambda: admin.object("idletime", vocabulary) == 0, 10, what="it to be used")
