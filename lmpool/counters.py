"""The names of what is counted: in the counters' hash of a pool, and as metrics.

Metric names follow Prometheus: base units, ``_total`` for what only grows, `LABELS` on each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "ANSWERS_METRIC", "BATCHES", "COMPUTED", "COUNTERS", "EVICTED", "EXPIRED", "FAILED", "LABELS",
    "Counter", "answers",
]  # fmt: skip

LABELS: Final = ("pool", "model_name")
"""The labels of every metric of a pool."""


@dataclass(frozen=True, slots=True)
class Counter:
    """Something that workers count: its field in the hash, its metric, what it means."""

    field: str
    metric: str
    meaning: str


COMPUTED: Final = Counter(
    "computed",
    "lmpool_jobs_computed_total",
    "Jobs that workers computed and wrote the result of.",
)
BATCHES: Final = Counter("batches", "lmpool_batches_total", "Batches that engines ran.")
FAILED: Final = Counter(
    "failed", "lmpool_jobs_failed_total", "Jobs that ended in an error, those given up among them."
)
EXPIRED: Final = Counter(
    "expired", "lmpool_jobs_expired_total", "Jobs whose deadline passed before a worker ran them."
)
EVICTED: Final = Counter(
    "evicted",
    "lmpool_results_evicted_total",
    "Results that were dropped before their time to live had passed, to make room for new ones.",
)

ANSWERS_METRIC: Final = "lmpool_answers_total"
"""What of `COMPUTED` was an answer to each want, which is one more label."""


def answers(kind: str) -> str:
    """The field that counts answers to the wants of a kind. Rows are what is left of `COMPUTED`."""
    return f"answers_{kind}"


COUNTERS: Final = (COMPUTED, BATCHES, FAILED, EXPIRED, EVICTED)
"""All of them, in the order in which they are shown."""
