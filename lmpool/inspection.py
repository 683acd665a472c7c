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

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import redis
import redis.exceptions
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from lmpool.address import Address, address_of, in_url, is_cluster
from lmpool.cluster import SlotMoved, node_address
from lmpool.cluster_diagnosis import ClusterFacts, ClusterNode, examine_cluster
from lmpool.cluster_servers import ClusterServers
from lmpool.commands import Server
from lmpool.diagnosis import Facts, Finding, LaneFacts, examine
from lmpool.errors import LmpoolError, ServerRefused
from lmpool.keys import GROUP, PoolKeys, ShardKeys
from lmpool.liveness import signs_of_life
from lmpool.model_info import ModelInfo
from lmpool.permissions import (
    CHANGES,
    client_commands,
    harmless_changes,
    in_words,
    not_permitted,
    watcher_commands,
    worker_commands,
)
from lmpool.producer import connect
from lmpool.producer.session import client_id
from lmpool.producer.statistics import WorkerStatistics, pool_statistics
from lmpool.server import get_string, greet, is_lost, refuse_node, understood
from lmpool.server_url import mask_url
from lmpool.servers import Servers
from lmpool.settings import ClientOptions
from lmpool.slots import SLOTS

REPUBLISHED_IN: Final = 2.0
"""Seconds within which living workers publish a model info that was lost."""
PINGS: Final = 25

__all__ = [
    "ClusterFacts", "ClusterNode", "Facts", "Finding", "Ping", "diagnose", "measure_latency",
    "ping", "read_cluster", "read_facts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ping:
    """Who answered, and how fast."""

    url: str
    """The server's, without its password."""
    server: str
    """Its name and version."""
    latencies: Sequence[float]
    """Seconds that each PING took, in order of size; of a cluster, to any of its primaries."""
    pool: str
    model: ModelInfo
    workers: Sequence[WorkerStatistics]
    """Those that are alive."""
    nodes: Mapping[str, float | None]
    """The primaries of a cluster, each with the median in seconds, None of one that does not
    answer; empty of one server."""

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
        with _connections(lm.url) as servers, understood(lm.url):
            nodes = _pinged(servers)
            version = greet(next(s for s, took in nodes if took), lm.url)
        workers = lm.pool_statistics_sync()["workers"]
        latencies = sorted(took for _, each in nodes for took in each)
        medians = {
            in_url(address_of(server)): statistics.median(took) if took else None
            for server, took in nodes
            if servers.fails_apart
        }
        url = mask_url(lm.url)
        return Ping(url, version, latencies, lm.pool, lm.info, workers, medians)


def _pinged(servers: Servers) -> list[tuple[Server, list[float]]]:
    """Every server, with how long its PINGs took: none of a node of a cluster that is away.

    Raises redis-py's exceptions where none answers.
    """
    found: list[tuple[Server, list[float]]] = []
    lost: list[Exception] = []
    for server in servers.everywhere():
        try:
            found.append((server, measure_latency(server)))
        except (RedisError, OSError) as error:
            if not is_lost(error):
                raise
            lost.append(error)
            found.append((server, []))
    if len(lost) == len(found):
        raise lost[0]
    return found


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
        if is_cluster(options.url):
            return examine_cluster(read_cluster(options.url, options.pool))
        return examine(read_facts(options.url, options.pool))
    except LmpoolError as error:
        return [Finding("wrong", str(error))]


def read_facts(url: str | None = None, pool: str | None = None) -> Facts:
    """Ask the server. What this user may not read is left out. `read_cluster` is of a cluster.

    Raises `ServerError` where the server does not answer.
    """
    options = ClientOptions(url=url, pool=pool)
    with _connections(options.url) as servers, understood(options.url):
        servers.anywhere.ping()
        facts = _server_facts(servers.anywhere, options.url, options)
        refuse_node(facts.info, options.url)
        return _with_pool(servers, facts, options.pool)[0]


def read_cluster(url: str | None = None, pool: str | None = None) -> ClusterFacts:
    """Ask every node of a Redis Cluster. What this user may not read is left out.

    Raises `ServerError` where no node answers.
    """
    options = ClientOptions(url=url, pool=pool)
    if not is_cluster(options.url):
        raise ServerRefused(f"{mask_url(options.url)} names no cluster: write redis+cluster://...")
    with _connections(options.url) as servers, understood(options.url):
        assert isinstance(servers, ClusterServers)
        nodes, owners = _layout(servers)
        found = [_examined(servers, options, node) for node in nodes]
        bare = Facts(options.url, {}, None, (0.0,), 0.0)
        facts, away = _with_pool(servers, bare, options.pool)
        return ClusterFacts(facts, found, owners, away)


def _layout(servers: ClusterServers) -> tuple[list[ClusterNode], list[str | None]]:
    """The nodes that the cluster names, replicas after their primary, and the primary of each slot.

    Raises redis-py's exceptions where no node says it.
    """
    failure: Exception | None = None
    for server in servers.everywhere():
        try:
            ranges = _asked(server, "CLUSTER", "SLOTS")
        except (RedisError, OSError) as error:
            if not is_lost(error):
                raise
            failure = error
            continue
        members = {member.id: member for member in _members(server)}
        options = server.connection_pool.connection_kwargs
        owners: list[str | None] = [None] * SLOTS
        nodes: dict[str, ClusterNode] = {}
        by_name = False
        for first, last, *some in ranges:
            named = [in_url(node_address(each, (options["host"], 0))) for each in some]
            owners[first : last + 1] = [named[0]] * (last + 1 - first)
            for address, each in zip(named, some, strict=True):
                member = members.get(_word(each[2]))
                primary = "" if address == named[0] else named[0]
                nodes[_word(each[2])] = ClusterNode(
                    address, primary, is_down=member is not None and member.is_down
                )
                by_name |= member is not None and _word(each[0]) == member.name != ""
        for member in members.values():  # replicas that are down, or have nothing yet
            if member.id not in nodes and member.primary in nodes:
                host = member.name if by_name else member.host
                address = in_url((host or options["host"], member.port))
                primary = nodes[member.primary].address
                nodes[member.id] = ClusterNode(address, primary, is_down=member.is_down)
        return list(nodes.values()), owners
    raise failure or redis.exceptions.ConnectionError("no node answers")


@dataclass(frozen=True, slots=True)
class _Member:
    """A line of ``CLUSTER NODES``: `primary` is whose replica it is, `name` its announced one."""

    id: str
    host: str
    port: int
    name: str
    flags: frozenset[str]
    primary: str
    moving: tuple[int, ...]

    @property
    def is_down(self) -> bool:
        return "fail" in self.flags


def _members(server: Server) -> list[_Member]:
    """Whom a node knows, itself first; nobody where this user may not ask."""
    try:
        said = _asked(server, "CLUSTER", "NODES")
    except ResponseError:
        return []
    found = []
    for line in _word(said).splitlines():
        id_, where, flags, primary, _, _, _, _, *slots = line.split()
        # ip:port@bus,name,more=...
        address, name, *_ = (*where.split(","), "")
        host, _, port = address.partition("@")[0].rpartition(":")
        moving = [int(slot[1:].partition("-")[0]) for slot in slots if slot.startswith("[")]
        flagged = frozenset(flags.split(","))
        found.append(_Member(id_, host, int(port), name, flagged, primary, tuple(moving)))
    return sorted(found, key=lambda member: "myself" not in member.flags)


def _word(said: bytes | None) -> str:
    return (said or b"").decode("utf-8", "replace")


def _examined(servers: ClusterServers, options: ClientOptions, node: ClusterNode) -> ClusterNode:
    """A node with what it says of itself, or why it does not."""
    host, _, port = node.address.rpartition(":")
    address: Address = (host.strip("[]"), int(port))
    try:
        server = servers.at(address)
        server.ping()
        facts = _server_facts(server, f"redis://{node.address}", options)
        members = _members(server)
        return replace(
            node,
            facts=facts,
            state=_state(server),
            moving=members[0].moving if members else (),
        )
    except AuthenticationError as error:
        return replace(node, error=str(error), refuses=True)
    except (RedisError, OSError) as error:
        if not is_lost(error):
            raise
        return replace(node, error=str(error) or type(error).__name__)


def _state(server: Server) -> str:
    try:
        said = _word(_asked(server, "CLUSTER", "INFO"))
    except ResponseError:
        return ""
    for line in said.split():
        name, _, value = line.partition(":")
        if name == "cluster_state":
            return value
    return ""


def _asked(server: Server, *words: str) -> Any:
    """The answer to a command as the server gives it."""
    return cast(redis.Redis, server).execute_command(*words)


@contextmanager
def _connections(url: str) -> Iterator[Servers]:
    servers = Servers.of_url(url, name="lmpool-inspection")
    try:
        yield servers
    finally:
        servers.close()


def _server_facts(server: Server, url: str, options: ClientOptions) -> Facts:
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
    refused = _refused(server, options)
    offset = 0.0
    try:
        before = time.time()
        seconds, microseconds = server.time()
        offset = seconds + microseconds / 1e6 - (before + time.time()) / 2
    except ResponseError:
        pass  # as it is not permitted
    cores = os.cpu_count() if _is_here(server, info) else None
    latencies = measure_latency(server)
    return Facts(url, info, config, latencies, offset, *refused, cores=cores)


def _refused(
    server: Server, options: ClientOptions
) -> tuple[list[str], list[str] | None, list[str] | None]:
    """What this user may not of what clients, workers and exporters do, as `Facts` have it. A
    worker is who may take jobs, an exporter who may read of a pool and change nothing there. Of
    what others do no more is asked: each refusal is in the server's ACL LOG, in the place of those
    that are looked for there."""
    of_clients = client_commands(options.pool, client_id(options.url))
    of_workers = worker_commands(options.pool)
    takes_jobs = [command for command in of_workers if command[0] == "XREADGROUP"]
    refused = not_permitted(server, [*of_clients, *takes_jobs])
    to_clients = in_words({c: said for c, said in refused.items() if c not in takes_jobs})
    no_multi = ("MULTI",) in refused
    if no_multi or refused.keys() >= {*takes_jobs}:
        changes = {each for each in of_clients if each[0] in CHANGES}
        if no_multi:  # none of them was asked
            changes = {*harmless_changes(options.pool)}
            refused = not_permitted(server, [*changes], plainly=True)
        only_reads = refused.keys() >= changes
        to_watchers = _refused_to_watchers(server, options.pool) if only_reads else None
        return [*to_clients.values()], None, to_watchers
    refused |= not_permitted(server, [c for c in of_workers if c not in {*of_clients, *takes_jobs}])
    found = in_words(refused).items()
    to_workers = [said for about, said in found if about not in to_clients]
    return [*to_clients.values()], to_workers, None


def _refused_to_watchers(server: Server, pool: str) -> list[str] | None:
    """None of who may read nothing of a pool."""
    commands = watcher_commands(pool)
    refused = not_permitted(server, commands, plainly=True)
    of_pools = {each for each in commands if each[0] not in ("INFO", "TIME")}
    return None if refused.keys() >= of_pools else [*in_words(refused).values()]


def _is_here(server: Server, info: Mapping[str, object]) -> bool:
    """Whether a server is on this machine: a forwarded port leads elsewhere, mostly to another
    kernel."""
    host, here = address_of(server)[0], os.uname()
    beside = host in ("", "localhost", "::1") or host.startswith("127.")
    return beside and info.get("os") == f"{here.sysname} {here.release} {here.machine}"


def _with_pool(servers: Servers, facts: Facts, pool: str) -> tuple[Facts, list[int]]:
    """The server's facts and those of a pool, all its shards together, but for those of a cluster
    that do not answer, whose numbers these are."""
    facts = replace(facts, pool=pool)
    try:
        return _with_pool_seen(servers, facts, PoolKeys(pool))
    except NoPermissionError as error:
        return replace(facts, model_error=f"pool {pool!r} is not for this user: {error}"), []


def _with_pool_seen(servers: Servers, facts: Facts, keys: PoolKeys) -> tuple[Facts, list[int]]:
    pool = keys.pool
    try:
        try:
            packed = get_string(servers.for_key(keys.info), keys.info)
        except SlotMoved:  # the next one is asked of who serves it now
            packed = get_string(servers.for_key(keys.info), keys.info)
    except (RedisError, OSError) as error:
        if not servers.fails_apart or not is_lost(error):
            raise
        said = f"pool {pool!r}: the node that holds its model info is away ({error})"
        return replace(facts, model_error=said), []
    if packed is None:
        return facts, []
    try:
        model = ModelInfo.unpack(packed)
    except LmpoolError as error:
        return replace(facts, model_error=f"pool {pool!r}: {error}"), []
    workers: dict[str, bool] = {}
    pending: dict[str, int] = {}
    backlog = dead = 0
    away: list[int] = []
    for shard in model.shard_keys(keys):
        read = partial(_read_shard, shard)
        found = servers.apart([shard], read)
        if found is None:  # what has moved is asked for again at once, what is away is not
            found = servers.apart([shard], read)
        if found is None:
            away.append(shard.number)
            continue
        jobs, given_up, held, beats = found
        backlog += jobs
        dead += given_up
        for (name, count), alive in zip(held.items(), beats, strict=True):
            pending[name] = pending.get(name, 0) + count
            workers[name] = workers.get(name, False) or alive
    facts = replace(facts, model=model, workers=workers, pending=pending)
    there = [shard for shard in model.shard_keys(keys) if shard.number not in away]
    facts = replace(facts, lanes=_lanes(servers, there))
    return replace(facts, backlog=backlog, dead=dead), away


def _lanes(servers: Servers, shards: Sequence[ShardKeys]) -> LaneFacts | None:
    """How the lanes of these shards are used; None where that cannot be read."""
    try:
        found = pool_statistics(servers, shards)
    except (RedisError, OSError) as error:
        if is_lost(error) and not servers.fails_apart:
            raise
        return None  # away since a moment ago, or not for this user
    lanes = found["lanes"]
    taken = {each["id"]: (each["own_jobs"], each["stolen_jobs"]) for each in found["workers"]}
    asked, computed = found["prompt_tokens"], found["computed_tokens"]
    facts = LaneFacts(lanes["in_use"], taken=taken, prompt_tokens=asked, computed_tokens=computed)
    if not lanes["longest"]:
        return facts
    first = lanes["longest"][0]
    name = f"lane {first['lane']} of shard {first['shard']}"
    home = f", whose home is {first['home']}" if first["home"] else ""
    there, waiting = lanes["longest_jobs"], lanes["waiting_jobs"]
    return replace(facts, longest=name + home, there=there, waiting=waiting)


def _read_shard(shard: ShardKeys, server: Server) -> tuple[int, int, dict[str, int], list[bool]]:
    """A shard's jobs, those given up, and who holds how many, each with whether it is alive."""
    jobs, given_up = _lengths(server, shard)
    held = _held(server, shard)
    return jobs, given_up, held, signs_of_life(server, [shard.alive(name) for name in held])


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
    with server.pipeline(transaction=False) as pipeline:
        for stream in shard.streams:
            pipeline.xinfo_consumers(stream.key, GROUP)
        found = pipeline.execute(raise_on_error=False)
    held: dict[str, int] = {}
    for consumers in found:
        if isinstance(consumers, Exception):
            continue  # no stream or no group yet
        for consumer in consumers:
            name = consumer["name"].decode("utf-8", "replace")
            held[name] = held.get(name, 0) + int(consumer["pending"])
    return held
