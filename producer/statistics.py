"""What a pool's workers have done, and who they are."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypedDict

import msgpack
import redis.exceptions

from lmpool.affinity import homes
from lmpool.commands import Fields, Server
from lmpool.counters import (
    ANSWERS_METRIC,
    BATCHES,
    COMPUTED,
    COUNTERS,
    EVICTED,
    EXPIRED,
    FAILED,
    OWN,
    STOLEN,
    TOKENS_ASKED,
    TOKENS_COMPUTED,
    Counter,
    answers,
)
from lmpool.keys import Priority, ShardKeys
from lmpool.liveness import living
from lmpool.queues import ShardQueues, StreamQueue, answers_of, read_queues
from lmpool.servers import Servers
from lmpool.wants import KINDS

PATIENCE: Final = 4.0
"""Seconds of waiting for nodes that do not answer, after which shards are not asked any more."""
LONGEST: Final = 5
"""Lanes that are told by themselves."""


class JobFailure(TypedDict):
    """Why `jobs` in succession ended in an error, the last of them `at` seconds since 1970, by the
    server's clock."""

    at: float
    reason: str
    jobs: int


class WorkerStatistics(TypedDict):
    """One living worker. `execution` is how its engine computes prompts, where it says so;
    `control` the server that its control jobs come from, without user and password, '' for the
    pool's own, None where it does not say; `failures` are its latest, the last one last.

    It is the home of so many `lanes` in use. Since it began it took `own_jobs` of its own lanes and
    `stolen_jobs` of others' (`stolen_per_second` over the last ten seconds), and was given
    `prompt_tokens`; the `computed_tokens` are those of prompts that were not kept, drawn ones, and
    padding, as far as its engine tells."""

    id: str
    host: str
    pid: int
    engine: str
    gpu: str
    rows_per_second: float
    lanes: int
    own_jobs: int
    stolen_jobs: int
    stolen_per_second: float
    prompt_tokens: int
    computed_tokens: int
    execution: str | None
    control: str | None
    failures: list[JobFailure]


class LaneStatistics(TypedDict):
    """The jobs of one priority in a lane: so many at least are `waiting` for a worker to take
    them, and the oldest, waiting or running, came `oldest_seconds` ago, 0 where that is unknown
    (see `lmpool.queues.StreamQueue`). `home` is the id of the worker that reads
    the lane first, '' where all do."""

    shard: int
    lane: int
    priority: Priority
    waiting: int
    oldest_seconds: float
    home: str


class LanesStatistics(TypedDict):
    """The `lanes` of all shards, how many of them are `in_use`, and the jobs in them that no worker
    has taken: in all, in how many lanes, in the longest one (`longest_jobs`, of both priorities),
    and in the `longest`, the longest lane first."""

    lanes: int
    in_use: int
    waiting_jobs: int
    waiting_lanes: int
    longest_jobs: int
    longest: list[LaneStatistics]


class PoolStatistics(TypedDict):
    """`computed`, `batches`, `failed`, `expired`, `evicted` since the pool began (see
    `lmpool.counters`), and the `answers` among `computed` by the kind of want; as of the workers'
    last heartbeats, `own_jobs` that they took of their own lanes and `stolen_jobs` of others', and
    the `prompt_tokens` of engines that tell what they computed, with that: `computed_tokens`, drawn
    ones and padding among them. What was kept is at least what they are fewer.

    `backlog` and `lanes` now, and what it holds: `held_bytes` of the server's memory for results,
    the oldest of which was stored `oldest_seconds` ago (None without one). `shards_away` are the
    numbers of those that did not answer, on a Redis Cluster: the figures are of the others."""

    computed: int
    batches: int
    failed: int
    expired: int
    evicted: int
    own_jobs: int
    stolen_jobs: int
    prompt_tokens: int
    computed_tokens: int
    answers: dict[str, int]
    backlog: int
    lanes: LanesStatistics
    held_bytes: int
    oldest_seconds: float | None
    workers: list[WorkerStatistics]
    shards_away: list[int]


class _OfShard(NamedTuple):
    """What one shard tells: its counters, jobs, bytes of results and the age of the oldest."""

    counters: Fields
    queues: ShardQueues
    held: int
    ages: list[float]


def pool_statistics(
    servers: Servers,
    shards: Sequence[ShardKeys],
    remembered: MutableMapping[str, Fields] | None = None,
    seen: MutableMapping[int, ShardQueues] | None = None,
) -> PoolStatistics:
    """Read them: a few requests for each shard, and one for the workers. `seen` is given what each
    shard that answers has in its streams, by its number.

    Counters of a shard that is away are those of `remembered`, which is kept up: what only grows
    must not shrink for whoever looks again and again. Raises redis-py's exceptions, where shards
    fail apart only if all are away.
    """
    counted = dict.fromkeys(COUNTERS, 0)
    kinds = {kind: Counter(answers(kind), ANSWERS_METRIC, "") for kind in KINDS if kind != "row"}
    counted |= dict.fromkeys(kinds.values(), 0)
    held = 0
    ages: list[float] = []
    queues: list[ShardQueues] = []
    there: list[ShardKeys] = []
    lost: list[Exception] = []
    remembered = {} if remembered is None else remembered
    began = time.monotonic()
    for shard in shards:
        found = None
        if not servers.fails_apart or time.monotonic() - began < PATIENCE:
            read = partial(_read, shard)
            found = servers.apart([shard], read, lambda _, error: lost.append(error))
        if found is None:
            _add(counted, remembered.get(shard.prefix, {}))
            continue
        there.append(shard)
        remembered[shard.prefix] = found.counters
        _add(counted, found.counters)
        queues.append(found.queues)
        if seen is not None:
            seen[shard.number] = found.queues
        held += found.held
        ages += found.ages
    if not there:
        raise lost[-1] if lost else redis.exceptions.ConnectionError("no shard answers")
    workers = workers_in(servers, there)
    return PoolStatistics(
        computed=counted[COMPUTED],
        batches=counted[BATCHES],
        failed=counted[FAILED],
        expired=counted[EXPIRED],
        evicted=counted[EVICTED],
        own_jobs=counted[OWN],
        stolen_jobs=counted[STOLEN],
        prompt_tokens=counted[TOKENS_ASKED],
        computed_tokens=counted[TOKENS_COMPUTED],
        answers=_by_kind(counted[COMPUTED], {k: counted[c] for k, c in kinds.items()}),
        backlog=sum(queue.jobs for shard in queues for queue in shard.streams),
        lanes=_lanes(shards, queues, [worker["id"] for worker in workers]),
        held_bytes=held,
        oldest_seconds=max(ages, default=None),
        workers=workers,
        shards_away=[shard.number for shard in shards if shard not in there],
    )


def _read(shard: ShardKeys, server: Server) -> _OfShard:
    with server.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(shard.counters)
        (counters,) = answers_of(pipeline)
    held, ages = _held(server, shard)
    return _OfShard(
        # A key that was damaged counts as empty: workers make it anew.
        counters if isinstance(counters, dict) else {},
        read_queues(server, shard),
        held,
        ages,
    )


def _lanes(
    shards: Sequence[ShardKeys], queues: Sequence[ShardQueues], workers: Sequence[str]
) -> LanesStatistics:
    """Of those shards that answered the queues, and where they belong."""
    waiting = [(queue, of) for of in queues for queue in of.streams if queue.waiting]
    in_lane = Counts[tuple[ShardKeys, int]]()
    for queue, _ in waiting:
        in_lane[queue.lane] += queue.waiting
    waiting.sort(key=lambda each: (-in_lane[each[0].lane], -each[0].waiting, -each[0].age))
    return LanesStatistics(
        lanes=sum(shard.lanes for shard in shards),
        in_use=sum(of.lanes_in_use for of in queues),
        waiting_jobs=sum(queue.waiting for queue, _ in waiting),
        waiting_lanes=len(in_lane),
        longest_jobs=max(in_lane.values(), default=0),
        longest=[_lane(queue, of.lanes_in_use, workers) for queue, of in waiting[:LONGEST]],
    )


def _lane(queue: StreamQueue, in_use: int, workers: Sequence[str]) -> LaneStatistics:
    stream, shard = queue.stream, queue.stream.shard
    home = ""
    if workers and shard.lanes > 1 and stream.lane < in_use:
        home = workers[int(homes(workers, shard.number, shard.lanes)[stream.lane])]
    return LaneStatistics(
        shard=shard.number,
        lane=stream.lane,
        priority=stream.priority,
        waiting=queue.waiting,
        oldest_seconds=queue.age,
        home=home,
    )


def workers_in(servers: Servers, shards: Sequence[ShardKeys]) -> list[WorkerStatistics]:
    """The living workers of a pool that lies in these shards: each has a heartbeat in every one,
    but for one that was away until a moment ago."""
    found: dict[str, WorkerStatistics] = {}
    for shard in shards:
        for beat in servers.apart([shard], partial(_beats, shard)) or ():
            worker = _worker(beat)
            if worker is not None:
                found[worker["id"]] = worker
    return [found[name] for name in sorted(found)]


def _beats(shard: ShardKeys, server: Server) -> list[bytes | None]:
    names = living(server, shard)
    return server.mget([shard.alive(name) for name in names]) if names else []


def _held(server: Server, shard: ShardKeys) -> tuple[int, list[float]]:
    """The bytes of a shard's results, and how many seconds ago the oldest was stored."""
    with server.pipeline(transaction=False) as pipeline:
        pipeline.xinfo_stream(shard.account)
        pipeline.execute_command("TIME")
        account, now = answers_of(pipeline)
    if not isinstance(account, dict) or not account["first-entry"]:
        return 0, []  # no account yet, or this user may not see it
    held = account["last-entry"][1].get(b"held", b"")
    if not held.isdigit():
        return 0, []  # damaged: workers make it anew
    stored_ms = int(account["first-entry"][0].partition(b"-")[0])
    seconds, microseconds = now
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
        lanes=int(beat.get("lanes", 0)),
        own_jobs=int(beat.get("own_jobs", 0)),
        stolen_jobs=int(beat.get("stolen_jobs", 0)),
        stolen_per_second=float(beat.get("stolen_per_second", 0.0)),
        prompt_tokens=int(beat.get("prompt_tokens", 0)),
        computed_tokens=int(beat.get("computed_tokens", 0)),
        execution=None if beat.get("execution") is None else str(beat["execution"]),
        control=None if beat.get("control") is None else str(beat["control"]),
        failures=[
            JobFailure(at=float(each["at"]), reason=str(each["reason"]), jobs=int(each["jobs"]))
            for each in beat.get("failures", ())
        ],
    )
