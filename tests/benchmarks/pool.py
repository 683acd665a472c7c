"""The pool under measurement: prompts for it, its processes, and whether its rows are right."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.counters import COMPUTED
from lmpool.servers import Servers
from tests.benchmarks.machine import cpu_seconds
from tests.support.clients import connected
from tests.support.cluster import Cluster
from tests.support.server import RealServer
from tests.support.workers import WorkerProcess, worker_process

Prompts = NewType("Prompts", list[list[int]])

CHECKED = 64
"""At least as many rows of each run are compared with the right ones."""
STORED_WITHIN = 30.0
"""Seconds that what callers have is given to be stored."""


class WrongRows(Exception):
    """A run gave wrong rows, or did other work than it was to do: its time means nothing."""


def make_prompts(count: int, vocab_size: int, *seed: int, length: int = 32) -> Prompts:
    """Prompts of random tokens: distinct, and others for each seed."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (count, length))
    return Prompts(tokens.tolist())


def check_rows(rows: Sequence[Any], prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise `WrongRows` unless there is a row for each prompt and a sample of them is right."""
    if len(rows) != len(prompts):
        raise WrongRows(f"{len(rows)} rows for {len(prompts)} prompts")
    step = max(1, len(prompts) // CHECKED)
    for place in {*range(0, len(prompts), step), len(prompts) - 1}:
        if not np.array_equal(rows[place], mock_row(prompts[place], vocab_size)):
            raise WrongRows(f"row {place} of {len(rows)} is not that of its prompt")


@dataclass(slots=True)
class Cpu:
    """Processor time of each side of some work, in seconds."""

    client: float
    worker: float
    server: float

    @property
    def total(self) -> float:
        """Of all three."""
        return self.client + self.worker + self.server

    def per_job(self, since: Cpu, jobs: int) -> Cpu:
        """Microseconds for each of `jobs` done since then."""
        scale = 1e6 / jobs
        return Cpu(
            (self.client - since.client) * scale,
            (self.worker - since.worker) * scale,
            (self.server - since.server) * scale,
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool: its worker's process, and a client in this one."""

    lm: lmpool.PooledLM
    worker: WorkerProcess
    server: RealServer | Cluster

    def cpu(self) -> Cpu:
        """Processor time used so far."""
        return Cpu(
            cpu_seconds(),
            cpu_seconds(self.worker.pid),
            sum(map(cpu_seconds, self.server.pids)),
        )

    def queued(self) -> int:
        """Jobs that the client has had computed."""
        return self.lm.statistics()["queued"]

    def computed(self) -> int:
        """Jobs that workers have stored the answers of. One counter is read, as this is asked for
        again and again while they are at work."""
        with closing(Servers.of_url(self.server.url)) as servers:
            return self._counted(servers)

    def until_computed(self, count: int) -> None:
        """Wait until workers have stored as many: callers may have what lies near before.

        Raises `WrongRows` where they do not.
        """
        with closing(Servers.of_url(self.server.url)) as servers:
            until = time.monotonic() + STORED_WITHIN
            while (stored := self._counted(servers)) < count:
                if time.monotonic() > until:
                    raise WrongRows(f"{stored} jobs were stored where {count} were to be")
                time.sleep(0.001)

    @contextmanager
    def until_stored(self) -> Iterator[None]:
        """Wait behind some work until workers have stored all that this client had computed."""
        computed, queued = self.computed(), self.queued()
        yield
        self.until_computed(computed + self.queued() - queued)

    def _counted(self, servers: Servers) -> int:
        return sum(
            int(servers.for_shard(shard).hget(shard.counters, COMPUTED.field) or 0)
            for shard in self.lm.shards
        )


@contextmanager
def serving(
    server: RealServer | Cluster, name: str, vocab_size: int, **settings: Any
) -> Iterator[Pool]:
    """A pool of one worker process with the mock engine, and a client with numpy rows."""
    settings = {"engine_opts": {"vocab_size": vocab_size}, "log_level": "warning", **settings}
    with (
        worker_process(server.url, name, **settings) as worker,
        connected(server.url, name) as lm,
    ):
        # Everything is imported, connected and allocated once.
        warm_up = make_prompts(256, vocab_size, 2**31)
        check_rows(lm.batch_next_token_logprobs_sync(warm_up), warm_up, vocab_size)
        pool = Pool(lm, worker, server)
        pool.until_computed(len(warm_up))
        yield pool


def must_be_computed(pool: Pool, before: int, asked: int) -> None:
    """Raise `WrongRows` where answers came from a cache: then something else was measured."""
    queued = pool.queued() - before
    if queued != asked:
        raise WrongRows(f"{queued} jobs were computed where {asked} were to be")


def forget_results(server: RealServer) -> None:
    """Delete all rows that a server has: their memory is there for the next ones."""
    with server.client() as client:
        keys = [*client.scan_iter("*:result:*", count=10_000)]
        if keys:
            client.delete(*keys)
