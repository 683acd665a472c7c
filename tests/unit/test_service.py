"""A worker's life: joining, serving, leaving, and every way in which one of them goes wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from lmpool.backends.mock import MockEngine, mock_row
from lmpool.errors import EngineBroken, LmpoolError, PoolMismatch, ServerUnreachable, SettingsError
from lmpool.keys import GROUP, PRIORITIES, PoolKeys, ShardKeys, streams
from lmpool.model_info import ModelInfo
from lmpool.servers import Servers
from lmpool.settings import WorkerOptions
from lmpool.wire import pack_job
from lmpool.worker import control, moving, patience, publishing
from lmpool.worker import intake as intake_module
from lmpool.worker import service as service_module
from lmpool.worker.carrying import enter
from lmpool.worker.engine_thread import EngineLoop
from lmpool.worker.heartbeat import ANSWER_WITHIN, Heartbeat
from lmpool.worker.publishing import Publisher
from lmpool.worker.recovery import Recovery
from lmpool.worker.service import Service, consumer_name
from lmpool.worker.watchdog import Watchdog
from tests.support.clients import connected
from tests.support.fake import FakeServer
from tests.support.heartbeats import beating
from tests.support.parts import Guarded
from tests.support.protocol import Caller, Consumer, new_job, write_flight
from tests.support.waiting import until
from tests.support.workers import InProcessWorker, lmpool_threads

SHARDS = 3


class GatedEngine(MockEngine):
    """The mock engine, which computes when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = threading.Event()
        self.gate = threading.Event()
        self.closed = threading.Event()
        self.thread: int | None = None
        self.error: Exception | None = None

    def compute(self, requests: Any) -> Any:
        self.thread = threading.get_ident()
        self.computing.set()
        assert self.gate.wait(60), "the test lets nobody compute"
        if self.error is not None:
            raise self.error
        return super().compute(requests)

    def close(self) -> None:
        self.closed.set()
        super().close()


@pytest.fixture
def server(fake_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fake_url, protocol=2) as client:
        yield client


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedEngine]:
    """What workers load; it computes once the gate is open."""
    engine = GatedEngine()
    monkeypatch.setattr(service_module, "load_engine", lambda *_, **__: engine)
    yield engine
    engine.gate.set()


@pytest.fixture
def new(
    fake_url: str, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., InProcessWorker]]:
    monkeypatch.setattr(intake_module, "IDLE_BLOCK_MS", 20)
    workers: list[InProcessWorker] = []

    def new(url: str = fake_url, **settings: Any) -> InProcessWorker:
        workers.append(
            InProcessWorker(url, pool_name, **{"shards": SHARDS, "lanes": 1, **settings})
        )
        return workers[-1]

    yield new
    for worker in workers:
        worker.stop()


@pytest.fixture
def keys(pool_name: str) -> PoolKeys:
    return PoolKeys(pool_name)


def served(server: Any, keys: PoolKeys) -> tuple[ModelInfo, tuple[ShardKeys, ...]]:
    info = ModelInfo.unpack(server.get(keys.info))
    return info, info.shard_keys(keys)


def members(server: Any, shards: tuple[ShardKeys, ...]) -> list[set[str]]:
    """The consumers of each stream; nobody where there is none, or no group."""
    found = []
    for stream in streams(shards):
        try:
            consumers = server.xinfo_consumers(stream.key, GROUP)
        except redis.exceptions.ResponseError:
            consumers = []
        found.append({consumer["name"].decode() for consumer in consumers})
    return found


def enqueue(server: Any, shard: ShardKeys, info: ModelInfo, *numbers: int) -> Caller:
    """A caller who waits for prompts of one token each."""
    caller = Caller(server, shard)
    caller.enqueue(*(new_job(number, fingerprint=info.fingerprint) for number in numbers))
    return caller


# --- joining -----------------------------------------------------------------------------------


def test_a_worker_that_has_started_is_there_in_every_shard(
    new: Callable[..., InProcessWorker], server: redis.Redis, keys: PoolKeys
) -> None:
    worker = new()
    worker.start()
    info, shards = served(server, keys)
    assert len(shards) == SHARDS == info.shards
    until(lambda: members(server, shards) == [{worker.id}] * SHARDS * len(PRIORITIES))
    until(lambda: all(server.exists(shard.alive(worker.id)) for shard in shards))
    until(lambda: server.exists(keys.serving, keys.vocabulary(info.fingerprint8)) == 2)
    names = {thread.name for thread in lmpool_threads()}
    expected = {"engine", "heartbeat", "publisher", "intake", "recovery", "watchdog"}
    assert {f"lmpool-{name}" for name in expected} <= names


def test_a_vocabulary_that_a_full_server_evicted_is_put_there_again(
    new: Callable[..., InProcessWorker], server: redis.Redis, keys: PoolKeys
) -> None:
    worker = new()
    worker.start()
    info, _ = served(server, keys)
    vocabulary = keys.vocabulary(info.fingerprint8)
    found = server.get(vocabulary)
    assert found is not None
    server.delete(vocabulary)
    until(lambda: server.get(vocabulary) == found, what="it to be there again")


def test_a_vocabulary_that_a_full_server_takes_no_more_keeps_no_engine_from_its_work(
    new: Callable[..., InProcessWorker],
    server: redis.Redis,
    keys: PoolKeys,
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = new()
    worker.start()
    service, info = worker.service, served(server, keys)[0]
    vocabulary = keys.vocabulary(info.fingerprint8)
    tried = []

    def refuse(*_: object) -> bool:
        tried.append(1)
        raise redis.exceptions.OutOfMemoryError("command not allowed")

    monkeypatch.setattr(service_module, "publish_vocabulary", refuse)
    for _ in range(3):
        service._register_again([vocabulary])
        service.loop.call(lambda: None).result(60)
    assert len(tried) == 1
    assert "the vocabulary was lost, and is not there again: command not" in caplog.text
    monkeypatch.setattr(service_module, "publish_vocabulary", lambda *_: False)
    monkeypatch.setattr(service, "_publishes_from", 0.0)
    service._register_again([vocabulary])
    until(lambda: not service.seat.heartbeat.expects, what="no vocabulary to be expected")


def test_a_worker_that_has_stopped_leaves_the_pool_and_nothing_else(
    new: Callable[..., InProcessWorker], server: redis.Redis, keys: PoolKeys
) -> None:
    stays, worker = new(), new()
    before = lmpool_threads()
    stays.start()
    worker.start()
    info, shards = served(server, keys)
    worker.stop()
    until(lambda: members(server, shards) == [{stays.id}] * SHARDS * len(PRIORITIES))
    assert not any(server.exists(shard.alive(worker.id)) for shard in shards)
    until(lambda: all(server.exists(shard.alive(stays.id)) for shard in shards))
    until(lambda: server.exists(keys.serving), what="one that still serves to say so")
    stays.stop()
    assert members(server, shards) == [set()] * SHARDS * len(PRIORITIES)
    assert not server.exists(keys.serving)
    # What the pool served stays known.
    assert server.exists(keys.info, keys.vocabulary(info.fingerprint8)) == 2
    assert lmpool_threads() == before
    assert worker.service._opened == []
    worker.stop()  # again
    assert worker.service.status.failure is None


def test_the_engine_is_loaded_used_and_closed_on_one_thread(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def load(*_: Any, **options: Any) -> GatedEngine:
        threads.append(threading.get_ident())
        assert options == {"revision": "abc", "dtype": "float32"}
        return engine

    close = engine.close
    monkeypatch.setattr(service_module, "load_engine", load)
    monkeypatch.setattr(engine, "close", lambda: (threads.append(threading.get_ident()), close()))
    engine.gate.set()
    worker = new(revision="abc", dtype="float32")
    worker.start()
    info, shards = served(server, keys)
    caller = enqueue(server, shards[1], info, 1)
    until(caller.notices)
    worker.stop()
    assert threads == [engine.thread] * 2
    assert engine.thread != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("no such model"), SettingsError("model='x'")])
def test_an_engine_that_cannot_be_loaded_is_told_and_leaves_nothing(
    error: Exception,
    new: Callable[..., InProcessWorker],
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(service_module, "load_engine", fail)
    worker, before = new(), lmpool_threads()
    with pytest.raises(type(error)) as told:
        worker.start()
    assert told.value is error
    assert lmpool_threads() == before
    assert worker.service._opened == []
    assert not server.exists(keys.info, keys.serving)
    assert not worker.failed.is_set()  # whoever started it knows
    worker.stop()


def test_a_server_that_is_not_there_is_told_before_the_engine_is_loaded(
    new: Callable[..., InProcessWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    monkeypatch.setattr(service_module, "load_engine", lambda *_, **__: loaded.append(1))
    monkeypatch.setattr(patience, "SERVER_WAIT", 0.3)
    with pytest.raises(ServerUnreachable):
        new("redis://127.0.0.1:1/0").start()
    assert loaded == []


def test_a_server_that_goes_away_in_the_midst_of_joining_is_waited_for(
    new: Callable[..., InProcessWorker],
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It closes the connection at each step, once more when that is made good, then loads."""
    lost = [redis.exceptions.ConnectionError("Connection closed by server.")] * 2
    for name in (
        "greet",
        "warn_about",
        "warn_of_rights",
        "join",
        "create_groups",
        "publish_vocabulary",
    ):
        failures: list[Exception] = [redis.exceptions.BusyLoadingError("loading"), *lost]
        step = getattr(service_module, name)

        def flaky(*arguments: Any, failures: Any = failures, step: Any = step) -> Any:
            if failures:
                raise failures.pop()
            return step(*arguments)

        monkeypatch.setattr(service_module, name, flaky)
    worker = new()
    worker.start()
    _, shards = served(server, keys)
    everywhere = [{worker.id}] * SHARDS * len(PRIORITIES)
    until(lambda: members(server, shards) == everywhere, what="the first read of every stream")
    assert "waiting for the server, 60 s at most: Connection closed by server." in caplog.text


def test_a_beat_waits_for_a_server_that_answers_nothing_no_longer_than_a_life(
    new: Callable[..., InProcessWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next primary must hear of a worker before others take it for dead."""
    opened: list[Servers] = []
    init = Heartbeat.__init__

    def note(self: Heartbeat, servers: Servers, *arguments: Any) -> None:
        opened.append(servers)
        init(self, servers, *arguments)

    monkeypatch.setattr(Heartbeat, "__init__", note)
    worker = new()
    worker.start()
    (servers,) = opened
    assert servers.anywhere.connection_pool.connection_kwargs["socket_timeout"] == ANSWER_WITHIN
    worker.stop()


def test_a_worker_that_waits_for_its_server_is_told_to_stop(
    new: Callable[..., InProcessWorker],
) -> None:
    worker = new("redis://127.0.0.1:1/0")
    threading.Timer(0.3, worker.service.status.stopping.set).start()
    with pytest.raises(LmpoolError, match="told to stop while waiting for the server"):
        worker.start()


def test_a_worker_that_may_not_join_closes_its_engine_and_is_nobody(
    new: Callable[..., InProcessWorker], engine: GatedEngine, server: redis.Redis, keys: PoolKeys
) -> None:
    first = new()
    first.start()
    _, shards = served(server, keys)
    engine.closed.clear()
    other = new(shards=2)
    with pytest.raises(PoolMismatch, match="shards 3 there, 2 here"):
        other.start()
    assert engine.closed.is_set()
    until(lambda: members(server, shards) == [{first.id}] * SHARDS * len(PRIORITIES))
    assert not any(server.exists(shard.alive(other.id)) for shard in shards)


def test_what_others_had_end_while_it_joins_stays(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: Any,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They had yet to see that the pool is back in its shards."""

    def end_first(servers: Servers, keys: PoolKeys, info: ModelInfo) -> None:
        for shard in info.shard_keys(keys):
            server.hset(shard.adapters, "one", "1")
            server.pexpire(shard.adapters, 600_000)
        enter(servers, keys, info)

    monkeypatch.setattr(service_module, "enter", end_first)
    worker = new()
    worker.start()
    _, shards = served(server, keys)
    assert {server.pttl(shard.adapters) for shard in shards} == {-1}
    engine.gate.set()
    worker.stop()


def test_whoever_sees_a_worker_can_read_the_vocabulary(
    new: Callable[..., InProcessWorker],
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is there before the worker is."""
    alive: list[int] = []
    publish = service_module.publish_vocabulary

    def look(*arguments: Any) -> None:
        _, shards = served(server, keys)
        alive.append(sum(server.exists(shard.alive(worker.id)) for shard in shards))
        publish(*arguments)

    monkeypatch.setattr(service_module, "publish_vocabulary", look)
    worker = new()
    worker.start()
    assert alive == [0]


@pytest.mark.parametrize("step", ["publish_vocabulary", "create_groups"])
def test_a_worker_that_fails_in_the_midst_of_joining_is_nobody(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    do = getattr(service_module, step)

    def fail(*arguments: Any) -> None:
        do(*arguments)
        raise RuntimeError("the tokenizer cannot be read")

    monkeypatch.setattr(service_module, step, fail)
    worker = new()
    with pytest.raises(RuntimeError, match="tokenizer"):
        worker.start()
    _, shards = served(server, keys)
    assert members(server, shards) == [set()] * SHARDS * len(PRIORITIES)
    assert not any(server.exists(shard.alive(worker.id)) for shard in shards)
    assert not server.exists(keys.serving)
    assert engine.closed.is_set()


def test_a_worker_does_not_move_to_where_the_pool_is_no_more(
    new: Callable[..., InProcessWorker], server: redis.Redis, keys: PoolKeys
) -> None:
    worker = new()
    worker.start()
    info, _ = served(server, keys)
    there = info.moved_to(SHARDS + 2, info.lanes)
    server.set(keys.info, there.moved_to(SHARDS + 1, info.lanes).pack())
    assert not worker.service.move(worker.service._open(), there)
    for shard in there.shard_keys(keys):
        assert not server.exists(shard.alive(worker.id), shard.bounds)
    worker.stop()


def test_a_worker_that_joins_as_the_pool_moves_follows_once_it_has_joined(
    new: Callable[..., InProcessWorker],
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = new()
    service = worker.service
    appear = service._appear

    def appears(*arguments: Any) -> None:
        if service.seat is None:
            info, _ = served(server, keys)
            there = info.moved_to(SHARDS + 2, info.lanes)
            server.set(keys.info, there.pack())
            server.set(keys.serving, there.mark())
        appear(*arguments)
        mover = service._mover._thread
        if service.seat is None and mover is not None:
            mover.join(60)  # it has nothing to do yet

    monkeypatch.setattr(service, "_appear", appears)
    worker.start()
    there, shards = served(server, keys)
    until(lambda: service.seat is not None and service.seat.info.layout == there.layout)
    until(lambda: members(server, shards) == [{worker.id}] * (SHARDS + 2) * len(PRIORITIES))
    assert service.status.failure is None
    worker.stop()


def test_a_shard_has_its_layouts_name_again_while_the_engine_computes(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: Any,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moving, "CARRY_AFTER", (0.0,))
    worker = new()
    worker.start()
    service = worker.service
    info, shards = served(server, keys)
    there = info.moved_to(info.shards, info.lanes)
    server.set(keys.info, there.pack())
    server.set(keys.serving, there.mark())
    service._mover.tell(there)
    until(lambda: service.seat is not None and service.seat.info.layout == there.layout)
    until(lambda: service._mover._thread is None, what="all to be brought")
    caller = enqueue(server, shards[0], info, 1)
    assert engine.computing.wait(60)
    server.hdel(shards[1].bounds, "layout")
    until(lambda: server.hget(shards[1].bounds, "layout") == there.layout.encode())
    engine.gate.set()
    assert [notice.status for notice in until(caller.notices)] == ["ok"]
    worker.stop()


def test_a_registry_that_could_not_be_brought_again_is_told(
    new: Callable[..., InProcessWorker],
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = new()
    worker.start()
    _, shards = served(server, keys)

    def cut(*_: Any) -> bool:
        raise redis.exceptions.ConnectionError("cut")

    monkeypatch.setattr(moving, "enter", cut)
    server.set(shards[0].adapters, "damaged")
    until(lambda: any("not be brought: cut" in each.getMessage() for each in caplog.records))
    worker.stop()


def test_a_worker_that_is_stopped_while_it_moves_leaves_both_places(
    new: Callable[..., InProcessWorker], server: redis.Redis, keys: PoolKeys
) -> None:
    worker = new()
    worker.start()
    service = worker.service
    info, before = served(server, keys)
    appear, sit, moving = service._appear_too, service._sit, threading.Event()

    def appears(*arguments: Any) -> bool:
        appear(*arguments)
        moving.set()
        return service.status.stopping.wait(60)

    def sits(*arguments: Any) -> None:
        until(lambda: service.engine is None, what="the engine to be closed")
        sit(*arguments)

    service._appear_too, service._sit = appears, sits  # type: ignore[method-assign]
    there = info.moved_to(SHARDS + 2, info.lanes)
    service._mover.tell(there)
    assert moving.wait(60)
    worker.stop()
    assert service.status.failure is None
    for shard in (*before, *there.shard_keys(keys)):
        assert not server.exists(shard.alive(worker.id))
    until(lambda: not lmpool_threads())


def test_a_worker_that_is_stopped_while_it_loads_never_joins(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading, loaded = threading.Event(), threading.Event()

    def load(*_: Any, **__: Any) -> GatedEngine:
        loading.set()
        assert loaded.wait(60)
        return engine

    monkeypatch.setattr(service_module, "load_engine", load)
    worker = new()
    starting = Guarded(worker.start)
    assert loading.wait(60)
    worker.stop()  # does not wait for the engine
    loaded.set()
    with pytest.raises(LmpoolError, match="told to stop while the engine was loading"):
        starting.end()
    assert engine.closed.is_set()
    assert not server.exists(keys.info, keys.serving)


# --- serving -----------------------------------------------------------------------------------


def test_what_is_asked_in_any_shard_and_priority_is_answered(
    new: Callable[..., InProcessWorker], fake_url: str, pool_name: str
) -> None:
    new().start()
    prompts = [[number, 7] for number in range(30)]
    expected = np.stack([mock_row(prompt, 256) for prompt in prompts])
    with connected(fake_url, pool_name, cache_bytes=0) as lm:
        for priority in PRIORITIES:
            rows = lm.batch_next_token_logprobs_sync(prompts, timeout=60, priority=priority)
            assert np.array_equal(rows, expected)
        assert lm.statistics()["queued"] == 30
        assert lm.statistics()["cache_hits"] == 30
        assert lm.pool_statistics_sync()["computed"] == 30


def test_a_server_that_lost_everything_gets_all_of_it_again(
    new: Callable[..., InProcessWorker], tmp_path: Path, pool_name: str, keys: PoolKeys
) -> None:
    folder = tmp_path / "adapters" / "a"
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"{}")
    with FakeServer() as server, server.client() as client:
        worker = new(server.url, adapter_dirs=[str(tmp_path / "adapters")])
        worker.start()
        info, shards = served(client, keys)
        service = worker.service
        assert service.loop is not None
        assert service.adapters is not None
        adapters = service.adapters
        service.loop.call(lambda: adapters.add("x", str(folder))).result(60)
        registered = client.hgetall(shards[2].adapters)
        vocabulary = client.get(keys.vocabulary(info.fingerprint8))
        client.flushall()
        # Several threads put it back, each its own.
        until(lambda: all(client.hgetall(shard.adapters) == registered for shard in shards))
        until(lambda: client.get(keys.vocabulary(info.fingerprint8)) == vocabulary)
        until(lambda: client.exists(keys.info) and served(client, keys) == (info, shards))
        everywhere = [{worker.id}] * SHARDS * len(PRIORITIES)
        until(lambda: members(client, shards) == everywhere)
        until(lambda: all(client.exists(shard.alive(worker.id)) for shard in shards))
        caller = enqueue(client, shards[2], info, 1)
        assert [notice.status for notice in until(caller.notices)] == ["ok"]
        worker.stop()


def test_an_engine_that_breaks_ends_the_worker_and_its_jobs_are_for_others(
    new: Callable[..., InProcessWorker], engine: GatedEngine, server: redis.Redis, keys: PoolKeys
) -> None:
    engine.error = EngineBroken("CUDA error")
    worker = new(batch_size=2)
    worker.start()
    info, shards = served(server, keys)
    caller = enqueue(server, shards[0], info, 1, 2, 3, 4)
    assert engine.computing.wait(60)
    engine.gate.set()
    assert worker.failed.wait(60)
    assert isinstance(worker.service.status.failure, EngineBroken)
    worker.stop()
    # What the engine was at counts as delivered, whoever tries it next tries it alone. The rest was
    # given back as if nobody had seen it.
    pending: Any = server.xpending_range(shards[0].stream().key, GROUP, "-", "+", 10)
    assert len(pending) in (1, 2)
    assert {item["consumer"].decode() for item in pending} == {worker.id}
    assert server.xlen(shards[0].stream().key) == 4
    assert len(Consumer(server, shards[0], "other").read()) == 4 - len(pending)
    assert caller.notices() == []
    assert not any(server.exists(shard.alive(worker.id)) for shard in shards)


def adapter_in(folder: Path) -> str:
    """The folder of one, as the mock engine takes it."""
    place = folder / "adapter"
    place.mkdir()
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes(b"x")
    return str(place)


@pytest.mark.parametrize("call", ["clear_cache", "cache_prefix", "add_lora"])
def test_an_engine_that_hangs_at_a_call_ends_the_worker_which_says_so(
    call: str,
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = new(engine_timeout=0.2, adapter_dirs=[str(tmp_path)])

    answered = threading.Event()
    name = {"add_lora": "add_adapter"}.get(call, call)
    monkeypatch.setattr(engine, name, lambda *_: answered.wait(60))
    worker.start()
    given: dict[str, tuple[Any, ...]] = {
        "cache_prefix": (b"\1\0\0\0",),
        "add_lora": ("fr", adapter_in(tmp_path)),
    }
    asked = getattr(control, call)({"service": worker.service}, *given.get(call, ()))
    said = asyncio.run(asked)["error"]
    answered.set()
    assert "the worker ends: the engine has been at one batch, or one call" in said
    assert isinstance(worker.service.status.failure, EngineBroken)


@pytest.mark.parametrize("left_ms", [-2, 0, 20])  # -2: its caller has left
def test_a_call_that_lay_in_its_queue_waits_only_for_what_its_caller_has_left(
    left_ms: int, new: Callable[..., InProcessWorker], engine: GatedEngine
) -> None:
    class Queue:
        async def pttl(self, key: str) -> int:
            assert key == "arq:job:x"
            return left_ms

    worker, busy, begun = new(), threading.Event(), list[int]()
    worker.start()
    assert worker.service.loop is not None
    before = worker.service.loop.call(lambda: busy.wait(60))
    ctx = {"service": worker.service, "redis": Queue(), "job_id": "x"}

    async def ask() -> control.ControlReply:
        async with asyncio.timeout(30):
            return await control._on_engine(ctx, 600.0, lambda: begun.append(1))

    try:
        assert "error" in asyncio.run(ask())
    finally:
        busy.set()
    assert before.result(60)
    worker.service.loop.call(int).result(60)
    assert not begun


def test_a_job_whose_adapter_an_engine_hangs_at_counts_as_delivered(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, path = new(engine_timeout=0.2, adapter_dirs=[str(tmp_path)]), adapter_in(tmp_path)
    look, hangs = Watchdog.run, threading.Event()

    def look_later(watchdog: Watchdog) -> None:  # a call that is slow does not hang
        hangs.wait(60)
        look(watchdog)

    monkeypatch.setattr(Watchdog, "run", look_later)
    worker.start()
    added = asyncio.run(control.add_lora({"service": worker.service}, "fr", path))
    adapters, ended = worker.service.adapters, threading.Event()
    assert adapters is not None
    adapters._loaded.clear()
    monkeypatch.setattr(engine, "add_adapter", lambda *_: (hangs.set(), ended.wait(60)))
    info, shards = served(server, keys)
    job = new_job(1, adapter=f"fr@{added['result']}", fingerprint=info.fingerprint)
    Caller(server, shards[0]).enqueue(job)
    assert worker.failed.wait(60)
    worker.stop()
    ended.set()
    (item,) = server.xpending_range(shards[0].stream().key, GROUP, "-", "+", 10)  # type: ignore[misc, union-attr]
    assert (item["consumer"].decode(), item["times_delivered"]) == (worker.id, 1)


def test_a_worker_that_is_cut_off_blames_no_job(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows were computed, and others can write them."""

    def fail(publisher: Publisher, *_: Any) -> None:
        publisher._status.fail(ServerUnreachable("rows cannot be written"))

    monkeypatch.setattr(Publisher, "_prepare", lambda _, finished: (finished, None))
    monkeypatch.setattr(Publisher, "_write", fail)
    engine.gate.set()
    worker = new()
    worker.start()
    info, shards = served(server, keys)
    enqueue(server, shards[0], info, 1)
    assert worker.failed.wait(60)
    worker.stop()
    stream = shards[0].stream().key
    assert server.xpending(stream, GROUP)["pending"] == 0  # type: ignore[index]
    assert server.xlen(stream) == 1  # as if it were new


@pytest.mark.parametrize("at", ["starting", "publishing at leisure", "publishing"])
def test_a_job_that_a_thread_fails_of_counts_as_delivered(
    at: str,
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or its next worker would fail of it, and the next, without end."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a defect")

    owner, name = {
        "starting": (EngineLoop, "_admit"),
        "publishing at leisure": (Publisher, "_prepare"),
        "publishing": (Publisher, "_chunks"),
    }[at]
    monkeypatch.setattr(owner, name, fail)
    if at == "publishing":
        monkeypatch.setattr(Publisher, "_prepare", lambda _, finished: (finished, None))
    engine.gate.set()
    monkeypatch.setattr(publishing, "LOOK_EVERY", 3600.0)  # the publisher wakes up for no look
    worker = new()
    worker.start()
    info, shards = served(server, keys)
    publisher = worker.service._publisher
    assert publisher is not None
    publisher._call()
    until(lambda: not publisher._is_called and not publisher._writing.locked())
    enqueue(server, shards[0], info, 1)
    assert worker.failed.wait(60)
    worker.stop()
    (item,) = server.xpending_range(shards[0].stream().key, GROUP, "-", "+", 10)  # type: ignore[misc, union-attr]
    assert (item["consumer"].decode(), item["times_delivered"]) == (worker.id, 1)
    assert not server.exists(shards[0].alive(worker.id))


@pytest.mark.parametrize("name", ["intake", "recovery", "heartbeat"])
def test_a_thread_that_fails_ends_the_worker(
    name: str, new: Callable[..., InProcessWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a defect")

    owner: Any = {"intake": intake_module.Intake, "recovery": Recovery, "heartbeat": Heartbeat}[
        name
    ]
    monkeypatch.setattr(owner, "run", fail)
    worker = new()
    worker.start()
    assert worker.failed.wait(60)
    assert isinstance(worker.service.status.failure, ZeroDivisionError)


# --- leaving -----------------------------------------------------------------------------------


def test_what_runs_is_finished_and_what_waits_is_given_back(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "continuous", True)  # so that it claims the next ones already
    worker = new(batch_size=1)
    worker.start()
    info, shards = served(server, keys)
    caller = enqueue(server, shards[1], info, 1)
    assert engine.computing.wait(60)
    others = enqueue(server, shards[2], info, 2, 3)
    until(lambda: Consumer(server, shards[2], worker.id).held())
    stopping = Guarded(worker.stop)
    until(worker.service.status.stopping.is_set)
    assert stopping.is_alive()
    engine.gate.set()
    stopping.end()
    assert [notice.status for notice in caller.notices()] == ["ok"]
    assert others.notices() == []
    assert server.xlen(shards[1].stream().key) == 0
    # As good as new: delivered to nobody.
    assert server.xpending(shards[2].stream().key, GROUP)["pending"] == 0  # type: ignore[index]
    assert len(Consumer(server, shards[2], "other").read()) == 2
    assert members(server, shards) == [
        {"other"} if stream is shards[2].stream() else set() for stream in streams(shards)
    ]


def test_an_engine_that_hangs_is_left_after_the_time_for_draining(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = new(drain_timeout=0.1)
    worker.start()
    info, shards = served(server, keys)
    enqueue(server, shards[0], info, 1)
    assert engine.computing.wait(60)
    worker.stop()
    assert "the engine is still busy after 0.1 s: leaving without it" in caplog.text
    # The job is its own still: others try it alone, once they miss its heartbeat.
    pending: Any = server.xpending_range(shards[0].stream().key, GROUP, "-", "+", 10)
    assert [item["consumer"].decode() for item in pending] == [worker.id]
    assert not server.exists(shards[0].alive(worker.id))
    engine.gate.set()


def test_a_thread_that_writes_yet_keeps_the_numbers_of_its_sockets(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another file's would be the same at once, and get what is written."""
    writing, left = threading.Event(), threading.Event()
    found: list[Any] = []

    def write(self: Publisher, chunk: Any) -> None:
        found.append(self._servers.anywhere.connection_pool.get_connection()._sock)
        writing.set()
        assert left.wait(60)

    monkeypatch.setattr(Publisher, "_prepare", lambda _, finished: (finished, None))
    monkeypatch.setattr(Publisher, "_write", write)
    engine.gate.set()
    worker = new(drain_timeout=0.1)
    worker.start()
    info, shards = served(server, keys)
    enqueue(server, shards[0], info, 1)
    assert writing.wait(60)
    worker.stop()
    assert found[0].fileno() != -1
    assert found[0].recv(1) == b""  # nothing more comes or goes
    left.set()
    found[0].close()


def die_with(server: redis.Redis, shard: ShardKeys, info: ModelInfo) -> tuple[bytes, Caller]:
    """A job of a worker that is about to die, ``dying``, and who waits for it."""
    job, key = new_job(2, fingerprint=info.fingerprint), shard.stream().key
    # In one step: the worker itself is to read nothing of it.
    with server.pipeline(transaction=True) as pipeline:
        pipeline.xadd(key, {"job": pack_job(job)})
        pipeline.xreadgroup(GROUP, "dying", {key: ">"})
        ((_, ((entry, _),)),) = pipeline.execute()[1]
    write_flight(server, shard, job, entry.decode())
    caller = Caller(server, shard)
    assert caller.check(job)[0] == "j"
    return entry, caller


def test_a_job_that_waits_to_be_run_alone_keeps_its_deliveries_without_this_one(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmpool.worker.recovery.LOOK_EVERY", 0.01)
    worker = new(batch_size=1)
    worker.start()
    info, shards = served(server, keys)
    key = shards[0].stream().key
    with beating(server, shards[0], "dying"):
        enqueue(server, shards[1], info, 1)
        assert engine.computing.wait(60)
        entry, _ = die_with(server, shards[0], info)
    batcher = worker.service._batcher
    assert batcher is not None
    until(lambda: len(batcher._alone))
    stopping = Guarded(worker.stop)
    until(worker.service.status.stopping.is_set)
    engine.gate.set()
    stopping.end()
    (item,) = server.xpending_range(key, GROUP, "-", "+", 10)  # type: ignore[misc, union-attr]
    assert item["message_id"] == entry
    assert item["times_delivered"] == 1


def test_who_leaves_in_two_steps_takes_one_delivery_off(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a job that it took over, and whose answer was lost: as the engine is at work yet, and
    again once it is done. Else it would be given back as if it were new."""
    monkeypatch.setattr("lmpool.worker.recovery.LOOK_EVERY", 600)  # or it would find it again
    worker = new(batch_size=1)
    worker.start()
    info, shards = served(server, keys)
    enqueue(server, shards[1], info, 1)
    assert engine.computing.wait(60)
    key = shards[0].stream().key
    with beating(server, shards[0], "dying"):
        entry, _ = die_with(server, shards[0], info)
        server.xclaim(key, GROUP, worker.id, 0, [entry], retrycount=2)
        stopping = Guarded(worker.stop)
        until(lambda: server.xpending_range(key, GROUP, "-", "+", 1)[0]["times_delivered"] == 1)
        engine.gate.set()
        stopping.end()
        (item,) = server.xpending_range(key, GROUP, "-", "+", 10)  # type: ignore[misc]
    assert item["message_id"] == entry
    assert item["consumer"].decode() == worker.id
    assert item["times_delivered"] == 1


def test_a_job_that_waits_to_be_run_alone_is_run_so_by_a_worker_that_moves(
    new: Callable[..., InProcessWorker],
    engine: GatedEngine,
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is given to nobody as if it were new."""
    monkeypatch.setattr("lmpool.worker.recovery.LOOK_EVERY", 0.01)
    worker = new(batch_size=1)
    worker.start()
    service = worker.service
    info, shards = served(server, keys)
    with beating(server, shards[0], "dying"):
        enqueue(server, shards[1], info, 1)
        assert engine.computing.wait(60)
        entry, caller = die_with(server, shards[0], info)
    batcher = service._batcher
    assert batcher is not None
    until(lambda: len(batcher._alone))
    there = info.moved_to(SHARDS + 2, info.lanes)
    server.set(keys.info, there.pack())
    server.set(keys.serving, there.mark())
    service._mover.tell(there)
    until(lambda: service.seat is not None and service.seat.info.layout == there.layout)
    until(lambda: not server.exists(shards[0].alive(worker.id)), what="it to have left")
    stream = shards[0].stream().key
    assert [name for name, _ in server.xrange(stream)] == [entry]  # type: ignore[union-attr]
    engine.gate.set()
    assert [notice.status for notice in until(caller.notices)] == ["ok"]


def test_a_server_that_is_gone_keeps_nobody_from_leaving(
    new: Callable[..., InProcessWorker], caplog: pytest.LogCaptureFixture
) -> None:
    before = lmpool_threads()
    with FakeServer() as server:
        worker = new(server.url)
        worker.start()
    began = time.monotonic()
    worker.stop()
    assert time.monotonic() - began < 60
    assert "left without a word to the server" in caplog.text
    assert worker.service.status.failure is None
    assert lmpool_threads() == before


def test_a_heartbeat_that_is_on_its_way_does_not_bring_the_worker_back(
    new: Callable[..., InProcessWorker],
    server: redis.Redis,
    keys: PoolKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmpool.worker.heartbeat.EVERY", 0.01)
    beat, beating, awaited = Heartbeat.beat, threading.Event(), threading.Event()

    def slow(self: Heartbeat, servers: Any) -> None:
        if threading.current_thread().name == "lmpool-heartbeat":
            beating.set()
            assert awaited.wait(60)  # until the worker waits for it
        beat(self, servers)

    monkeypatch.setattr(Heartbeat, "beat", slow)
    worker = new()
    worker.start()
    _, shards = served(server, keys)
    assert beating.wait(60)
    thread = worker.service.seat._threads["heartbeat"]
    join = thread.join

    def wait_for_it(timeout: float | None = None) -> None:
        awaited.set()
        join(timeout)

    monkeypatch.setattr(thread, "join", wait_for_it)
    worker.stop()
    assert not any(server.exists(shard.alive(worker.id)) for shard in shards)
    assert members(server, shards) == [set()] * SHARDS * len(PRIORITIES)
    assert not server.exists(keys.serving)


# --- names and options ---------------------------------------------------------------------------


def test_a_name_that_no_other_worker_has_says_where_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = WorkerOptions(worker_name="host-3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Of one process, as in containers, whose ids are alike.
    names = {consumer_name(options) for _ in range(1000)}
    assert len(names) >= 999  # two in 4 billion are alike
    assert all(name.startswith("host-3-") for name in names)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert consumer_name(options).startswith("host-3-gpu2+3-")


def test_an_option_that_is_given_twice_is_refused(new: Callable[..., InProcessWorker]) -> None:
    worker = new(revision="a", engine_opts={"revision": "b"})
    with pytest.raises(SettingsError, match="revision is set twice: write it as LMPOOL_REVISION"):
        worker.start()


def test_who_it_is_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    service = Service(WorkerOptions(engine="mock"), lambda: None)
    described = service.status.description
    assert described.keys() == {"id", "host", "pid", "engine", "gpu", "control"}
    assert described["control"] == ""
    assert (described["id"], described["gpu"]) == (service.consumer, "5")
