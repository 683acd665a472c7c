"""Spans of calls, batches and requests, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from lmpool import Ask, PooledLM
from lmpool.errors import PromptFailed
from lmpool.wants import Top
from tests.support.clients import connected
from tests.support.gateways import GatewayProcess
from tests.support.ports import free_port
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import in_process_worker, worker_process

pytestmark = [pytest.mark.server, pytest.mark.one_server]

SECRET = "sesame"
FAILS = 63


class Collector:
    """Takes what OTLP exporters send, as any collector does."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """Of each span the service it is from, and what was sent."""
        spans = self.spans

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = ExportTraceServiceRequest()
                sent.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in sent.resource_spans:
                    about = {a.key: a.value.string_value for a in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        spans.extend((about["service.name"], span) for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def named(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if span.name == name]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with RealServer() as running:
        yield running


class Spans:
    """What this process has recorded."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def of(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        return until(lambda: self.of(name), what=f"a span {name}")[-1]

    def clear(self) -> None:
        self._exporter.clear()


def provider(monkeypatch: pytest.MonkeyPatch, sampled: float = 1.0) -> Spans:
    """Have this process's spans kept, a share of the traces that begin here."""
    made = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sampled)))
    exporter = InMemorySpanExporter()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    # OpenTelemetry lets nobody set another one.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", made)
    return Spans(exporter)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    return provider(monkeypatch)


@pytest.fixture
def lm(server: RealServer, request: pytest.FixtureRequest) -> Iterator[PooledLM]:
    pool = f"traced-{abs(hash(request.node.name)) % 10**6}"
    options = {"vocab_size": 64, "fail_token": FAILS}
    with (
        in_process_worker(server.url, pool, engine_opts=options, timeout=0.05),
        connected(server.url, pool, cache_bytes=0) as client,
    ):
        yield client


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_call_is_a_span_of_its_callers_trace_and_its_batch_follows(
    server: RealServer, spans: Spans
) -> None:
    with (
        in_process_worker(server.url, "traced-two", batch_size=2, timeout=50),  # both together
        connected(server.url, "traced-two") as lm,
        trace.get_tracer("test").start_as_current_span("mine") as mine,
    ):
        lm.sync.batch_next_token_logprobs([[1, 2], [1, 3, 4]])
    call, batch = spans.one("lmpool ask"), spans.one("lmpool batch")
    assert call.parent is not None
    assert call.parent.span_id == mine.get_span_context().span_id
    assert batch.parent is not None
    assert batch.parent.span_id == call.context.span_id  # type: ignore[union-attr]
    assert batch.context.trace_id == mine.get_span_context().trace_id  # type: ignore[union-attr]
    assert attributes(call)["lmpool.prompts"] == 2
    assert attributes(call)["lmpool.wants"] == ("row",)
    assert (attributes(batch)["lmpool.prompts"], attributes(batch)["lmpool.tokens"]) == (2, 5)
    assert attributes(batch)["lmpool.queue_wait_ms"] >= 0
    assert call.start_time <= batch.start_time < batch.end_time <= call.end_time  # type: ignore[operator]


def test_a_batch_of_several_calls_is_linked_with_each(lm: PooledLM, spans: Spans) -> None:
    threads = [
        threading.Thread(target=lm.sync.next_token_logprobs, args=([2, n],)) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = until(lambda: f if len(f := spans.of("lmpool ask")) == 4 else None)
    batches = spans.of("lmpool batch")
    named = {batch.parent.span_id for batch in batches if batch.parent is not None}
    named |= {link.context.span_id for batch in batches for link in batch.links}
    assert named == {call.context.span_id for call in calls}  # type: ignore[union-attr]


def test_every_way_of_asking_has_one_span(lm: PooledLM, spans: Spans) -> None:
    list(lm.sync.stream([1, 2], 3))
    assert attributes(spans.one("lmpool stream"))["lmpool.wants"] == ("stream",)
    assert len(spans.of("lmpool batch")) >= 1
    spans.clear()
    asks = [Ask([1, n], Top(2)) for n in range(20)]
    assert len(list(lm.sync.ask_iter(asks))) == 20
    assert len(spans.of("lmpool ask_iter")) == 1
    batch = spans.one("lmpool batch")
    assert batch.parent is not None
    assert batch.parent.span_id == spans.one("lmpool ask_iter").context.span_id  # type: ignore[union-attr]


def test_errors_are_called_by_name_and_nothing_that_was_asked_is_told(
    lm: PooledLM, spans: Spans
) -> None:
    with pytest.raises(PromptFailed):
        lm.sync.next_token_logprobs([1, FAILS])
    call = spans.one("lmpool ask")
    assert call.status.status_code is trace.StatusCode.ERROR
    assert attributes(call)["error.type"] == "PromptFailed"
    assert call.status.description is None
    assert not call.events
    spans.one("lmpool batch")  # which ended


def test_what_is_not_sampled_travels_without_a_trace(
    lm: PooledLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = provider(monkeypatch, sampled=0.0)
    lm.sync.next_token_logprobs([5, 6])
    assert spans.of("lmpool ask") == spans.of("lmpool batch") == []


def test_where_nobody_takes_spans_none_are_made(lm: PooledLM) -> None:
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    lm.sync.next_token_logprobs([5, 7])


def test_a_request_is_followed_through_gateway_and_worker(server: RealServer) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    tries = itertools.count(2)

    def sent() -> Collector | None:
        """What both have sent as they ended in order; that is not waited for for long."""
        with Collector() as collector:
            environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
            with (
                worker_process(server.url, "http", environment=environment),
                GatewayProcess(server.url, "http", environment=environment) as gateway,
            ):
                asks = {"model": "http", "prompt": [1, next(tries)], "max_tokens": 1}
                request = urllib.request.Request(
                    f"{gateway.base_url}/v1/completions",
                    json.dumps(asks).encode(),
                    {
                        "Content-Type": "application/json",
                        "traceparent": f"00-{trace_id}-{span_id}-01",
                        "Authorization": f"Bearer {SECRET}",
                    },
                )
                with urllib.request.urlopen(request, timeout=60) as response:
                    assert response.status == 200
        names = {"POST /v1/completions", "lmpool ask", "lmpool batch"}
        return collector if names <= {span.name for _, span in collector.spans} else None

    collector = until(sent, what="all spans to be sent")
    assert collector is not None
    (asked,) = collector.named("POST /v1/completions")
    calls, batches = collector.named("lmpool ask"), collector.named("lmpool batch")
    assert {span.trace_id.hex() for span in (asked, *calls, *batches)} == {trace_id}
    assert asked.parent_span_id.hex() == span_id
    assert {call.parent_span_id for call in calls} == {asked.span_id}
    assert batches
    assert {batch.parent_span_id for batch in batches} <= {call.span_id for call in calls}
    services = {span.name: service for service, span in collector.spans}
    assert services["POST /v1/completions"] == services["lmpool ask"] == "lmpool-gateway"
    assert services["lmpool batch"] == "lmpool-worker"
    assert SECRET not in str(collector.spans)


def test_a_collector_that_is_gone_holds_nobody_up(server: RealServer) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    with (
        worker_process(server.url, "alone", environment=environment) as worker,
        connected(server.url, "alone") as lm,
    ):
        lm.sync.next_token_logprobs([1, 2])
        worker.terminate()
        assert worker.wait(60) == 0
