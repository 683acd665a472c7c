"""What waits in a shard's streams of jobs, and which of its lanes are in use."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from redis.exceptions import NoPermissionError, ResponseError

from lmpool.commands import Pipeline, Server
from lmpool.keys import GROUP, PRIORITIES, JobStream, ShardKeys
from lmpool.replies import ReplyTooLong
from lmpool.server import is_lost

LONGEST: Final = 5
"""Streams of a shard whose first job is always read for its age, of those that no worker has a job
of: jobs may be long, and lanes many."""
LOOKS: Final = 16
"""Other ones of each priority that are read, at most, to find the oldest job of all."""


@dataclass(frozen=True, slots=True)
class StreamQueue:
    """A stream that has jobs: how many, how many of these a worker has (those among them that were
    withdrawn meanwhile), how many no worker has taken, and for how many seconds the oldest has been
    there.

    `waiting` is "at least so many" while workers have jobs that were withdrawn, where the server
    cannot tell how many came after the last that was taken: that was deleted, or some after it.
    `age` is 0 where no worker has a job of the stream, and it is neither one of the `LONGEST` nor
    among those that were last read from before the oldest job came that was found (`LOOKS` of them
    at most), or its first job is too long to be read.
    """

    stream: JobStream
    jobs: int
    pending: int
    waiting: int
    age: float

    @property
    def lane(self) -> tuple[ShardKeys, int]:
        """Its shard and its lane's number: there is a stream for each priority."""
        return self.stream.shard, self.stream.lane


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
    groups = _groups(server, [stream for stream, _ in there])
    began = _beginnings(server, [(*each, group) for each, group in zip(there, groups, strict=True)])
    queues = []
    for (stream, length), group in zip(there, groups, strict=True):
        age = max(0.0, now - began.get(stream, now))
        waiting = min(length, max(0, length - group.pending, group.behind))
        queues.append(StreamQueue(stream, length, group.pending, waiting, age))
    return ShardQueues(_in_use(shard, used), tuple(queues))


class _Group(NamedTuple):
    """Of a stream's workers: how many jobs they have, how many came after the last of them (0 where
    that is unknown), and when the first of them came, in seconds since 1970; and before when all
    came that was read."""

    pending: int = 0
    behind: int = 0
    oldest: float | None = None
    read_until: float = 0.0


def _beginnings(
    server: Server, there: Sequence[tuple[JobStream, int, _Group]]
) -> dict[JobStream, float]:
    """When the first job of each stream came, of those of which that is known or worth a look: how
    many jobs each has is given."""
    began = {stream: group.oldest for stream, _, group in there if group.oldest is not None}
    unread = [each for each in there if each[0] not in began]
    unread.sort(key=lambda each: -each[1])
    for stream, *_ in unread[:LONGEST]:
        _look_at(server, stream, began)
    for priority in PRIORITIES:
        others = [each for each in unread[LONGEST:] if each[0].priority == priority]
        others.sort(key=lambda each: each[2].read_until)
        for stream, _, group in others[:LOOKS]:
            known = [at for of, at in began.items() if of.priority == priority]
            if group.read_until >= min(known, default=math.inf):
                break  # what waits there came after that
            _look_at(server, stream, began)
    return began


def _groups(server: Server, streams: Sequence[JobStream]) -> list[_Group]:
    """What is known of jobs without reading any."""
    with server.pipeline(transaction=False) as pipeline:
        for stream in streams:
            pipeline.xinfo_groups(stream.key)
            pipeline.xpending(stream.key, GROUP)
        found = answers_of(pipeline)
    told = [_group(*pair) for pair in zip(found[::2], found[1::2], strict=True)]
    refused = [
        place for place, answer in enumerate(found[::2]) if isinstance(answer, NoPermissionError)
    ]
    if refused:  # this user's rights are those of an earlier release
        with server.pipeline(transaction=False) as pipeline:
            for place in refused:
                pipeline.xinfo_consumers(streams[place].key, GROUP)
            for place, consumers in zip(refused, answers_of(pipeline), strict=True):
                told[place] = told[place]._replace(pending=_pending(consumers))
    return told


def _group(groups: Sequence[Any] | Exception, pending: Any) -> _Group:
    oldest = None
    if not isinstance(pending, Exception) and pending["min"]:
        oldest = _seconds(pending["min"])
    if not isinstance(groups, Exception):
        for group in groups:
            if group["name"] == GROUP.encode():
                behind, last = int(group.get("lag") or 0), _seconds(group["last-delivered-id"])
                return _Group(int(group["pending"]), behind, oldest, last)
    return _Group(oldest=oldest)


def _look_at(server: Server, stream: JobStream, began: dict[JobStream, float]) -> None:
    """Note when a stream's first job came, as far as it can be read."""
    try:
        found = server.xrange(stream.key, "-", "+", 1)
    except (ReplyTooLong, ResponseError) as error:
        if isinstance(error, ResponseError) and is_lost(error):
            raise
        return
    if found:
        began[stream] = _seconds(found[0][0])


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


def _seconds(entry: bytes) -> float:
    """When an entry came, by its id."""
    return int(entry.partition(b"-")[0]) / 1000
