"""What waits in a shard's streams of jobs, and which of its lanes are in use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmpool.commands import Pipeline, Server
from lmpool.keys import GROUP, JobStream, ShardKeys
from lmpool.server import is_lost


@dataclass(frozen=True, slots=True)
class StreamQueue:
    """A stream that has jobs: how many, how many of these a worker has, and for how many seconds
    the oldest has been there."""

    stream: JobStream
    jobs: int
    pending: int
    age: float

    @property
    def lane(self) -> tuple[ShardKeys, int]:
        """Its shard and its lane's number: there is a stream for each priority."""
        return self.stream.shard, self.stream.lane

    @property
    def waiting(self) -> int:
        """Jobs that no worker has taken."""
        return max(0, self.jobs - self.pending)


@dataclass(frozen=True, slots=True)
class ShardQueues:
    """Of one shard: how many lanes jobs are put into, and the streams that have some."""

    lanes_in_use: int
    streams: tuple[StreamQueue, ...]


def read_queues(server: Server, shard: ShardKeys) -> ShardQueues:
    """Look at all streams of a shard, and closer at those that have jobs.

    What was damaged, or this user may not see, counts as empty. Raises redis-py's exceptions where
    the server is away.
    """
    with server.pipeline(transaction=False) as pipeline:
        pipeline.execute_command("TIME")
        pipeline.hget(shard.bounds, "used")
        for stream in shard.streams:
            pipeline.xlen(stream.key)
        clock, used, *lengths = answers_of(pipeline)
    now = time.time() if isinstance(clock, Exception) else clock[0] + clock[1] / 1e6
    there = [
        (stream, length)
        for stream, length in zip(shard.streams, lengths, strict=True)
        if isinstance(length, int) and length
    ]
    if not there:
        return ShardQueues(_in_use(shard, used), ())
    with server.pipeline(transaction=False) as pipeline:
        for stream, _ in there:
            pipeline.xinfo_consumers(stream.key, GROUP)
            pipeline.xrange(stream.key, "-", "+", 1)
        found = answers_of(pipeline)
    queues = [
        StreamQueue(stream, length, _pending(consumers), _age(first, now))
        for (stream, length), consumers, first in zip(there, found[::2], found[1::2], strict=True)
    ]
    return ShardQueues(_in_use(shard, used), tuple(queues))


def answers_of(pipeline: Pipeline) -> list[Any]:
    """Answers, errors among them. Raises the first that says that a node is away, or its slots."""
    found = pipeline.execute(raise_on_error=False)
    for answer in found:
        if isinstance(answer, Exception) and is_lost(answer):
            raise answer
    return found


def _in_use(shard: ShardKeys, used: object) -> int:
    """As the workers said last, in `alive.lua`: one where nobody has."""
    known = int(used) if isinstance(used, bytes) and used.isdigit() and len(used) < 6 else 1
    return max(1, min(known, shard.lanes))


def _pending(consumers: Sequence[Any] | Exception) -> int:
    if isinstance(consumers, Exception):
        return 0
    return sum(int(consumer["pending"]) for consumer in consumers)


def _age(first: Sequence[Any] | Exception, now: float) -> float:
    if isinstance(first, Exception) or not first:
        return 0.0
    return max(0.0, now - int(first[0][0].partition(b"-")[0]) / 1000)
