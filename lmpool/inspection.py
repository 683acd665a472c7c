"""Looking at a server and a pool: do they answer, how fast, who serves, what is wrong.

::

    from lmpool import inspection

    print(inspection.ping("redis://localhost:6379/0", "llama").latency)
    for finding in inspection.diagnose("redis://localhost:6379/0", "llama"):
        print(finding.level, finding.what, finding.remedy)

Every function takes a server's URL and a pool's name; what is not given comes from ``LMPOOL_URL``
and ``LMPOOL_POOL``. They block, and leave no connection behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from lmpool.commands import Server
from lmpool.diagnosis import Facts, Finding, examine
from lmpool.errors import LmpoolError
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.liveness import signs_of_life
from lmpool.model_info import ModelInfo
from lmpool.producer import connect
from lmpool.producer.statistics import WorkerStatistics
from lmpool.server import get_string, greet, understood
from lmpool.servers import Servers
from lmpool.settings import ClientOptions, mask_url

REPUBLISHED_IN: Final = 2.0
"""Seconds within which living workers publish a model info that was lost."""
PINGS: Final = 25

__all__ = ["Facts", "Finding", "Ping", "diagnose", "measure_latency", "ping", "read_facts"]


@dataclass(frozen=True, slots=True)
class Ping:
    """Who answered, and how fast."""

    url: str
    """The server's, without its password."""
    server: str
    """Its name and version."""
    latencies: Sequence[float]
    """Seconds that each PING took, in order of size."""
    pool: str
    model: ModelInfo
    workers: Sequence[WorkerStatistics]
    """Those that are alive."""

    @property
    def latency(self) -> float:
        """The median of `latencies`, in seconds."""
        return statistics.median(self.latencies)


def ping(url: str | None = None, pool: str | None = None) -> Ping:
    """Ask whether server and pool answer.

    Raises `ServerError` where the server does not, `UnknownPool` where nothing is served by that
    name. A pool without workers answers: `Ping.workers` is empty.
    """
    with connect(url, pool, workers_timeout=REPUBLISHED_IN) as lm:
        with _connections(lm.url) as servers:
            server = servers.anywhere
            version = greet(server, lm.url)
            with understood(lm.url):
                latencies = measure_latency(server)
        workers = lm.pool_statistics_sync()["workers"]
        return Ping(mask_url(lm.url), version, latencies, lm.pool, lm.info, workers)


def measure_latency(server: Server, pings: int = PINGS) -> list[float]:
    """Seconds that each of some PINGs took, in order of size."""
    took = []
    for _ in range(pings):
        started = time.perf_counter()
        server.ping()
        took.append(time.perf_counter() - started)
    return sorted(took)


def diagnose(url: str | None = None, pool: str | None = None) -> list[Finding]:
    """What is well, to note and wrong with a server and a pool, each with its remedy.

    A server that does not answer is a finding, too.
    """
    options = ClientOptions(url=url, pool=pool)
    try:
        facts = read_facts(options.url, options.pool)
    except LmpoolError as error:
        return [Finding("wrong", str(error))]
    return examine(facts)


def read_facts(url: str | None = None, pool: str | None = None) -> Facts:
    """Ask the server. What this user may not read is left out.

    Raises `ServerError` where the server does not answer.
    """
    options = ClientOptions(url=url, pool=pool)
    with _connections(options.url) as servers, understood(options.url):
        servers.anywhere.ping()
        return _with_pool(servers, _server_facts(servers.anywhere, options.url), options.pool)


@contextmanager
def _connections(url: str) -> Iterator[Servers]:
    servers = Servers.of_url(url, name="lmpool-inspection")
    try:
        yield servers
    finally:
        servers.close()


def _server_facts(server: Server, url: str) -> Facts:
    info: dict[str, Any] = {}
    for section in ("server", "memory", "persistence", "replication", "clients"):
        try:
            info.update(server.info(section))
        except NoPermissionError:
            break
    try:
        config: dict[str, str] | None = server.config_get("*")
    except ResponseError:  # forbidden, or renamed by who runs it
        config = None
    refused = []
    try:
        server.evalsha("0" * 40, 0)
    except NoScriptError:
        pass  # which says that it may
    except ResponseError as error:
        refused.append(str(error))
    offset = 0.0
    try:
        before = time.time()
        seconds, microseconds = server.time()
        offset = seconds + microseconds / 1e6 - (before + time.time()) / 2
    except ResponseError as error:
        refused.append(str(error))
    return Facts(url, info, config, measure_latency(server), offset, refused)


def _with_pool(servers: Servers, facts: Facts, pool: str) -> Facts:
    """The server's facts and those of a pool, all its shards together."""
    facts = replace(facts, pool=pool)
    keys = PoolKeys(pool)
    packed = get_string(servers.for_key(keys.info), keys.info)
    if packed is None:
        return facts
    try:
        model = ModelInfo.unpack(packed)
    except LmpoolError as error:
        return replace(facts, model_error=f"pool {pool!r}: {error}")
    workers: dict[str, bool] = {}
    pending: dict[str, int] = {}
    backlog = dead = 0
    for shard in model.shard_keys(keys):
        server = servers.for_shard(shard)
        jobs, given_up = _lengths(server, shard)
        backlog += jobs
        dead += given_up
        held = _held(server, shard)
        beats = signs_of_life(server, [shard.alive(name) for name in held])
        for (name, count), alive in zip(held.items(), beats, strict=True):
            pending[name] = pending.get(name, 0) + count
            workers[name] = workers.get(name, False) or alive
    return replace(facts, model=model, workers=workers, pending=pending, backlog=backlog, dead=dead)


def _lengths(server: Server, shard: ShardKeys) -> tuple[int, int]:
    """How many jobs a shard has in its streams, and how many were given up."""
    with server.pipeline(transaction=False) as pipeline:
        for name in (shard.dead, *(stream.key for stream in shard.streams)):
            pipeline.xlen(name)
        found = pipeline.execute(raise_on_error=False)
    dead, *jobs = (length if isinstance(length, int) else 0 for length in found)
    return sum(jobs), dead


def _held(server: Server, shard: ShardKeys) -> dict[str, int]:
    """How many jobs of a shard each of its workers holds, whether it is alive or not."""
    held: dict[str, int] = {}
    for stream in shard.streams:
        try:
            found = server.xinfo_consumers(stream.key, GROUP)
        except ResponseError:
            continue  # no stream or no group yet
        for consumer in found:
            name = consumer["name"].decode("utf-8", "replace")
            held[name] = held.get(name, 0) + int(consumer["pending"])
    return held
