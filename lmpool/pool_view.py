"""A pool as a whole, as an operator sees it: for the exporter, the live page and ``lmpool top``.

::

    with PoolViewer("redis://localhost:6379/0", "llama") as viewer:
        view = viewer.read()
        print(view.queues["interactive"]["jobs"], len(view.workers))

It asks nothing of the workers: what it reads is in a few small keys of the server.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self, TypedDict

from redis.exceptions import NoPermissionError, ResponseError

from lmpool.commands import Server
from lmpool.errors import LmpoolError
from lmpool.keys import GROUP, PRIORITIES, JobStream, PoolKeys, Priority, ShardKeys
from lmpool.model_info import ModelInfo
from lmpool.producer.statistics import PoolStatistics, WorkerStatistics, pool_statistics
from lmpool.server import ANSWER_TIMEOUT, get_string, greet, understood
from lmpool.servers import Servers
from lmpool.settings import ClientOptions, mask_url

__all__ = ["ModelView", "PoolView", "PoolViewer", "QueueView"]


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
        self._server = ""

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
        """Look once. Raises `ServerError` where the server does not answer.

        What this user may not read counts as nothing. A pool that nobody serves has no `model`.
        """
        servers, began = self._servers, time.perf_counter()
        with understood(self.url), servers.in_step():
            servers.follow()
            if not self._server:
                self._server = greet(servers.anywhere, self.url)
            packed = get_string(servers.for_key(self._keys.info), self._keys.info)
            info = _model_info(packed)
            shards = () if info is None else info.shard_keys(self._keys)
            statistics = pool_statistics(servers, shards) if shards else _NOTHING.copy()
            now = _time(servers.anywhere)
            queues: dict[Priority, QueueView] = {
                name: QueueView(jobs=0, pending=0, oldest_seconds=0.0) for name in PRIORITIES
            }
            dead: int | None = 0
            adapters = set[str]()
            for shard in shards:
                server = servers.for_shard(shard)
                for stream in shard.streams:
                    _add_queue(queues[stream.priority], server, stream, now)
                letters, known = _kept(server, shard)
                dead = None if dead is None or letters is None else dead + letters
                adapters |= known
            memory = [_memory(server) for server in servers.everywhere()]
        return PoolView(
            pool=self.pool,
            url=mask_url(self.url),
            server=self._server,
            read_at=now,
            read_seconds=time.perf_counter() - began,
            model=None if info is None else _model_view(info),
            statistics=statistics,
            queues=queues,
            dead_letters=dead,
            adapters=sorted(adapters),
            memory_bytes=sum(int(of_one.get("used_memory", 0)) for of_one in memory),
            memory_max_bytes=sum(int(of_one.get("maxmemory", 0)) for of_one in memory),
        )


_NOTHING = PoolStatistics(
    computed=0,
    batches=0,
    failed=0,
    expired=0,
    evicted=0,
    answers={},
    backlog=0,
    held_bytes=0,
    oldest_seconds=None,
    workers=[],
)


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


def _add_queue(queue: QueueView, server: Server, stream: JobStream, now: float) -> None:
    with server.pipeline(transaction=False) as pipeline:
        pipeline.xlen(stream.key)
        pipeline.xinfo_consumers(stream.key, GROUP)
        pipeline.xrange(stream.key, "-", "+", 1)
        length, consumers, first = pipeline.execute(raise_on_error=False)
    if isinstance(length, int):
        queue["jobs"] += length
    if isinstance(consumers, list):
        queue["pending"] += sum(int(consumer["pending"]) for consumer in consumers)
    if isinstance(first, list) and first:
        came = int(first[0][0].partition(b"-")[0]) / 1000
        queue["oldest_seconds"] = max(queue["oldest_seconds"], now - came, 0.0)


def _kept(server: Server, shard: ShardKeys) -> tuple[int | None, set[str]]:
    """How many jobs of a shard were given up, if that may be seen, and its adapters' names."""
    with server.pipeline(transaction=False) as pipeline:
        pipeline.xlen(shard.dead)
        pipeline.hgetall(shard.adapters)
        dead, adapters = pipeline.execute(raise_on_error=False)
    names = adapters if isinstance(adapters, dict) else {}
    letters = None if isinstance(dead, NoPermissionError) else dead if isinstance(dead, int) else 0
    return letters, {name.decode("utf-8", "replace") for name in names}
