"""Spans of OpenTelemetry (the extra ``otel``): one a call at the client, one a batch at the worker.

A client's are made where the program has set a tracer provider, and go on the caller's own trace.
What belongs together is known by the W3C ``traceparent`` in the job. Processes of lmpool's own
(workers, gateways) set a provider where the variables of OpenTelemetry name somebody to send to.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from lmpool.errors import SettingsError
from lmpool.release import VERSION
from lmpool.wire import Job

__all__ = ["CallSpan", "active", "batch_span", "begin_call", "set_up", "within"]

LINKS_MOST: Final = 127
"""Calls that a batch's span names, beside the one that it belongs to."""
FLUSH_MS: Final = 2000
"""How long the end of a process waits for its last spans to be taken."""
_WANTED_BY: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


class _Tracer:
    """The tracer of a provider, and what else a span takes: looked up once a provider, as making
    one takes as long as asking the pool for a row."""

    __slots__ = ("client", "consumer", "provider", "start")

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind

        self.provider = provider
        self.client, self.consumer = SpanKind.CLIENT, SpanKind.CONSUMER
        self.start = provider.get_tracer("lmpool", VERSION).start_span


_latest: _Tracer | None = None


def active() -> bool:
    """Whether anybody takes spans. Where OpenTelemetry was never imported it is one look-up."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )


def _tracer() -> _Tracer:
    global _latest
    provider = sys.modules["opentelemetry.trace"].get_tracer_provider()
    if _latest is None or _latest.provider is not provider:
        _latest = _Tracer(provider)
    return _latest


class CallSpan:
    """One call's span that is recorded. `traceparent` is what its jobs carry; None where it is not
    sampled all the same."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any) -> None:
        self._span = span
        self.traceparent = _traceparent(span)

    def asked(self, prompts: int) -> None:
        """So many prompts were asked in all."""
        self._span.set_attribute("lmpool.prompts", prompts)

    def end(self, error: BaseException | None = None) -> None:
        """The call is over. Idempotent."""
        if self._span.is_recording():
            if error is not None:
                _note(self._span, error)
            self._span.end()


def begin_call(
    pool: str, model: str, jobs: Sequence[Job], name: str = "lmpool ask"
) -> CallSpan | None:
    """The span of a call that asks for these, within the caller's own trace; None where nobody is
    told of it, as of ninety-nine in a hundred."""
    tracer = _tracer()
    span = tracer.start(name, kind=tracer.client)
    if not span.is_recording():
        return None
    span.set_attribute("lmpool.pool", pool)
    span.set_attribute("lmpool.model", model)
    span.set_attribute("lmpool.prompts", len(jobs))
    span.set_attribute("lmpool.wants", sorted({job.want.kind for job in jobs}))
    return CallSpan(span)


def _note(span: Any, error: BaseException) -> None:
    from opentelemetry.trace import StatusCode

    # Not its text, which may quote what was asked.
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(StatusCode.ERROR)


def _traceparent(span: Any) -> str | None:
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def batch_span(traceparents: Sequence[str], attributes: Mapping[str, Any]) -> Any:
    """The span of a batch in which these calls have jobs, begun; None where none of them is right.

    It belongs to the first of them, and is linked with the others.
    """
    from opentelemetry.trace import Link, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    extract = TraceContextTextMapPropagator().extract
    found = [extract({"traceparent": each}) for each in dict.fromkeys(traceparents)]
    spans = [get_current_span(each).get_span_context() for each in found]
    right = [(each, span) for each, span in zip(found, spans, strict=True) if span.is_valid]
    if not right:
        return None
    (parent, _), *others = right
    links = [Link(span) for _, span in others[:LINKS_MOST]]
    tracer = _tracer()
    return tracer.start(
        "lmpool batch", context=parent, kind=tracer.consumer, links=links, attributes=attributes
    )


@contextmanager
def within(headers: Mapping[str, str], name: str) -> Iterator[Any]:
    """While a request is answered: its span, of the trace that its headers name."""
    from opentelemetry.trace import SpanKind, use_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(headers)
    span = _tracer().start(name, context=context, kind=SpanKind.SERVER)
    # Not what an error says, which may quote what was asked.
    with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        yield span


def set_up(service: str, instance: str = "") -> Callable[[], None]:
    """Send this process's spans to where OpenTelemetry's variables say; what ends that.

    Where they name nobody nothing happens. Raises `SettingsError` where its packages are missing.
    """
    if not any(os.environ.get(name) for name in _WANTED_BY):
        return lambda: None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        name = next(name for name in _WANTED_BY if os.environ.get(name))
        raise SettingsError(
            f"{name} needs {error.name}, which is not installed: pip install 'lmpool[otel]'"
        ) from None
    attributes = {"service.version": VERSION}
    if instance:
        attributes["service.instance.id"] = instance
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = service
    # Nobody may wait at the end of a process for a collector that is gone.
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def end() -> None:
        # On a thread, as exporters take their own time to give up.
        flush = threading.Thread(target=provider.force_flush, args=(FLUSH_MS,), daemon=True)
        flush.start()
        flush.join(FLUSH_MS / 1000)

    return end
