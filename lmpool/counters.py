"""The names of what is counted: in the counters' hash of a pool, and as metrics.

Metric names follow Prometheus: base units, ``_total`` for what only grows, `LABELS` on each. Who
counts is the name's second word: a worker and a gateway each for itself, anything else is of the
pool as a whole, which ``lmpool exporter`` reads. So no sum counts a thing twice. No label has a
value of a caller's making: digests, clients, prompts and adapters are in none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "ANSWERS_METRIC", "BATCHES", "COMPUTED", "COUNTERS", "EVICTED", "EXPIRED", "FAILED", "LABELS",
    "METRICS", "OWN", "SECONDS", "SIZES", "STOLEN", "TOKENS_ASKED", "TOKENS_COMPUTED", "Counter",
    "Gateway", "Metric", "Pool", "Worker", "answers",
]  # fmt: skip

LABELS: Final[tuple[str, str]] = ("pool", "model_name")
"""The labels of every metric of a pool."""
SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets of what takes time."""
SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
"""Those of how many prompts a batch has."""


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
    "expired", "lmpool_jobs_expired_total", "Jobs whose deadline passed before they were computed."
)
EVICTED: Final = Counter(
    "evicted",
    "lmpool_results_evicted_total",
    "Results that were dropped before their time to live had passed, to make room for new ones.",
)

OWN: Final = Counter(
    "own_jobs", "lmpool_jobs_own_total", "Jobs that workers took of their own lanes."
)
STOLEN: Final = Counter(
    "stolen_jobs", "lmpool_jobs_stolen_total", "Jobs that workers took of others' lanes."
)
TOKENS_ASKED: Final = Counter(
    "prompt_tokens",
    "lmpool_prompt_tokens_total",
    "Tokens of the prompts that engines were given which tell what they compute.",
)
TOKENS_COMPUTED: Final = Counter(
    "computed_tokens",
    "lmpool_computed_tokens_total",
    "Tokens that these engines computed: of prompts, drawn ones and padding.",
)

ANSWERS_METRIC: Final = "lmpool_answers_total"
"""What of `COMPUTED` was an answer to each want, which is one more label."""


def answers(kind: str) -> str:
    """The field that counts answers to the wants of a kind. Rows are what is left of `COMPUTED`."""
    return f"answers_{kind}"


COUNTERS: Final = (
    *(COMPUTED, BATCHES, FAILED, EXPIRED, EVICTED),
    *(OWN, STOLEN, TOKENS_ASKED, TOKENS_COMPUTED),
)
"""All of them, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: what it is called, what it means, and its labels beside `LABELS`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", meaning, labels)


def _histogram(
    name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = SECONDS
) -> Metric:
    return Metric(name, "histogram", meaning, labels, buckets)


class Pool:
    """Of a pool as a whole, by ``lmpool exporter``: see `lmpool.pool_view`."""

    UP = _gauge("lmpool_up", "1 where the server answers and somebody serves the pool, else 0.")
    COMPUTED = _counter(COMPUTED.metric, COMPUTED.meaning)
    BATCHES = _counter(BATCHES.metric, BATCHES.meaning)
    FAILED = _counter(FAILED.metric, FAILED.meaning)
    EXPIRED = _counter(EXPIRED.metric, EXPIRED.meaning)
    EVICTED = _counter(EVICTED.metric, EVICTED.meaning)
    OWN = _counter(OWN.metric, OWN.meaning)
    STOLEN = _counter(STOLEN.metric, STOLEN.meaning)
    TOKENS_ASKED = _counter(TOKENS_ASKED.metric, TOKENS_ASKED.meaning)
    TOKENS_COMPUTED = _counter(TOKENS_COMPUTED.metric, TOKENS_COMPUTED.meaning)
    ANSWERS = _counter(ANSWERS_METRIC, "Jobs computed, by what was wanted.", "want")
    BACKLOG = _gauge("lmpool_backlog_jobs", "Jobs that wait or run.", "priority")
    PENDING = _gauge("lmpool_pending_jobs", "Those of the backlog that a worker has.", "priority")
    OLDEST = _gauge(
        "lmpool_oldest_job_age_seconds",
        "Since when the job waits or runs that has been there longest; 0 without one.",
        "priority",
    )
    LANES = _gauge("lmpool_lanes", "Lanes of the pool, over all its shards.")
    LANES_IN_USE = _gauge(
        "lmpool_lanes_in_use", "Lanes that jobs are put into: those that the workers need."
    )
    WAITING = _gauge("lmpool_waiting_jobs", "Jobs that no worker has taken, over all lanes.")
    LANES_WAITING = _gauge("lmpool_waiting_lanes", "Lanes with jobs that no worker has taken.")
    LONGEST_LANE = _gauge(
        "lmpool_longest_lane_jobs",
        "Jobs of both priorities that no worker has taken, in the lane that has most.",
    )
    SHARDS = _gauge("lmpool_shards", "Shards of the pool.")
    SHARDS_AWAY = _gauge(
        "lmpool_shards_away", "Shards that do not answer: what else is told is of the others."
    )
    WORKERS = _gauge("lmpool_workers", "Workers that are alive.")
    ROWS_PER_SECOND = _gauge(
        "lmpool_answers_per_second", "Answers of all living workers, over the last ten seconds."
    )
    DEAD_LETTERS = _gauge("lmpool_dead_letters", "Jobs that were given up, and are kept.")
    ADAPTERS = _gauge("lmpool_adapters", "LoRA adapters that the pool knows.")
    HELD = _gauge("lmpool_results_bytes", "The server's memory that stored results take.")
    HELD_FOR = _gauge(
        "lmpool_oldest_result_age_seconds", "Since when the oldest result is stored; 0 without one."
    )
    SERVER_MEMORY = _gauge("lmpool_server_memory_bytes", "The server's memory in use.")
    SERVER_MEMORY_MOST = _gauge(
        "lmpool_server_memory_max_bytes", "The server's maxmemory; 0 where it has none."
    )
    SCRAPE = _gauge("lmpool_exporter_read_seconds", "How long reading all this took.")


class Worker:
    """Of one worker, on its ``LMPOOL_METRICS_PORT``."""

    INFO = _gauge(
        "lmpool_worker_info", "1, with what this worker is.", "worker", "engine", "gpu", "version"
    )
    READY = _gauge("lmpool_worker_ready", "1 while the engine is loaded and serves, else 0.")
    ANSWERS = _counter("lmpool_worker_answers_total", "Answers stored, by want.", "want")
    FAILURES = _counter("lmpool_worker_failures_total", "Jobs that failed, by why.", "reason")
    BATCH = _histogram(
        "lmpool_worker_batch_prompts", "Prompts that the engine was given at once.", buckets=SIZES
    )
    QUEUE_WAIT = _histogram(
        "lmpool_worker_queue_wait_seconds",
        "From when a job was sent until the engine was given it.",
    )
    COMPUTE = _histogram(
        "lmpool_worker_compute_seconds", "A batch, or a step of a continuously fed engine."
    )
    PUBLISH = _histogram(
        "lmpool_worker_publish_seconds", "Encoding and writing what a batch brought."
    )
    CACHE_HITS = _counter(
        "lmpool_worker_cache_hits_total",
        "Jobs that were not computed as it was there (layer result), or was being (flight).",
        "layer",
    )
    TOKENS_ASKED = _counter(
        "lmpool_worker_prompt_tokens_total", "Tokens of the prompts that the engine was given."
    )
    TOKENS_COMPUTED = _counter(
        "lmpool_worker_computed_tokens_total",
        "Tokens that it computed: of prompts, drawn ones and padding.",
    )
    HOME_LANES = _gauge("lmpool_worker_home_lanes", "Lanes in use that it is the home of.")
    OWN_JOBS = _counter("lmpool_worker_own_jobs_total", "Jobs that it took of its own lanes.")
    STOLEN_JOBS = _counter("lmpool_worker_stolen_jobs_total", "Jobs that it took of others' lanes.")
    STATES = _gauge("lmpool_worker_kept_states", "KV states, of a token each, that are kept.")
    STATES_MOST = _gauge("lmpool_worker_kept_states_max", "How many there is room for.")
    STATES_EVICTED = _counter(
        "lmpool_worker_evicted_states_total", "KV states that gave way to others."
    )
    WAITING = _gauge("lmpool_worker_waiting_jobs", "Jobs that this worker has, and not its engine.")
    RUNNING = _gauge("lmpool_worker_running_jobs", "Jobs that its engine has.")
    HEARTBEAT_AGE = _gauge(
        "lmpool_worker_heartbeat_age_seconds", "Since the pool was last told that it lives."
    )
    ADAPTERS = _gauge("lmpool_worker_adapters", "LoRA adapters that are loaded.")
    START = _gauge("lmpool_worker_start_seconds", "How long each stage of its start took.", "stage")


class Gateway:
    """Of a gateway, at its ``/metrics``; `LABELS` only where a model is meant."""

    REQUESTS = _counter(
        "lmpool_gateway_requests_total", "Requests that were answered.", "route", "status"
    )
    SECONDS = _histogram("lmpool_gateway_request_seconds", "Until the whole answer.", "route")
    FIRST = _histogram(
        "lmpool_gateway_first_part_seconds", "Until the first part of the answer.", "route"
    )
    RUNNING = _gauge("lmpool_gateway_requests_running", "Requests that are being answered.")
    FREE = _gauge("lmpool_gateway_free_places", "Prompts that there is room for.")
    ASKED = _counter(
        "lmpool_gateway_prompts_total",
        "Prompts asked of the pool, by how they were answered.",
        "by",
    )


METRICS: Final = tuple(
    metric
    for source in (Pool, Worker, Gateway)
    for metric in vars(source).values()
    if isinstance(metric, Metric)
)
"""All of them."""
