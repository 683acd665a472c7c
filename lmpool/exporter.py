"""Pools as a whole, for Prometheus: what no single worker knows (the extra ``metrics``).

::

    with Exporter([("llama", "redis://localhost:6379/0")]) as exporter:
        print(exporter.exposition().decode())

``lmpool exporter`` serves it. Run one for each server, beside any number of workers and gateways,
which have metrics of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from lmpool.checks import said
from lmpool.counters import LABELS, Metric, Pool
from lmpool.errors import LmpoolError
from lmpool.monitoring.families import Shown, family, merged, registry
from lmpool.monitoring.server import Readiness
from lmpool.pool_view import PoolView, PoolViewer

__all__ = ["Exporter"]

logger = logging.getLogger(__name__)

ANSWERS_WITHIN: Final = 4.0
"""Seconds for which the server is waited for: whoever scrapes waits 10 s, as a rule."""
FRESH: Final = 0.5
"""Seconds for which what was read is given to others who ask, too."""
MOST_AT_ONCE: Final = 8
"""Pools that are read side by side."""


class Exporter(Collector):
    """Reads pools as they are asked for. `pools` are names, each with its server's URL or None.

    A pool that cannot be read is one that is not up; it is read again the next time.
    """

    def __init__(self, pools: Sequence[tuple[str, str | None]], url: str | None = None) -> None:
        self._pools = [_Exported(name, own or url) for name, own in pools]
        self._together = ThreadPoolExecutor(
            min(MOST_AT_ONCE, len(self._pools)), thread_name_prefix="lmpool-exporter"
        )
        self.registry = registry(self)

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
        """End the connections."""
        self._together.shutdown()
        for pool in self._pools:
            pool.close()

    def exposition(self) -> bytes:
        """Every metric, as Prometheus' text."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Family]:
        """Every metric of every pool."""
        looks = self._together.map(_Exported.families, self._pools)
        return merged(found for families in looks for found in families)

    def readiness(self) -> Readiness:
        """Whether every pool can be read."""
        errors = dict(self._together.map(_Exported.error, self._pools))
        wrong = {name: text for name, text in errors.items() if text is not None}
        if wrong:
            return Readiness(False, {"status": "away", "errors": wrong})
        return Readiness(True, {"status": "ready", "pools": [pool.name for pool in self._pools]})


class _Exported:
    """One pool. Any thread may ask."""

    def __init__(self, name: str, url: str | None) -> None:
        self.name = name
        self._viewer = PoolViewer(url, name, answers_within=ANSWERS_WITHIN)
        self._lock = threading.Lock()
        self._view: PoolView | None = None
        self._error: str | None = None
        self._looked = -FRESH
        self._model = ""

    def close(self) -> None:
        self._viewer.close()

    def error(self) -> tuple[str, str | None]:
        """Its name, and why it cannot be read."""
        self._look()
        return self.name, self._error

    def _look(self) -> PoolView | None:
        with self._lock:
            if time.monotonic() - self._looked >= FRESH:
                try:
                    self._view, self._error = self._viewer.read(), None
                except LmpoolError as error:
                    self._view, self._error = None, str(error)
                except Exception as error:  # one pool's damage must not hide the others
                    logger.exception("pool %s cannot be read", self.name)
                    self._view, self._error = None, said(error)
                self._looked = time.monotonic()
            if self._view is not None and self._view.model is not None:
                self._model = self._view.model["model"]
            return self._view

    def families(self) -> list[Family]:
        """Its metrics."""
        view = self._look()
        common = dict(zip(LABELS, (self.name, self._model), strict=True))
        if view is None:
            return [family(Pool.UP, common, 0.0)]
        return [family(metric, common, shown) for metric, shown in _shown(view)]


def _shown(view: PoolView) -> Iterator[tuple[Metric, Shown]]:
    yield Pool.UP, float(bool(view.workers))
    found = view.statistics
    yield Pool.COMPUTED, found["computed"]
    yield Pool.BATCHES, found["batches"]
    yield Pool.FAILED, found["failed"]
    yield Pool.EXPIRED, found["expired"]
    yield Pool.EVICTED, found["evicted"]
    yield Pool.OWN, found["own_jobs"]
    yield Pool.STOLEN, found["stolen_jobs"]
    yield Pool.TOKENS_ASKED, found["prompt_tokens"]
    yield Pool.TOKENS_COMPUTED, found["computed_tokens"]
    yield Pool.ANSWERS, dict(found["answers"])
    queues = view.queues
    yield Pool.BACKLOG, {name: queue["jobs"] for name, queue in queues.items()}
    yield Pool.PENDING, {name: queue["pending"] for name, queue in queues.items()}
    yield Pool.OLDEST, {name: queue["oldest_seconds"] for name, queue in queues.items()}
    yield Pool.SHARDS, 0 if view.model is None else view.model["shards"]
    yield Pool.SHARDS_AWAY, len(found["shards_away"])
    yield Pool.LANES, 0 if view.model is None else view.model["shards"] * view.model["lanes"]
    lanes = found["lanes"]
    yield Pool.LANES_IN_USE, lanes["in_use"]
    yield Pool.WAITING, lanes["waiting_jobs"]
    yield Pool.LANES_WAITING, lanes["waiting_lanes"]
    yield Pool.LONGEST_LANE, lanes["longest_jobs"]
    yield Pool.WORKERS, len(view.workers)
    yield Pool.ROWS_PER_SECOND, sum(worker["rows_per_second"] for worker in view.workers)
    if view.dead_letters is not None:
        yield Pool.DEAD_LETTERS, view.dead_letters
    yield Pool.ADAPTERS, len(view.adapters)
    yield Pool.HELD, found["held_bytes"]
    yield Pool.HELD_FOR, found["oldest_seconds"] or 0.0
    yield Pool.SERVER_MEMORY, view.memory_bytes
    yield Pool.SERVER_MEMORY_MOST, view.memory_max_bytes
    yield Pool.SCRAPE, view.read_seconds
