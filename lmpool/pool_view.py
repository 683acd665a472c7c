"""A pool as a whole, as an operator sees it: for the exporter, the live page and ``lmpool top``.

::

    with PoolViewer("redis://localhost:6379/0", "llama") as viewer:
        view = viewer.read()
        print(view.queues["interactive"]["jobs"], len(view.workers))

It asks nothing of the workers: what it reads is in a few small keys of the server. Of a Redis
Cluster it shows what those nodes tell that answer, and names the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypedDict

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from lmpool.address import address_of, in_url
from lmpool.commands import Fields, Server
from lmpool.errors import LmpoolError, ServerUnreachable
from lmpool.keys import PRIORITIES, PoolKeys, Priority, ShardKeys
from lmpool.liveness import as_served
from lmpool.model_info import ModelInfo
from lmpool.producer.statistics import (
    LanesStatistics,
    PoolStatistics,
    WorkerStatistics,
    pool_statistics,
)
from lmpool.queues import ShardQueues, StreamQueue, answers_of
from lmpool.registry import Change
from lmpool.server import ANSWER_TIMEOUT, get_string, greet, is_lost, understood
from lmpool.server_url import mask_url
from lmpool.servers import Servers
from lmpool.settings import ClientOptions

__all__ = ["ModelView", "NodeView", "PoolView", "PoolViewer", "QueueView"]


class QueueView(TypedDict):
    """The jobs of one priority: how many wait or run, how many of these a worker has, and for how
    many seconds the oldest has been there (0 without one)."""

    jobs: int
    pending: int
    oldest_seconds: float


class ModelView(TypedDict):
    """What a pool serves."""

    model: str
    engine: str
    dtype: str
    encoding: str
    vocab_size: int
    max_prompt_tokens: int
    fingerprint: str
    shards: int
    lanes: int


class NodeView(TypedDict):
    """A primary of a Redis Cluster: ``host:port``, whether it answers, its memory as in `PoolView`,
    the numbers of the pool's shards that lie on it, and their jobs of all priorities."""

    address: str
    answers: bool
    memory_bytes: int
    memory_max_bytes: int
    shards: list[int]
    jobs: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool at one moment."""

    pool: str
    url: str
    """The server's, without its password."""
    server: str
    """Its name and version."""
    read_at: float
    """By the server's clock, in seconds since 1970."""
    read_seconds: float
    """How long reading all this took."""
    model: ModelView | None
    """None where nobody has served the pool yet."""
    statistics: PoolStatistics
    """The counters, what is held, and the living workers: see `PooledLM.pool_statistics`."""
    queues: dict[Priority, QueueView]
    """By priority."""
    dead_letters: int | None
    """None where this user of the server may not see them."""
    adapters: list[str]
    memory_bytes: int
    memory_max_bytes: int
    """The server's, for all that it holds; 0 where it has no bound."""
    nodes: list[NodeView] = field(default_factory=list)
    """The primaries of a Redis Cluster, over which the figures are summed; none of one server."""

    @property
    def nodes_away(self) -> list[str]:
        """The addresses of primaries that do not answer: the figures are those of the others."""
        return [node["address"] for node in self.nodes if not node["answers"]]

    @property
    def workers(self) -> list[WorkerStatistics]:
        """Those that are alive."""
        return self.statistics["workers"]

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return asdict(self)


class PoolViewer:
    """Looks at one pool, again and again, with a connection of its own.

    What is not given comes from ``LMPOOL_URL`` and ``LMPOOL_POOL``; the server has
    `answers_within` seconds for each answer. For one thread at a time.
    """

    def __init__(
        self,
        url: str | None = None,
        pool: str | None = None,
        *,
        answers_within: float = ANSWER_TIMEOUT,
    ) -> None:
        options = ClientOptions(url=url, pool=pool)
        self.url = options.url
        self.pool = options.pool
        self._keys = PoolKeys(options.pool)
        self._servers = Servers.of_url(
            options.url, name="lmpool-viewer", answers_within=answers_within
        )
        self._patience = answers_within
        self._server = ""
        self._info: bytes | None = None
        self._counters: dict[str, Fields] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._servers.close()

    def read(self) -> PoolView:
        """Look once. Raises `ServerError` where no server answers.

        What this user may not read counts as nothing. A pool that nobody serves has no `model`.
        """
        servers, began = self._servers, time.perf_counter()
        until = time.monotonic() + self._patience
        with understood(self.url), servers.in_step():
            servers.follow()
            if not self._server:
                self._server = _greet(servers, self.url)
            info = _model_info(self._packed(until))
            if info is not None:
                info = as_served(servers, self._keys, info)
            shards = () if info is None else info.shard_keys(self._keys)
            # Where they lie now: of one that is lost the map may soon name another.
            places = [servers.place(shard) for shard in shards]
            statistics = _NOTHING.copy()
            queues: dict[int, ShardQueues] = {}
            if shards:
                statistics = pool_statistics(servers, shards, self._counters, queues)
            kept = [
                servers.apart([shard], partial(_kept, shard, queues[shard.number]))
                if shard.number in queues
                else None
                for shard in shards
            ]
            answered = [found for found in kept if found is not None]
            nodes, now = self._nodes(places, shards, kept)
        dead = [found.dead for found in answered]
        return PoolView(
            pool=self.pool,
            url=mask_url(self.url),
            server=self._server,
            read_at=now,
            read_seconds=time.perf_counter() - began,
            model=None if info is None else _model_view(info),
            statistics=statistics,
            queues={
                name: _queue([found.queues[name] for found in answered]) for name in PRIORITIES
            },
            dead_letters=None if None in dead else sum(letters or 0 for letters in dead),
            adapters=sorted(set[str]().union(*(found.adapters for found in answered))),
            memory_bytes=sum(node["memory_bytes"] for node in nodes),
            memory_max_bytes=sum(node["memory_max_bytes"] for node in nodes),
            nodes=nodes if servers.fails_apart else [],
        )

    def _packed(self, until: float) -> bytes | None:
        """The model info; what it was, where the node that holds it is away.

        Raises redis-py's exceptions where that is unknown, or looking for it took too long.
        """
        key = self._keys.info
        # It lies by itself, as if it were a shard.
        alone = ShardKeys(key)

        def read(server: Server) -> None:
            self._info = get_string(server, key)

        lost: list[Exception] = []
        self._servers.apart([alone], read, lambda _, error: lost.append(error))
        if lost and (self._info is None or time.monotonic() > until):
            raise lost[0]
        return self._info

    def _nodes(
        self, places: Sequence[str], shards: Sequence[ShardKeys], kept: Sequence[_Kept | None]
    ) -> tuple[list[NodeView], float]:
        """The servers, and what time it is by the first that answers."""
        servers = self._servers
        lies: dict[str, list[tuple[ShardKeys, _Kept | None]]] = {}
        for place, shard, found in zip(places, shards, kept, strict=True):
            lies.setdefault(place, []).append((shard, found))
        nodes: list[NodeView] = []
        now: float | None = None
        for server in servers.everywhere():
            place = in_url(address_of(server)) if servers.fails_apart else ""
            here = lies.pop(place, [])
            memory: dict[str, Any] | None = None
            # One that has just been waited for is not waited for again.
            if not any(found is None for _, found in here):
                memory, now = _look_at(servers, server, now)
            nodes.append(_node_view(place, memory, here))
        nodes += [_node_view(place, None, here) for place, here in lies.items()]
        return sorted(nodes, key=lambda node: node["address"]), time.time() if now is None else now


def _greet(servers: Servers, url: str) -> str:
    """The name and version of the first server that answers."""
    failure: ServerUnreachable | None = None
    for server in servers.everywhere():
        try:
            return greet(server, url)
        except ServerUnreachable as error:
            failure = error
    assert failure is not None
    raise failure


_NOTHING = PoolStatistics(
    computed=0,
    batches=0,
    failed=0,
    expired=0,
    evicted=0,
    own_jobs=0,
    stolen_jobs=0,
    prompt_tokens=0,
    computed_tokens=0,
    answers={},
    backlog=0,
    lanes=LanesStatistics(
        lanes=0, in_use=0, waiting_jobs=0, waiting_lanes=0, longest_jobs=0, longest=[]
    ),
    held_bytes=0,
    oldest_seconds=None,
    workers=[],
    shards_away=[],
)


class _Kept(NamedTuple):
    """What a shard holds besides results: `dead` letters, None where they may not be seen."""

    queues: dict[Priority, QueueView]
    dead: int | None
    adapters: set[str]


def _model_info(packed: bytes | None) -> ModelInfo | None:
    try:
        return None if packed is None else ModelInfo.unpack(packed)
    except LmpoolError:
        return None  # damaged, or of another release: workers write it anew


def _model_view(info: ModelInfo) -> ModelView:
    return ModelView(
        model=info.model,
        engine=info.engine,
        dtype=info.dtype,
        encoding=info.encoding,
        vocab_size=info.vocab_size,
        max_prompt_tokens=info.max_prompt_tokens,
        fingerprint=info.fingerprint,
        shards=info.shards,
        lanes=info.lanes,
    )


def _look_at(
    servers: Servers, server: Server, now: float | None
) -> tuple[dict[str, Any] | None, float | None]:
    """A server's memory, None for a node of a cluster that is away; and the time, unless known."""
    try:
        return _memory(server), _time(server) if now is None else now
    except (RedisError, OSError) as error:
        if not servers.fails_apart or not is_lost(error):
            raise
        return None, now


def _node_view(
    place: str,
    memory: dict[str, Any] | None,
    here: Sequence[tuple[ShardKeys, _Kept | None]],
) -> NodeView:
    queues = [queue for _, found in here if found is not None for queue in found.queues.values()]
    return NodeView(
        address=place,
        answers=memory is not None,
        memory_bytes=int((memory or {}).get("used_memory", 0)),
        memory_max_bytes=int((memory or {}).get("maxmemory", 0)),
        shards=[shard.number for shard, _ in here],
        jobs=sum(queue["jobs"] for queue in queues),
    )


def _time(server: Server) -> float:
    try:
        seconds, microseconds = server.time()
    except ResponseError:
        return time.time()
    return float(seconds) + microseconds / 1e6


def _memory(server: Server) -> dict[str, Any]:
    try:
        return dict(server.info("memory"))
    except ResponseError:
        return {}


def _kept(shard: ShardKeys, queues: ShardQueues, server: Server) -> _Kept:
    with server.pipeline(transaction=False) as pipeline:
        pipeline.xlen(shard.dead)
        pipeline.hgetall(shard.adapters)
        dead, adapters = answers_of(pipeline)
    parts: dict[Priority, list[QueueView]] = {name: [] for name in PRIORITIES}
    for queue in queues.streams:
        parts[queue.stream.priority].append(_queue_view(queue))
    names = adapters if isinstance(adapters, dict) else {}
    return _Kept(
        {name: _queue(each) for name, each in parts.items()},
        None if isinstance(dead, NoPermissionError) else dead if isinstance(dead, int) else 0,
        {
            name.decode("utf-8", "replace")
            for name, entry in names.items()
            if not Change.parse(entry).removed
        },
    )


def _queue_view(queue: StreamQueue) -> QueueView:
    return QueueView(jobs=queue.jobs, pending=queue.pending, oldest_seconds=queue.age)


def _queue(parts: Sequence[QueueView]) -> QueueView:
    """All of them together."""
    return QueueView(
        jobs=sum(part["jobs"] for part in parts),
        pending=sum(part["pending"] for part in parts),
        oldest_seconds=max((part["oldest_seconds"] for part in parts), default=0.0),
    )
