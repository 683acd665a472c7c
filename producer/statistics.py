"""What a pool's workers have done, and who they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgpack

from lmpool.counters import BATCHES, COMPUTED, COUNTERS, EXPIRED, FAILED, Counter
from lmpool.keys import ShardKeys
from lmpool.liveness import consumers
from lmpool.servers import Servers


class WorkerStatistics(TypedDict):
    """One living worker. `execution` is how its engine computes prompts, where it says so."""

    id: str
    host: str
    pid: int
    engine: str
    gpu: str
    rows_per_second: float
    execution: str | None


class PoolStatistics(TypedDict):
    """`computed`, `batches`, `failed`, `expired` since the pool began (see `lmpool.counters`);
    `backlog` now."""

    computed: int
    batches: int
    failed: int
    expired: int
    backlog: int
    workers: list[WorkerStatistics]


def pool_statistics(servers: Servers, shards: Sequence[ShardKeys]) -> PoolStatistics:
    """Read them: one request for each shard, and one for the workers."""
    counted = dict.fromkeys(COUNTERS, 0)
    backlog = 0
    for shard in shards:
        with servers.for_shard(shard).pipeline(transaction=False) as pipeline:
            pipeline.hgetall(shard.counters)
            for stream in shard.streams:
                pipeline.xlen(stream.key)
            counters, *lengths = pipeline.execute()
        _add(counted, counters)
        backlog += sum(lengths)
    server = servers.for_shard(shards[0])
    names = consumers(server, shards[0])
    beats = server.mget([shards[0].alive(name) for name in names]) if names else []
    workers = [_worker(msgpack.unpackb(beat)) for beat in beats if beat is not None]
    workers.sort(key=lambda worker: worker["id"])
    return PoolStatistics(
        computed=counted[COMPUTED],
        batches=counted[BATCHES],
        failed=counted[FAILED],
        expired=counted[EXPIRED],
        backlog=backlog,
        workers=workers,
    )


def _add(counted: dict[Counter, int], found: Mapping[bytes, bytes]) -> None:
    """Add one hash of counters. What a worker of another release counts besides is left out."""
    for counter in counted:
        counted[counter] += int(found.get(counter.field.encode(), 0))


def _worker(beat: dict[str, Any]) -> WorkerStatistics:
    return WorkerStatistics(
        id=str(beat.get("id", "")),
        host=str(beat.get("host", "")),
        pid=int(beat.get("pid", 0)),
        engine=str(beat.get("engine", "")),
        gpu=str(beat.get("gpu", "")),
        rows_per_second=float(beat.get("rows_per_second", 0.0)),
        execution=None if beat.get("execution") is None else str(beat["execution"]),
    )
