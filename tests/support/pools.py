"""Pools of several worker processes, clients in processes of their own, and what both leave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import redis

from lmpool import PooledLM
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.model_info import ModelInfo
from tests.support.waiting import until
from tests.support.workers import WorkerProcess, worker_process

T = TypeVar("T")


@contextmanager
def worker_processes(
    url: str, pool: str, count: int = 2, **settings: Any
) -> Iterator[list[WorkerProcess]]:
    """Several workers of one pool, started at once; see `worker_process`."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_process(url, pool, alive=False, **settings))
            for _ in range(count)
        ]
        for worker in workers:
            worker.wait_until_alive()
        yield workers
        leaving = [worker for worker in workers if worker.process.poll() is None]
        for worker in leaving:  # all at once
            worker.terminate()
        for worker in leaving:
            status = worker.wait()
            assert status == 0, f"a worker ended with {status}:\n{worker.log}"


def pool_shards(client: redis.Redis, pool: str) -> tuple[ShardKeys, ...]:
    """The keys of the pool's shards."""
    keys = PoolKeys(pool)
    packed = client.get(keys.info)
    assert isinstance(packed, bytes), f"no pool {pool}"
    info = ModelInfo.unpack(packed)
    return info.shard_keys(keys)


def pending(client: redis.Redis, shard: ShardKeys) -> dict[str, int]:
    """How many jobs each of a shard's consumers holds."""
    found: Any = client.xinfo_consumers(shard.stream().key, GROUP)
    return {consumer["name"].decode(): consumer["pending"] for consumer in found}


def assert_at_rest(client: redis.Redis, pool: str) -> None:
    """Nothing waits, nothing is held, and no client has left anything."""
    for shard in pool_shards(client, pool):
        with client.pipeline(transaction=False) as pipe:
            for stream in shard.streams:
                pipe.xlen(stream.key)
            left = {s.key: n for s, n in zip(shard.streams, pipe.execute(), strict=True) if n}
            assert not left, left
            for stream in shard.streams:
                pipe.xpending(stream.key, GROUP)
            assert not any(held["pending"] for held in pipe.execute())
        for kind in ("flight", "reply"):
            keys = list(client.scan_iter(f"{shard.prefix}:{kind}:*", count=1000))
            assert not keys, keys


def until_at_rest(client: redis.Redis, pool: str, timeout: float = 60.0) -> None:
    """Wait for what `assert_at_rest` asserts."""

    def at_rest() -> bool:
        try:
            assert_at_rest(client, pool)
        except AssertionError:
            return False
        except redis.exceptions.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return False  # a stream was lost: a worker makes it anew
        return True

    try:
        until(at_rest, timeout)
    except AssertionError:
        assert_at_rest(client, pool)


class Asking(threading.Thread):
    """A caller who waits for rows while the test goes on; closing the client ends the wait."""

    def __init__(self, lm: PooledLM, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(daemon=True)
        self._lm = lm
        self._prompts = prompts
        self._found: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._found = self._lm.batch_next_token_logprobs_sync(self._prompts, timeout=150)
        except BaseException as error:
            self._found = error

    def rows(self) -> Any:
        """Its rows, or what it got instead of them is raised."""
        self.join()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found


def some_prompts(
    count: int, *, seed: int, longest: int = 12, vocab_size: int = 256
) -> list[list[int]]:
    """Different prompts of 2 tokens and more, the same for the same seed."""
    random = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        length = int(random.integers(2, longest + 1))
        found[tuple(random.integers(0, vocab_size, length).tolist())] = None
    return [list(prompt) for prompt in found]


@dataclass(frozen=True)
class Batch:
    """One line of the mock engine's log."""

    size: int
    tokens: int
    start: float
    end: float
    time: float
    pid: int


def read_batches(log: Path) -> list[Batch]:
    """The mock engine's log, in the order in which batches began."""
    lines = log.read_text().splitlines() if log.exists() else []
    return sorted((Batch(**json.loads(line)) for line in lines), key=lambda batch: batch.start)


_barrier: Any = None


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _run_at_once(function: Callable[..., T], arguments: Sequence[Any]) -> T:
    _barrier.wait(60)
    return function(*arguments)


def in_processes(function: Callable[..., T], arguments: Sequence[Sequence[Any]]) -> list[T]:
    """Call a module's function in a process of its own for each of `arguments`, all at once."""
    context = get_context("spawn")
    count = len(arguments)
    with ProcessPoolExecutor(
        count, context, initializer=_set_barrier, initargs=(context.Barrier(count),)
    ) as processes:
        futures = [processes.submit(_run_at_once, function, chosen) for chosen in arguments]
        return [future.result(60) for future in futures]
