"""Clients that leave in any way: what only they had asked is not computed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import redis

import lmpool
from lmpool.errors import ClientClosed, LmpoolError, PoolTimeout
from tests.support.clients import connected
from tests.support.gate import Gate
from tests.support.mock_rows import rows_of
from tests.support.pools import (
    Asking,
    pool_shards,
    some_prompts,
    until_at_rest,
)
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import (
    clean_environment,
    worker_process,
)

LEAVING_PROCESS = """
import sys, threading, time
import lmpool
from lmpool.clock import ServerClock

url, pool, prompts, ago = sys.argv[1], sys.argv[2], eval(sys.argv[3]), int(sys.argv[4])
now_ms = ServerClock.now_ms
ServerClock.now_ms = lambda clock: now_ms(clock) - 1000 * ago
lm = lmpool.connect(url, pool, framework="numpy")
threading.Thread(target=lm.batch_next_token_logprobs_sync, args=(prompts,), daemon=True).start()
while lm.statistics()["queued"] < len(prompts):
    time.sleep(0.005)
print("asked", flush=True)
sys.stdin.readline()
"""


class LeavingProcess:
    """A client in a process of its own that asks (`ago` seconds), and ends without closing."""

    def __init__(self, url: str, pool: str, prompts: list[list[int]], *, ago: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LEAVING_PROCESS, url, pool, repr(prompts), str(ago)],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "asked\n":
            self.kill()
            raise AssertionError("the client's process has ended")

    def end(self) -> None:
        """It comes to the end of its program."""
        self._process.communicate("\n", timeout=60)
        assert self._process.returncode == 0

    def kill(self) -> None:
        """It is killed."""
        self._process.kill()
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def held(server_binary: str, tmp_path_factory) -> Iterator[tuple[str, str, Gate]]:
    """A pool whose one worker computes when it may."""
    gate = Gate(tmp_path_factory.mktemp("held"))
    with (
        RealServer(binary=server_binary) as server,
        worker_process(server.url, "held", batch_size=4, **gate.settings()),
    ):
        yield server.url, "held", gate
        gate.open()


WAYS = ("close", "cancel", "timeout", "reset", "a program's end", "kill -9")


@pytest.mark.parametrize("way", WAYS)
def test_what_only_a_client_that_left_had_asked_is_not_computed(held, way):
    url, pool, gate = held
    first, *asked = some_prompts(31, seed=100 + WAYS.index(way))
    shared = asked[:10]
    client = redis.Redis.from_url(url, protocol=2)
    gate.close()
    begun = len(gate.batches())
    with client, connected(url, pool) as staying, connected(url, pool) as leaving:
        (shard,) = pool_shards(client, pool)
        before = staying.pool_statistics_sync()
        try:
            busy = Asking(staying, [first])
            gate.wait_for_batch(begun + 1)
            others = set(client.scan_iter(f"{shard.prefix}:reply:*"))
            leave = start_to_leave(way, url, pool, leaving, asked)
            until(lambda: client.xlen(shard.stream().key) == 31, what="the jobs to be queued")
            joined = Asking(staying, shared)
            until(lambda: staying.statistics()["joined"] == 10, what="the other to join")
            leave()
            if way == "kill -9":
                # The server finds out half a minute later, by itself.
                assert (
                    client.delete(*set(client.scan_iter(f"{shard.prefix}:reply:*")) - others) == 1
                )
            else:
                until(
                    lambda: client.xlen(shard.stream().key) == 11,
                    what="what it had asked to be gone",
                )
        finally:
            gate.open()
        np.testing.assert_array_equal(busy.rows(), rows_of([first]))
        np.testing.assert_array_equal(joined.rows(), rows_of(shared))
        until(lambda: client.xlen(shard.stream().key) == 0, what="the stream to be empty")
        after = staying.pool_statistics_sync()
        assert after["computed"] - before["computed"] == 11
        assert after["failed"] == before["failed"]
    with redis.Redis.from_url(url, protocol=2) as client:
        until_at_rest(client, pool)


def start_to_leave(
    way: str, url: str, pool: str, leaving: lmpool.PooledLM, asked: list[list[int]]
) -> Callable[[], None]:
    """Have a client ask for rows. Answers what makes it leave, and waits until it has."""
    if way in ("a program's end", "kill -9"):
        process = LeavingProcess(url, pool, asked, ago=60 if way == "kill -9" else 0)
        return process.end if way == "a program's end" else process.kill
    task: asyncio.Task[object]
    begun = threading.Event()
    failures: list[BaseException] = []

    async def ask() -> None:
        nonlocal task
        limit = 15 if way == "timeout" else None  # until then the other has joined
        task = asyncio.create_task(leaving.batch_next_token_logprobs(asked, timeout=limit))
        begun.set()
        try:
            await task
        except BaseException as error:
            failures.append(error)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    thread = threading.Thread(target=lambda: asyncio.run(ask()), daemon=True)
    thread.start()
    assert begun.wait(60)

    def leave() -> None:
        if way == "close":
            leaving.close()
        elif way == "cancel":
            task.get_loop().call_soon_threadsafe(task.cancel)
        elif way == "reset":
            leaving.reset_async_queries()
        thread.join(60)
        error = {"close": ClientClosed, "cancel": asyncio.CancelledError, "timeout": PoolTimeout}
        assert [type(failure) for failure in failures] == [error.get(way, LmpoolError)]
        if way in ("cancel", "timeout"):
            statistics = leaving.statistics()
            # The worker may say first that a job is late.
            late = statistics["expired"] if way == "timeout" else 0
            assert statistics["withdrawn"] + late == 30

    return leave
