"""Spans of a worker's batches, in the traces of the calls whose jobs they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from lmpool.backends.engine import Outcome
from lmpool.tracing import active, batch_span
from lmpool.worker.batching import Delivery

LONGEST_MS: Final = 7 * 86_400_000
"""Of a wait that is told: anybody may write a job."""


class _Batch:
    __slots__ = ("failed", "left", "span")

    def __init__(self, span: Any, left: int) -> None:
        self.span = span
        self.left = left
        self.failed = 0


class BatchTraces:
    """A span from when the engine is given prompts until it has answered the last of them.

    Owned by the engine's thread. A batch in which nobody traces anything has none.
    """

    def __init__(self, pool: str, model: str, engine: str) -> None:
        self._about = {"lmpool.pool": pool, "lmpool.model": model, "lmpool.engine": engine}
        self._running: dict[bytes, _Batch] = {}

    def begin(self, started: Sequence[Delivery], now_ms: Callable[[], int]) -> None:
        """The engine is about to be given these. `now_ms` is the server's clock."""
        traces = [delivery.job.trace for delivery in started if delivery.job.trace is not None]
        if not traces or not active():
            return
        first = min(delivery.job.sent for delivery in started)
        span = batch_span(
            traces,
            {
                **self._about,
                "lmpool.prompts": len(started),
                "lmpool.tokens": sum(delivery.size for delivery in started),
                "lmpool.wants": sorted({delivery.job.want.kind for delivery in started}),
                "lmpool.queue_wait_ms": min(max(0, now_ms() - first), LONGEST_MS),
            },
        )
        if span is not None:
            batch = _Batch(span, len(started))
            for delivery in started:
                self._running[delivery.job.digest] = batch

    def end_all(self) -> None:
        """The engine has nothing any more, however that came."""
        for batch in {id(batch): batch for batch in self._running.values()}.values():
            batch.span.set_attribute("lmpool.failed", batch.left)
            batch.span.end()
        self._running.clear()

    def end_of(self, outcomes: Iterable[Outcome]) -> None:
        """The engine has answered these."""
        if self._running:
            for outcome in outcomes:
                self.end((outcome.id,), failed=outcome.error is not None)

    def end(self, digests: Iterable[bytes], *, failed: bool = False) -> None:
        """The engine has these no longer."""
        if not self._running:
            return
        for digest in digests:
            batch = self._running.pop(digest, None)
            if batch is not None:
                batch.left -= 1
                batch.failed += failed
                if not batch.left:
                    if batch.failed:
                        batch.span.set_attribute("lmpool.failed", batch.failed)
                    batch.span.end()
