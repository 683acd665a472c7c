"""What a pool's workers have done, and who they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgpack

from lmpool.commands import Server
from lmpool.counters import (
    ANSWERS_METRIC,
    BATCHES,
    COMPUTED,
    COUNTERS,
    EVICTED,
    EXPIRED,
    FAILED,
    Counter,
    answers,
)
from lmpool.keys import ShardKeys
from lmpool.liveness import living
from lmpool.servers import Servers
from lmpool.wants import KINDS


class JobFailure(TypedDict):
    """Why `jobs` in succession ended in an error, the last of them `at` seconds since 1970, by the
    server's clock."""

    at: float
    reason: str
    jobs: int


class WorkerStatistics(TypedDict):
    """One living worker. `execution` is how its engine computes prompts, where it says so;
    `failures` are its latest, the last one last."""

    id: str
    host: str
    pid: int
    engine: str
    gpu: str
    rows_per_second: float
    execution: str | None
    failures: list[JobFailure]


class PoolStatistics(TypedDict):
    """`computed`, `batches`, `failed`, `expired`, `evicted` since the pool began (see
    `lmpool.counters`), and the `answers` among `computed` by the kind of want;
    `backlog` now, and what it holds: `held_bytes` of the server's memory for results, the oldest of
    which was stored `oldest_seconds` ago (None without one)."""

    computed: int
    batches: int
    failed: int
    expired: int
    evicted: int
    answers: dict[str, int]
    backlog: int
    held_bytes: int
    oldest_seconds: float | None
    workers: list[WorkerStatistics]


def pool_statistics(servers: Servers, shards: Sequence[ShardKeys]) -> PoolStatistics:
    """Read them: one request for each shard, and one for the workers."""
    counted = dict.fromkeys(COUNTERS, 0)
    kinds = {kind: Counter(answers(kind), ANSWERS_METRIC, "") for kind in KINDS if kind != "row"}
    counted |= dict.fromkeys(kinds.values(), 0)
    backlog = held = 0
    ages: list[float] = []
    for shard in shards:
        server = servers.for_shard(shard)
        with server.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(shard.counters)
            for stream in shard.streams:
                pipeline.xlen(stream.key)
            counters, *lengths = pipeline.execute(raise_on_error=False)
        # A key that was damaged counts as empty: workers make it anew.
        if isinstance(counters, dict):
            _add(counted, counters)
        backlog += sum(length for length in lengths if isinstance(length, int))
        of_shard, oldest = _held(server, shard)
        held += of_shard
        ages += oldest
    server = servers.for_shard(shards[0])
    names = living(server, shards[0])
    beats = server.mget([shards[0].alive(name) for name in names]) if names else []
    workers = [worker for beat in beats if (worker := _worker(beat)) is not None]
    workers.sort(key=lambda worker: worker["id"])
    return PoolStatistics(
        computed=counted[COMPUTED],
        batches=counted[BATCHES],
        failed=counted[FAILED],
        expired=counted[EXPIRED],
        evicted=counted[EVICTED],
        answers=_by_kind(counted[COMPUTED], {k: counted[c] for k, c in kinds.items()}),
        backlog=backlog,
        held_bytes=held,
        oldest_seconds=max(ages, default=None),
        workers=workers,
    )


def _held(server: Server, shard: ShardKeys) -> tuple[int, list[float]]:
    """The bytes of a shard's results, and how many seconds ago the oldest was stored."""
    with server.pipeline(transaction=False) as pipeline:
        pipeline.xinfo_stream(shard.account)
        pipeline.execute_command("TIME")
        account, (seconds, microseconds) = pipeline.execute(raise_on_error=False)
    if not isinstance(account, dict) or not account["first-entry"]:
        return 0, []  # no account yet, or this user may not see it
    held = account["last-entry"][1].get(b"held", b"")
    if not held.isdigit():
        return 0, []  # damaged: workers make it anew
    stored_ms = int(account["first-entry"][0].partition(b"-")[0])
    return int(held), [max(0.0, seconds + microseconds / 1e6 - stored_ms / 1000)]


def _add(counted: dict[Counter, int], found: Mapping[bytes, bytes]) -> None:
    """Add one hash of counters. What a worker of another release counts besides is left out."""
    for counter in counted:
        number = found.get(counter.field.encode(), b"0")
        # Longer ones are damage: nothing here counts that far.
        counted[counter] += int(number) if number.isdigit() and len(number) < 19 else 0


def _by_kind(computed: int, others: Mapping[str, int]) -> dict[str, int]:
    """Answers by kind, those that there are. Only what are no rows is counted by itself."""
    rows = max(0, computed - sum(others.values()))
    return {kind: number for kind, number in {"row": rows, **others}.items() if number}


def _worker(packed: bytes | None) -> WorkerStatistics | None:
    """What a heartbeat says; None for one that has ended, or says nothing."""
    try:
        beat: Any = None if packed is None else msgpack.unpackb(packed)
        return None if beat is None else _described(beat)
    except (
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        OverflowError,
        msgpack.UnpackException,
    ):
        return None


def _described(beat: dict[str, Any]) -> WorkerStatistics:
    return WorkerStatistics(
        id=str(beat.get("id", "")),
        host=str(beat.get("host", "")),
        pid=int(beat.get("pid", 0)),
        engine=str(beat.get("engine", "")),
        gpu=str(beat.get("gpu", "")),
        rows_per_second=float(beat.get("rows_per_second", 0.0)),
        execution=None if beat.get("execution") is None else str(beat["execution"]),
        failures=[
            JobFailure(at=float(each["at"]), reason=str(each["reason"]), jobs=int(each["jobs"]))
            for each in beat.get("failures", ())
        ],
    )
