"""The protocol by hand: jobs, callers and workers that are nothing but calls of the scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import redis

from lmpool.keys import GROUP, PoolKeys, Priority, ShardKeys
from lmpool.liveness import LIFE_MS
from lmpool.scripts import script
from lmpool.wants import Digester, Row
from lmpool.wire import Job, Notice, claim_head, pack_job, read_notices

FINGERPRINT = "0123456789abcdef" * 2
COUNTERS_TTL = 60_000


def shard_of_pool(
    pool: str, fingerprint: str = FINGERPRINT, shard: int = 0, lanes: int = 1
) -> ShardKeys:
    """A shard's keys."""
    return PoolKeys(pool).shard(fingerprint[:8], shard, lanes)


def new_job(
    *tokens: int,
    fingerprint: str = FINGERPRINT,
    encoding: Any = "f32",
    adapter: str | None = None,
    deadline: int | None = None,
) -> Job:
    """A job for the row of a prompt."""
    packed = np.array(tokens, dtype="<u4").tobytes()
    digest = Digester(fingerprint).digest(Row(encoding), packed, adapter)
    return Job(Row(encoding), digest, packed, adapter, deadline, 0)


def be_steady(server: redis.Redis, *shards: ShardKeys, for_ms: int = LIFE_MS) -> None:
    """As if workers had given signs of life without a gap for so long."""
    seconds, micros = server.time()  # type: ignore[misc]
    for shard in shards:
        server.set(shard.steady, seconds * 1000 + micros // 1000 - for_ms)


def write_flight(
    server: redis.Redis,
    shard: ShardKeys,
    job: Job,
    entry: str,
    *clients: str,
    lane: str = "0",
    deadline: str = "",
    life_ms: int = 60_000,
) -> None:
    """A flight as the scripts write it: of a job that stands in a lane as that entry."""
    text = " ".join((entry, lane, deadline, *clients, ""))
    server.set(shard.flight(job.digest), text, px=life_ms)


def read_flight(server: redis.Redis, shard: ShardKeys, job: Job) -> dict[bytes, bytes]:
    """The parts of a job's flight, those who wait as ``c:name``; nothing where there is none."""
    found: Any = server.get(shard.flight(job.digest))
    if found is None:
        return {}
    entry, name, deadline, *clients = found.split(b" ")
    assert clients.pop() == b"", found
    lane = int(name.removeprefix(b"b"))
    stream = shard.stream("batch" if name.startswith(b"b") else "interactive", lane)
    fields = {b"job": entry, b"stream": stream.key.encode(), b"deadline": deadline}
    return fields | {b"c:" + client: b"" for client in clients}


class Caller:
    """A client of one shard."""

    def __init__(self, server: redis.Redis, shard: ShardKeys, id: str = "client") -> None:
        self.server = server
        self.shard = shard
        self.id = id
        self._last = "0-0"

    def enqueue(
        self,
        *jobs: Job,
        bound: int = 1000,
        reply_ttl: int = 30_000,
        flight_ttl: int = 60_000,
        priority: Priority = "interactive",
        lane: int = 0,
    ) -> tuple[str, bool]:
        """One answer for each job, and whether the reply stream was made anew."""
        first = self.shard.stream(priority).key
        arguments: list[Any] = [self.shard.prefix, self.id, reply_ttl, flight_ttl, bound, GROUP]
        arguments += (int(priority == "interactive"), self.shard.lanes)
        adapters = list(dict.fromkeys(job.adapter for job in jobs if job.adapter))
        places = [adapters.index(job.adapter) + 1 if job.adapter else 0 for job in jobs]
        heads = [
            claim_head(job.digest, lane, n, job.deadline)
            for job, n in zip(jobs, places, strict=True)
        ]
        arguments += ("".join(heads), len(adapters), *adapters, *map(pack_job, jobs))
        answers, fresh = script("enqueue")(self.server, [first], arguments)  # type: ignore[arg-type]
        return answers.decode(), bool(fresh)

    def check(
        self, *jobs: Job, reply_ttl: int = 30_000, flight_ttl: int = 60_000
    ) -> tuple[str, bool]:
        """What became of each job, and whether the reply stream was made anew."""
        digests = [job.digest.hex() for job in jobs]
        answers, fresh, _ = script("check")(
            self.server,  # type: ignore[arg-type]
            [self.shard.stream().key],
            [self.shard.prefix, self.id, reply_ttl, flight_ttl, *digests],
        )
        return answers.decode(), bool(fresh)

    def withdraw(self, *jobs: Job) -> int:
        """How many jobs are not run, as nobody else waits for them."""
        digests = [job.digest.hex() for job in jobs]
        dropped: int = script("withdraw")(
            self.server,  # type: ignore[arg-type]
            [self.shard.stream().key],
            [self.shard.prefix, self.id, *digests],
        )
        return dropped

    def notices(self) -> list[Notice]:
        """What this client was told since it last looked."""
        entries: Any = self.server.xrange(self.shard.reply(self.id), f"({self._last}", "+")
        found: list[Notice] = []
        for entry, fields in entries:
            self._last = entry.decode()
            found += read_notices(fields)
        return found

    def vanish(self) -> None:
        """As if its lease had ended."""
        self.server.delete(self.shard.reply(self.id))

    def flight(self, job: Job) -> dict[bytes, bytes]:
        """The flight's parts, those who wait as ``c:name``; nothing where there is none."""
        return read_flight(self.server, self.shard, job)


class Consumer:
    """A worker of one shard."""

    def __init__(
        self,
        server: redis.Redis,
        shard: ShardKeys,
        id: str = "worker",
        priority: Priority = "interactive",
        lane: int = 0,
    ) -> None:
        self.server = server
        self.shard = shard
        self.stream = shard.stream(priority, lane).key
        self.id = id
        self.holds = 0
        """Bytes of the account, as of the last jobs told of."""
        try:
            server.xgroup_create(self.stream, GROUP, id="0", mkstream=True)
        except redis.exceptions.ResponseError:
            pass  # there already
        server.xgroup_createconsumer(self.stream, GROUP, id)

    def read(self, count: int = 100) -> list[bytes]:
        """Claim entries; their ids."""
        answer: Any = self.server.xreadgroup(GROUP, self.id, {self.stream: ">"}, count=count)
        return [entry for _, entries in answer or () for entry, _ in entries]

    def held(self) -> list[bytes]:
        """The ids of the entries it has not acknowledged."""
        found: Any = self.server.xpending_range(
            self.stream, GROUP, "-", "+", 1000, consumername=self.id
        )
        return [item["message_id"] for item in found]

    def complete(
        self,
        done: Sequence[tuple[Job, bytes, str, str]],
        counters: Sequence[tuple[str, int]] = (),
        stored: Sequence[Job] = (),
        bytes_each: int = 100,
        life_ms: int = 60_000,
    ) -> int:
        """Tell of jobs as (job, entry, status, error text), and enter what was stored."""
        written = {job.digest for job in stored}
        mine = [each for each in done if each[0].digest in written]
        others = [each for each in done if each[0].digest not in written]
        digests = [job.digest for job, *_ in mine]
        digests += written.difference(digests)  # what is stored may be of jobs that are not done
        arguments: list[Any] = [self.shard.prefix, GROUP, COUNTERS_TTL]
        arguments += (bytes_each * len(stored), life_ms, "".join(d.hex() for d in digests))
        arguments.append(len(counters))
        for counter in counters:
            arguments += counter
        arguments += (len(mine), *(entry for _, entry, _, _ in mine), len(others))
        for job, entry, status, error in others:
            arguments += (job.digest.hex(), entry, status, error)
        keys = [self.shard.account, self.stream]
        acknowledged, held = script("complete")(self.server, keys, arguments)  # type: ignore[arg-type]
        self.holds = int(held)
        return int(acknowledged)

    def admit(self, *pairs: tuple[Job, bytes]) -> str:
        """Whether each job is still to be run."""
        arguments: list[Any] = [self.shard.prefix, GROUP, COUNTERS_TTL, len(pairs)]
        for job, entry in pairs:
            arguments += (job.digest.hex(), entry)
        answer: bytes = script("admit")(self.server, [self.stream], arguments)  # type: ignore[arg-type]
        return answer.decode()

    def release(self, *pairs: tuple[Job | None, bytes]) -> int:
        """Give entries back."""
        arguments: list[Any] = [self.shard.prefix, GROUP, self.shard.lanes, len(pairs)]
        for job, entry in pairs:
            arguments += ("" if job is None else job.digest.hex(), entry)
        released: int = script("release")(self.server, [self.stream], arguments)  # type: ignore[arg-type]
        return released

    def leave(self) -> int:
        """End the heartbeat, and the consumer if it holds nothing."""
        gone: int = script("leave")(
            self.server,  # type: ignore[arg-type]
            [self.shard.alive(self.id), self.shard.workers, self.stream],
            [GROUP, self.id],
        )
        return gone

    def is_there(self) -> bool:
        """Whether the group knows it."""
        found: Any = self.server.xinfo_consumers(self.stream, GROUP)
        return self.id.encode() in {consumer["name"] for consumer in found}


def entries_of(server: redis.Redis, stream: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """A stream's entries."""
    found: Any = server.xrange(stream)
    return list(found)


def put_result(server: redis.Redis, shard: ShardKeys, job: Job) -> None:
    """A result of a job, as a worker writes it."""
    server.set(shard.result(job.digest), b"row")


def told(caller: Caller) -> list[tuple[str, str, str]]:
    """What a caller was told since it last looked: digest, status, error text."""
    return [(n.digest.hex(), n.status, n.error) for n in caller.notices()]


def queued(server: redis.Redis, shard: ShardKeys) -> list[bytes]:
    """The jobs in the stream, in order."""
    return [fields[b"job"] for _, fields in entries_of(server, shard.stream().key)]
