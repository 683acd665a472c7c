"""What a worker holds of the job streams: given back, and not counted as tried."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import redis.exceptions

from lmpool.commands import Server, Value
from lmpool.isolation import isolate
from lmpool.keys import GROUP, JobStream, ShardKeys
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.wire import Job, unpack_job

logger = logging.getLogger(__name__)


def release(
    servers: Servers,
    shards: Sequence[ShardKeys],
    consumer: str,
    known: Mapping[tuple[str, bytes], Job],
    keep: Collection[tuple[str, bytes]],
    stays: set[tuple[str, bytes]],
) -> int:
    """Give back at once what this consumer holds, except the entries to `keep`.

    `known` are its jobs, by stream and entry as `keep`. What was delivered to others before would
    be as good as new: it stays, for others to try alone, and this delivery does not count. It is
    noted in `stays`, and left as it is from then on. Returns how many were given back.
    """
    released = 0
    for shard in shards:
        give_back = partial(_release_in, shard, consumer, known, keep, stays)
        released += servers.apart([shard], give_back) or 0
    return released


def _release_in(
    shard: ShardKeys,
    consumer: str,
    known: Mapping[tuple[str, bytes], Job],
    keep: Collection[tuple[str, bytes]],
    stays: set[tuple[str, bytes]],
    server: Server,
) -> int:
    released = 0
    for stream in streams_held(server, shard.streams, consumer):
        start = "-"
        while True:
            held = server.xpending_range(stream.key, GROUP, start, "+", 500, consumername=consumer)
            jobs: list[tuple[str, bytes]] = []
            for item in held:
                entry = item["message_id"]
                place = stream.key, entry
                if place in keep or place in stays:
                    continue
                if item["times_delivered"] > 1:
                    before = item["times_delivered"] - 1
                    server.xclaim(
                        stream.key, GROUP, consumer, 0, [entry], retrycount=before, justid=True
                    )
                    stays.add(place)
                    continue
                job = known.get(place)
                digest = _digest_of(server, stream, entry) if job is None else job.digest.hex()
                jobs.append((digest, entry))
            released += _give_back(server, stream, jobs)
            if len(held) < 500:
                break
            start = f"({held[-1]['message_id'].decode()}"
    return released


def _give_back(server: Server, stream: JobStream, jobs: Sequence[tuple[str, bytes]]) -> int:
    """Give back entries by their digests, or ''; one that cannot be stays. How many were."""
    released = 0

    def give_back(some: Sequence[tuple[str, bytes]]) -> None:
        nonlocal released
        shard = stream.shard
        arguments: list[Value] = [shard.prefix, GROUP, shard.lanes, len(some)]
        arguments += [value for job in some for value in job]
        released += script("release")(server, [stream.key], arguments)

    def refused(job: tuple[str, bytes], error: redis.exceptions.RedisError) -> None:
        logger.error("%s of %s cannot be given back: %s", job[1].decode(), stream.key, error)

    if jobs:
        isolate(jobs, give_back, refused)
    return released


def streams_held(server: Server, wanted: Sequence[JobStream], consumer: str) -> list[JobStream]:
    """Those of these streams of one shard of which this consumer holds entries."""
    with server.pipeline(transaction=False) as pipeline:
        for stream in wanted:
            pipeline.xpending_range(stream.key, GROUP, "-", "+", 1, consumername=consumer)
        answers = pipeline.execute(raise_on_error=False)  # it would word the errors anew
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return [stream for stream, held in zip(wanted, answers, strict=True) if held]


def _digest_of(server: Server, stream: JobStream, entry: bytes) -> str:
    found = server.xrange(stream.key, entry, entry)
    try:
        return unpack_job(found[0][1].get(b"job", b"")).digest.hex() if found else ""
    except Exception:  # a JobFormatError, or of whatever somebody put there
        return ""
