"""What being seen costs: a pool with metrics, and one with traces, beside one with neither."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from tests.benchmarks.asking import Ask, gathered, in_batches, timed
from tests.benchmarks.machine import Bystanders, facts
from tests.benchmarks.measure import Measured, Report, Scale, alternate, ratio
from tests.benchmarks.pool import Cpu, Pool, make_prompts, serving
from tests.support.ports import free_port
from tests.support.scrape import get
from tests.support.server import RealServer

NAME = "observed"
LINE = "processor time of jobs with metrics, and with traces of 1 % of the calls, against neither"

VOCAB_SIZE = 256
PER_CALL = 5_000
LARGE_BATCH = 512
SAMPLED = 0.01
SCRAPE_EVERY = 1.0

Sample = tuple[float, Cpu]


class _Nobody(BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _collector() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Nobody)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Somebody scrapes, fifteen times as often as Prometheus does by default."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(SCRAPE_EVERY):
            get(port, "/metrics")

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Traced:
    """This process's calls are traced, one in a hundred, while it is entered."""

    def __init__(self, url: str) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(SAMPLED)), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(f"{url}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))

    def __enter__(self) -> None:
        # OpenTelemetry lets a program set one for good; here sides take turns.
        trace._TRACER_PROVIDER = self._provider

    def __exit__(self, *error: object) -> None:
        trace._TRACER_PROVIDER = None

    def close(self) -> None:
        self._provider.shutdown()


def measure(scale: Scale) -> Report:
    """Alternate between the three."""
    jobs = scale.of(20_000, 2_000)
    port, watch = free_port(), Bystanders()
    with ExitStack() as stack:
        server = stack.enter_context(RealServer())
        url = stack.enter_context(_collector())
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}

        def pool(name: str, **settings: Any) -> Pool:
            return stack.enter_context(
                serving(server, name, VOCAB_SIZE, batch_size=LARGE_BATCH, **settings)
            )

        plain, seen = pool("plain"), pool("seen", metrics_port=port)
        followed = pool("followed", environment=environment)
        traced = Traced(url)
        stack.callback(traced.close)
        found = facts(server.url)

        def ours(pool: Pool, ask: Ask, salt: int) -> Callable[[int], Sample]:
            return lambda run: timed(
                pool, ask, make_prompts(jobs, VOCAB_SIZE, run, salt), PER_CALL, VOCAB_SIZE
            )

        def with_traces(run: int) -> Sample:
            with traced:
                return ours(followed, gathered, 5)(run)

        with _scraped(port):
            taken = alternate(
                {
                    "batch calls, neither": ours(plain, in_batches, 1),
                    "batch calls, metrics": ours(seen, in_batches, 2),
                    "gathered calls, neither": ours(plain, gathered, 3),
                    "gathered calls, metrics": ours(seen, gathered, 4),
                    "gathered calls, traces of 1 %": with_traces,
                },
                scale.runs,
            )
    report = Report(NAME, f"Rows of {VOCAB_SIZE} float32, prompts of 32 tokens, one worker")
    spent = {name: tuple(cpu.total for _, cpu in samples) for name, samples in taken.items()}
    for name, values in spent.items():
        report.add("Processor time of all three", Measured(name, "us/job", values))
    for kind, what, most in (
        ("batch calls", "metrics", 1.04),
        ("gathered calls", "metrics", 1.04),
        ("gathered calls", "traces of 1 %", 1.10),
    ):
        above, below = spent[f"{kind}, {what}"], spent[f"{kind}, neither"]
        report.add("Ratios", ratio(f"{kind}: {what} / neither", above, below, at_most=most))
    report.note(f"metrics: a scrape a second, of {jobs:,} jobs a run; traces: sent to a collector")
    report.note("the cost of being able to, disabled: python -m tests.benchmarks.pairs")
    report.facts = {**found, **watch.report()}
    return report
