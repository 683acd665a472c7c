"""arq with one worker process beside the pool, on the same server: its no-op jobs as a peer."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgpack
from arq.connections import ArqRedis, RedisSettings, create_pool

from tests.benchmarks.machine import cpu_seconds
from tests.benchmarks.pool import Cpu, WrongRows
from tests.support.server import RealServer

ROOT = Path(__file__).resolve().parents[2]
ENQUEUERS = 16
"""Tasks that enqueue at once, each on a connection of its own: more of them are not faster."""
COMMAND = [
    sys.executable, "-m", "arq", "tests.benchmarks.arq_worker.WorkerSettings",
    "--custom-log-dict", "tests.benchmarks.arq_worker.QUIET",
]  # fmt: skip


class ArqPeer:
    """A client of one arq worker; see `arq_peer`.

    The worker is frozen while it is not measured, so that its polling disturbs nobody.
    """

    def __init__(
        self,
        server: RealServer,
        queue: str,
        process: subprocess.Popen[bytes],
        log: IO[bytes],
        serializers: dict[str, Any],
    ) -> None:
        self._server = server
        self._queue = queue
        self._process = process
        self._log = log
        self._serializers = serializers
        self._numbers = itertools.count()

    def throughput(self, jobs: int) -> tuple[float, Cpu]:
        """Jobs a second, and microseconds a job of client, worker and server.

        From the first enqueue until the last job's result is written: the worker takes a job off
        the queue in the transaction that writes its result. Reading results is not counted.
        """
        return asyncio.run(self._throughput(jobs))

    def latencies(self, jobs: int) -> list[float]:
        """Seconds of each of so many jobs, enqueued and awaited one after another."""
        return asyncio.run(self._latencies(jobs))

    async def _throughput(self, jobs: int) -> tuple[float, Cpu]:
        client = await self._client()
        first = next(self._numbers)
        ids = [f"{self._queue}-{first}-{number}" for number in range(jobs)]
        waiting = iter(enumerate(ids))

        async def enqueue() -> None:
            for number, job in waiting:
                await client.enqueue_job("no_op", number, _job_id=job)

        self._process.send_signal(signal.SIGCONT)
        before, began = self._cpu(), time.perf_counter()
        await asyncio.gather(*(enqueue() for _ in range(ENQUEUERS)))
        while await client.zcard(self._queue):
            self._check()
            await asyncio.sleep(0.002)
        took = time.perf_counter() - began
        used = self._cpu().per_job(before, jobs)
        self._process.send_signal(signal.SIGSTOP)
        await self._forget(client, ids)
        await client.aclose()
        return jobs / took, used

    async def _latencies(self, jobs: int) -> list[float]:
        client = await self._client()
        first = next(self._numbers)
        taken, ids = [], []
        self._process.send_signal(signal.SIGCONT)
        for number in range(jobs):
            began = time.perf_counter()
            job = await client.enqueue_job("no_op", number, _job_id=f"{first}-{number}")
            if job is None or await job.result(timeout=30, poll_delay=0.0005) != number:
                raise WrongRows("an arq job answered something else")
            taken.append(time.perf_counter() - began)
            ids.append(job.job_id)
        self._process.send_signal(signal.SIGSTOP)
        await self._forget(client, ids)
        await client.aclose()
        return taken

    async def _client(self) -> ArqRedis:
        settings = RedisSettings(unix_socket_path=str(self._server.socket))
        return await create_pool(settings, default_queue_name=self._queue, **self._serializers)

    async def _forget(self, client: ArqRedis, ids: list[str]) -> None:
        """Delete every result; there must be one of each job."""
        deleted = 0
        for i in range(0, len(ids), 1000):
            deleted += await client.delete(*(f"arq:result:{job}" for job in ids[i : i + 1000]))
        if deleted != len(ids):
            raise WrongRows(f"{deleted} results of {len(ids)} arq jobs")

    def _check(self) -> None:
        status = self._process.poll()
        if status is not None:
            self._log.seek(0)
            said = self._log.read().decode("utf-8", "replace")
            raise RuntimeError(f"the arq worker ended with {status}:\n{said}")

    def _cpu(self) -> Cpu:
        return Cpu(cpu_seconds(), cpu_seconds(self._process.pid), cpu_seconds(self._server.pid))


@contextmanager
def arq_peer(
    server: RealServer,
    queue: str,
    *,
    by_msgpack: bool = False,
    max_jobs: int = 100,
    poll_delay: float = 0.005,
) -> Iterator[ArqPeer]:
    """An arq worker process while the block runs, warmed up and frozen."""
    queue = f"bench:{queue}"
    environment = {
        "LMPOOL_BENCH_QUEUE": queue,
        "LMPOOL_BENCH_SOCKET": str(server.socket),
        "LMPOOL_BENCH_SERIALIZER": "msgpack" if by_msgpack else "pickle",
        "LMPOOL_BENCH_MAX_JOBS": str(max_jobs),
        "LMPOOL_BENCH_POLL_DELAY": str(poll_delay),
    }
    serializers = (
        {"job_serializer": msgpack.packb, "job_deserializer": msgpack.unpackb} if by_msgpack else {}
    )
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            COMMAND, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=log
        )
        try:
            peer = ArqPeer(server, queue, process, log, serializers)
            peer.throughput(200)  # waits until it works, and warms it up
            yield peer
        finally:
            process.terminate()
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
