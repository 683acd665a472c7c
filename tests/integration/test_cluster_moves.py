"""A pool on a real cluster that gets other shards and lanes while a part of it is away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from lmpool.keys import PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.registry import Change
from lmpool.shards import change, look
from lmpool.slots import slot_of
from lmpool.worker.adapters import adapter_fingerprint
from tests.integration.test_adapters import write_adapter
from tests.support.cluster import Cluster, ClusterNode
from tests.support.redis_client import open_redis
from tests.support.waiting import until
from tests.support.workers import InProcessWorker, in_process_worker

pytestmark = [pytest.mark.one_server]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Any]:
    with open_redis(cluster.url) as client:
        yield client


def shards_now(client: Any, pool: str) -> tuple[ModelInfo, tuple[ShardKeys, ...]]:
    keys = PoolKeys(pool)
    info = ModelInfo.unpack(client.get(keys.info))
    return info, info.shard_keys(keys)


def a_node_without(cluster: Cluster, *slots: int) -> ClusterNode:
    others = [cluster.owner(slot) for slot in slots]
    return next(node for node in cluster.primaries() if node not in others)


def moved(url: str, pool: str) -> None:
    """Wait until no worker has yet to move, as far as can be seen."""
    until(lambda: look(url, pool).is_done, 60, what="the workers to move")


def register(worker: InProcessWorker, name: str, path: str) -> None:
    """As a client asks for it."""
    service = worker.service
    assert service.loop is not None
    assert service.adapters is not None
    adapters = service.adapters
    service.loop.call(lambda: adapters.add(name, path)).result(60)


def remove(worker: InProcessWorker, name: str) -> None:
    service = worker.service
    assert service.loop is not None
    assert service.adapters is not None
    adapters = service.adapters
    service.loop.call(lambda: adapters.remove(name)).result(60)


def adapters_in(client: Any, shard: ShardKeys) -> set[str]:
    entries = {name.decode(): entry for name, entry in client.hgetall(shard.adapters).items()}
    return {name for name, entry in entries.items() if not Change.parse(entry).removed}


def come_into(client: Any, shard: ShardKeys, layout: str) -> None:
    """Wait until a shard goes by the name of this layout."""
    until(
        lambda: client.hget(shard.bounds, "layout") == layout.encode(),
        60,
        what="the shard to come into the layout",
    )


def test_a_shard_that_was_away_during_a_move_comes_into_the_layout_once_it_is_back(
    cluster: Cluster, client: Any, pool_name: str, tmp_path: Path
) -> None:
    paths = {name: write_adapter(tmp_path / name, name) for name in ("one", "two")}
    options: dict[str, Any] = {"shards": 3, "lanes": 1, "adapter_dirs": [str(tmp_path)]}
    with in_process_worker(cluster.url, pool_name, **options) as worker:
        for name, path in paths.items():
            register(worker, name, path)
        _, shards = shards_now(client, pool_name)
        victim = a_node_without(cluster, slot_of(PoolKeys(pool_name).info))
        away = [shard for shard in shards if cluster.owner(shard.slot) is victim]
        others = [shard for shard in shards if shard not in away]
        for shard in away:  # as who has left a shard has them end
            for key in (shard.stream().key, shard.adapters):
                assert client.pexpire(key, 600_000)
        victim.pause()
        try:
            for shard in others:
                # It was removed meanwhile.
                client.hset(shard.adapters, "one", Change(10**14, b"", b"").pack())
            change(cluster.url, pool_name, lanes=4, wait=0.0)  # of which nothing is left behind
            moved(cluster.url, pool_name)
            info, _ = shards_now(client, pool_name)
            name = info.layout.encode()
            for shard in others:
                assert client.hget(shard.bounds, "layout") == name
        finally:
            victim.resume()
        cluster.wait_until_ok()
        for shard in away:
            come_into(client, shard, info.layout)
            assert adapters_in(client, shard) == {"two"}
            # Its streams are the heartbeat's, which need not be the first to find it.
            keys = (shard.stream().key, shard.adapters)
            until(
                lambda keys=keys: {client.pttl(key) for key in keys} == {-1},
                60,
                what="its keys to stay",
            )


def test_an_adapter_that_was_removed_does_not_come_back_with_a_node_that_lost_its_data(
    cluster: Cluster, client: Any, pool_name: str, tmp_path: Path
) -> None:
    paths = {name: write_adapter(tmp_path / name, name) for name in ("one", "two", "three")}
    options: dict[str, Any] = {"shards": 1, "lanes": 1, "adapter_dirs": [str(tmp_path)]}
    with in_process_worker(cluster.url, pool_name, **options) as worker:
        for name in ("one", "two"):
            register(worker, name, paths[name])
        _, (former,) = shards_now(client, pool_name)
        change(cluster.url, pool_name, 6)
        moved(cluster.url, pool_name)
        remove(worker, "one")
        info, shards = shards_now(client, pool_name)
        victim = a_node_without(cluster, slot_of(PoolKeys(pool_name).info), former.slot)
        lost = [shard for shard in shards if cluster.owner(shard.slot) is victim]
        assert lost
        # Who started later knows nothing that it was not asked for.
        with in_process_worker(cluster.url, pool_name, **options) as later:
            register(later, "three", paths["three"])
            worker.stop()
            victim.kill()
            victim.start()
            cluster.wait_until_ok()
            for shard in lost:
                come_into(client, shard, info.layout)
                assert adapters_in(client, shard) == {"two", "three"}
            assert client.hexists(former.adapters, "one")  # it was still there


@pytest.mark.parametrize("moves", [False, True])
def test_what_is_registered_in_a_shard_that_is_just_back_comes_beside_the_rest(
    moves: bool, cluster: Cluster, client: Any, pool_name: str, tmp_path: Path
) -> None:
    """It has lost its data, nobody has yet seen that, and who knows of one adapter knows nothing of
    the others, nor that it was removed."""
    paths = {name: write_adapter(tmp_path / name, name) for name in ("one", "two", "three")}
    options: dict[str, Any] = {"shards": 3, "lanes": 1, "adapter_dirs": [str(tmp_path)]}
    with in_process_worker(cluster.url, pool_name, **options) as worker:
        for name in ("one", "two"):
            register(worker, name, paths[name])
        if moves:
            change(cluster.url, pool_name, 4)
            moved(cluster.url, pool_name)
        _, shards = shards_now(client, pool_name)
        with in_process_worker(cluster.url, pool_name, **options) as later:
            loop, adapters = later.service.loop, later.service.adapters
            assert loop is not None
            assert adapters is not None
            one = f"one@{adapter_fingerprint(tmp_path / 'one')}"
            loop.call(lambda: adapters.ensure(one)).result(60)
            remove(worker, "one")
            worker.stop()
            victim = a_node_without(cluster, slot_of(PoolKeys(pool_name).info))
            back = threading.Event()

            def register_at_once() -> None:
                """Before anything else is done on this thread."""
                assert back.wait(60)
                until(registered, 60, what="the adapter to be registered")

            def registered() -> bool:
                try:
                    adapters.add("three", paths["three"])
                except (redis.exceptions.RedisError, OSError):
                    return False
                return True

            done = loop.call(register_at_once)
            victim.kill()
            victim.start()
            back.set()
            done.result(60)
            cluster.wait_until_ok()
            for shard in shards:
                until(
                    lambda shard=shard: adapters_in(client, shard) == {"two", "three"},
                    60,
                    what="the newest of each to be everywhere",
                )


def test_what_is_registered_two_layouts_behind_comes_along(
    cluster: Cluster, client: Any, pool_name: str, tmp_path: Path
) -> None:
    paths = {name: write_adapter(tmp_path / name, name) for name in ("one", "two", "three")}
    options: dict[str, Any] = {"shards": 1, "lanes": 1, "adapter_dirs": [str(tmp_path)]}
    with in_process_worker(cluster.url, pool_name, **options) as worker:
        for name in ("one", "two"):
            register(worker, name, paths[name])
        assert worker.service.seat is not None
        heartbeat = worker.service.seat.heartbeat
        told, heartbeat._on_moved = heartbeat._on_moved, lambda info: None
        with in_process_worker(cluster.url, pool_name, **options) as other:
            for count in (2, 3):
                change(cluster.url, pool_name, count, wait=0.0)
                until(
                    lambda count=count: len(other.service.seat.shards) == count,
                    60,
                    what="the other to move",
                )
        remove(worker, "one")
        register(worker, "three", paths["three"])
        heartbeat._on_moved = told
        moved(cluster.url, pool_name)
        _, shards = shards_now(client, pool_name)
        assert len(shards) == 3
        for shard in shards:
            until(
                lambda shard=shard: adapters_in(client, shard) == {"two", "three"},
                60,
                what="the changes to come along",
            )
