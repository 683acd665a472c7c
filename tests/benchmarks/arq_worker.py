"""What ``arq`` runs as a peer: no-op jobs, told by ``LMPOOL_BENCH_*`` variables."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import msgpack
from arq.connections import RedisSettings

QUIET = {"version": 1, "disable_existing_loggers": True}
"""For arq's logging, which otherwise writes two lines a job."""


async def no_op(ctx: dict[str, Any], number: int) -> int:
    """Do nothing and answer the argument."""
    return number


def by_msgpack() -> bool:
    """Whether jobs travel as msgpack instead of arq's default, pickle."""
    return os.environ.get("LMPOOL_BENCH_SERIALIZER") == "msgpack"


class WorkerSettings:
    """For ``arq tests.benchmarks.arq_worker.WorkerSettings``."""

    functions: ClassVar = [no_op]
    queue_name: ClassVar = os.environ.get("LMPOOL_BENCH_QUEUE", "no-op")
    redis_settings: ClassVar = RedisSettings(
        unix_socket_path=os.environ.get("LMPOOL_BENCH_SOCKET"),
    )
    max_jobs: ClassVar = int(os.environ.get("LMPOOL_BENCH_MAX_JOBS", "100"))
    poll_delay: ClassVar = float(os.environ.get("LMPOOL_BENCH_POLL_DELAY", "0.5"))
    job_serializer: ClassVar = msgpack.packb if by_msgpack() else None
    job_deserializer: ClassVar = msgpack.unpackb if by_msgpack() else None
