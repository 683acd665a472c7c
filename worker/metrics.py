"""What a worker counts of its own work, for its ``/metrics``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from lmpool.backends.engine import Measures
from lmpool.counters import SECONDS, SIZES
from lmpool.monitoring.spread import Spread

Failure = Literal["failed", "unknown_adapter", "unwritable", "expired", "refused", "given_up"]
Layer = Literal["result", "flight"]


class WorkerMetrics:
    """Counts; where nobody scrapes it (`on` is False) nothing but flags is looked at.

    Each number has one thread that adds to it, and any may read.
    """

    def __init__(self) -> None:
        self.on = False
        self.batch = Spread(SIZES)
        self.queue_wait = Spread(SECONDS)
        self.compute = Spread(SECONDS)
        self.publish = Spread(SECONDS)
        self.answers: Counter[str] = Counter()
        self.failures: Counter[Failure] = Counter()
        """Of several threads, under `WorkerStatus`' lock."""
        self.cache_hits: Counter[Layer] = Counter()
        self.tokens_asked = 0
        self.running = 0
        self.adapters = 0
        self.engine: Measures | None = None
        """The engine's own, as they were after its last step."""
        self.beat_at: float | None = None
        """When the pool was last told that this worker lives, on the monotonic clock."""

    def begin(self, waited: Sequence[float], tokens: int) -> None:
        """The engine was given prompts that `waited` so many seconds, of `tokens` together."""
        self.batch.add(len(waited))
        self.queue_wait.add_all(waited)
        self.tokens_asked += tokens

    def hit(self, layer: Layer, jobs: int = 1) -> None:
        """Jobs that need not be computed. Of the engine's thread."""
        self.cache_hits[layer] += jobs

    def heartbeat_age(self) -> float:
        """Seconds since the pool was last told that this worker lives; 0 before the first time."""
        return 0.0 if self.beat_at is None else time.monotonic() - self.beat_at
