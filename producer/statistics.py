"""What a pool's workers have done, and who they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgpack

from lmpool.commands import Server
from lmpool.counters import BATCHES, COMPUTED, COUNTERS, EXPIRED, FAILED, Counter
from lmpool.keys import LaneKeys


class WorkerStatistics(TypedDict):
    """One living worker."""

    id: str
    host: str
    pid: int
    engine: str
    gpu: str
    rows_per_second: float


class PoolStatistics(TypedDict):
    """`computed`, `batches`, `failed`, `expired` since the pool began (see `lmpool.counters`);
    `backlog` now."""

    computed: int
    batches: int
    failed: int
    expired: int
    backlog: int
    workers: list[WorkerStatistics]


def pool_statistics(server: Server, lanes: Sequence[LaneKeys], group: str) -> PoolStatistics:
    """Read them: one request for each lane, and one for the workers."""
    counted = dict.fromkeys(COUNTERS, 0)
    backlog = 0
    names: list[str] = []
    for number, lane in enumerate(lanes):
        with server.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(lane.counters)
            pipeline.xlen(lane.jobs)
            pipeline.xlen(lane.batch.jobs)
            if number == 0:
                pipeline.xinfo_consumers(lane.jobs, group)
            answers = pipeline.execute(raise_on_error=False)
        for answer in answers[:3]:
            if isinstance(answer, Exception):
                raise answer
        _add(counted, answers[0])
        backlog += int(answers[1]) + int(answers[2])
        # No stream or group yet is no error: nobody has served.
        if number == 0 and not isinstance(answers[3], Exception):
            names = [consumer["name"].decode() for consumer in answers[3]]
    beats = server.mget([lanes[0].alive(name) for name in names]) if names else []
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
    )
