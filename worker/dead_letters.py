"""Dead letters: jobs that are given up, kept with the reason, their callers told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import redis.exceptions

from lmpool.checks import words
from lmpool.commands import Value
from lmpool.errors import JobFormatError
from lmpool.isolation import is_about_entries
from lmpool.keys import COUNTERS_TTL_MS, GROUP, JobStream
from lmpool.logs import about
from lmpool.scripts import script
from lmpool.servers import Servers
from lmpool.wire import Job, RefusedJob
from lmpool.worker.metrics import Failure

logger = logging.getLogger(__name__)

DEAD_MOST: Final = 10_000
"""Entries kept in a shard, about."""
GARBAGE_BYTES: Final = 4096
"""Bytes kept of an entry that is no job."""


class DeadLetters:
    """Gives jobs up, with the connections of the thread that uses it."""

    def __init__(
        self,
        servers: Servers,
        consumer: str,
        note: Callable[[Failure, str], None] = lambda failure, reason: None,
    ) -> None:
        self._servers = servers
        self._consumer = consumer
        self._note = note

    def refuse(self, stream: JobStream, entry: bytes, data: bytes, error: JobFormatError) -> None:
        """Garbage in the job stream: tell whoever can be told."""
        logger.warning("refused an entry of the job stream: %s", error)
        digest = error.digest.hex() if isinstance(error, RefusedJob) else ""
        self._bury(
            stream, entry, data[:GARBAGE_BYTES], digest, "refused", words(error), 0, self._consumer
        )

    def give_up(
        self, stream: JobStream, entry: bytes, data: bytes, job: Job, deliveries: int, last: str
    ) -> None:
        """A job whose workers have died again and again; `last` is the last of them."""
        reason = (
            f"given up after {deliveries} deliveries: every worker that ran this prompt died or "
            f"hung, the last one {last}; see its log, and lmpool dead show"
        )
        logger.error("a job was %s", reason, extra=about(job.want.kind))
        self._bury(stream, entry, data, job.digest.hex(), "failed", reason, deliveries, last)
        # Not for garbage, which anybody may send a lot of. It is buried whatever becomes of this.
        with suppress(redis.exceptions.RedisError, OSError):
            self._servers.settle(self._servers.for_shard(stream.shard))

    def _bury(
        self,
        stream: JobStream,
        entry: bytes,
        data: bytes,
        digest: str,
        status: str,
        reason: str,
        deliveries: int,
        worker: str,
    ) -> None:
        shard = stream.shard
        kept = (
            *("job", data, "reason", reason),
            *("deliveries", deliveries, "worker", worker),
        )
        server = self._servers.for_shard(shard)
        arguments: list[Value] = [
            shard.prefix,
            GROUP,
            COUNTERS_TTL_MS,
            DEAD_MOST,
            digest,
            entry,
            status,
            reason,
        ]
        try:
            refusal = script("bury")(server, [stream.key, shard.dead], [*arguments, *kept])
        except redis.exceptions.ResponseError as error:
            if not is_about_entries(error):
                raise
            logger.error("%s of %s cannot be buried: %s", entry.decode(), stream.key, error)
            server.xack(stream.key, GROUP, entry)  # or it would come back for ever
            server.xdel(stream.key, entry)
            return
        self._note("refused" if status == "refused" else "given_up", reason)
        if refusal:
            logger.error("%s cannot be written, the job is not kept: %s", shard.dead, refusal)
