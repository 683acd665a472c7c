"""Spans of a worker's batches, in the traces of the calls whose jobs they have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lmpool.tracing import active, batch_span
from lmpool.worker.batching import Delivery


class _Batch:
    __slots__ = ("left", "span")

    def __init__(self, span: Any, left: int) -> None:
        self.span = span
        self.left = left


class BatchTraces:
    """A span from when the engine is given prompts until it has answered the last of them.

    Owned by the engine's thread. A batch in which nobody traces anything has none.
    """

    def __init__(self, pool: str, model: str, engine: str) -> None:
        self._about = {"lmpool.pool": pool, "lmpool.model": model, "lmpool.engine": engine}
        self._running: dict[bytes, _Batch] = {}

    def begin(self, started: Sequence[Delivery], now_ms: int) -> None:
        """The engine is about to be given these."""
        traces = [delivery.job.trace for delivery in started if delivery.job.trace is not None]
        if not traces or not active():
            return
        span = batch_span(
            traces,
            {
                **self._about,
                "lmpool.prompts": len(started),
                "lmpool.tokens": sum(delivery.size for delivery in started),
                "lmpool.wants": sorted({delivery.job.want.kind for delivery in started}),
                "lmpool.queue_wait_ms": max(0, now_ms - min(d.job.sent for d in started)),
            },
        )
        if span is not None:
            batch = _Batch(span, len(started))
            for delivery in started:
                self._running[delivery.job.digest] = batch

    def end(self, digests: Iterable[bytes]) -> None:
        """The engine has these no longer."""
        if not self._running:
            return
        for digest in digests:
            batch = self._running.pop(digest, None)
            if batch is not None:
                batch.left -= 1
                if not batch.left:
                    batch.span.end()
