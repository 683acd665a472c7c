"""What processes count, and the small server that offers it."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram

from lmpool.counters import SECONDS, SIZES, Worker
from lmpool.errors import SettingsError
from lmpool.monitoring import server as server_module
from lmpool.monitoring.families import family, merged
from lmpool.monitoring.server import MOST, MonitoringServer, Readiness, application
from lmpool.monitoring.spread import Spread
from tests.support import logged
from tests.support.ports import free_port
from tests.support.scrape import Scrape, get, status
from tests.support.waiting import until

HERE = "127.0.0.1"


@given(
    st.sampled_from([SECONDS, SIZES]),
    st.lists(st.floats(0, 2000) | st.sampled_from([*SECONDS, *SIZES])),
)
def test_values_are_counted_as_prometheus_counts_them(
    bounds: tuple[float, ...], values: list[float]
) -> None:
    at_once, one_by_one = Spread(bounds), Spread(bounds)
    registry = CollectorRegistry()
    theirs = Histogram("h", "h", buckets=bounds, registry=registry)
    at_once.add_all(values)
    for value in values:
        one_by_one.add(value)
        theirs.observe(value)
    (found,) = registry.collect()
    expected = [s.value for s in found.samples if s.name == "h_bucket"]
    assert [count for _, count in at_once.cumulated()] == expected
    assert at_once.counts == one_by_one.counts
    assert at_once.total == pytest.approx(sum(values))


def test_families_of_one_name_are_told_as_one() -> None:
    found = merged(
        family(Worker.ANSWERS, {"pool": pool, "model_name": "m"}, {"row": number})
        for number, pool in enumerate("ab")
    )
    assert len(found) == 1
    assert [(s.labels["pool"], s.labels["want"], s.value) for s in found[0].samples] == [
        ("a", "row", 0.0),
        ("b", "row", 1.0),
    ]


class Process:
    """A process that is looked at."""

    def __init__(self) -> None:
        self.ready = Readiness(True, {"status": "ready"})
        self.registry = CollectorRegistry()
        Gauge("answer", "It.", registry=self.registry).set(42)
        self.app = application(self.registry, lambda: self.ready)

    def server(self, port: int = 0) -> MonitoringServer:
        return MonitoringServer(self.app, HERE, port)


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def port(process: Process) -> Iterator[int]:
    server = process.server()
    server.start()
    assert server.port
    yield server.port
    server.close()


def test_the_three_paths(process: Process, port: int) -> None:
    assert Scrape(port).value("answer") == 42
    assert status(port, "/health") == (200, {"status": "ok"})
    assert status(port) == (200, {"status": "ready"})
    process.ready = Readiness(False, {"status": "starting", "stage": "weights"})
    assert status(port) == (503, {"status": "starting", "stage": "weights"})
    assert status(port, "/health")[0] == 200


def test_what_is_no_look_is_refused(port: int) -> None:
    assert get(port, "/nowhere")[0] == 404
    assert get(port, "/metrics", "POST")[0] == 405
    assert get(port, "/ready", "HEAD") == (200, b"")


def test_who_says_nothing_keeps_nobody_from_looking(port: int) -> None:
    silent = [socket.create_connection((HERE, port)) for _ in range(2 * MOST)]
    try:
        for each in silent:
            each.send(b"G")
        assert Scrape(port).value("answer") == 42
        silent[0].settimeout(10)
        assert silent[0].recv(1) == b"", "the oldest of more than MOST are hung up on"
    finally:
        for each in silent:
            each.close()


def test_a_byte_now_and_then_is_no_request(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TAKES", 0.3)
    with socket.create_connection((HERE, port)) as slow:
        slow.settimeout(0.05)

        def is_hung_up() -> bool:
            try:
                slow.send(b"x")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(is_hung_up, what="the slow one to be hung up on", every=0.05)
    monkeypatch.undo()  # a scrape may take longer
    assert Scrape(port).value("answer") == 42


def test_where_no_thread_is_left_others_are_answered_later(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    refused: list[int] = []

    def fails(thread: threading.Thread) -> None:
        if len(refused) < 2 * MOST and thread.name.startswith("Thread"):
            refused.append(1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    for _ in range(2 * MOST):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            get(port, "/health")
    assert Scrape(port).value("answer") == 42


def test_the_silent_are_hung_up_on(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.2)
    with socket.create_connection((HERE, port)) as silent:
        silent.settimeout(10)
        silent.send(b"GET /met")
        assert silent.recv(1) == b""


def test_a_port_that_is_taken_is_said_and_waited_for(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "TRY_AGAIN", 0.05)
    taken = free_port()
    with socket.socket() as other:
        other.bind((HERE, taken))
        other.listen()
        server = process.server(taken)
        with caplog.at_level(logging.INFO, "lmpool"):
            server.start()
        assert server.port is None
        (said,) = logged.messages(caplog)
        assert f"port={taken}" in said
        assert "stop what does, or write another port" in said
        time.sleep(0.2)
        assert server.port is None
    until(lambda: server.port == taken, what="the port to be taken")
    assert Scrape(taken).value("answer") == 42
    assert len([r for r in logged.records(caplog) if r.levelno >= logging.WARNING]) == 1, (
        "said once"
    )
    server.close()


def test_who_wants_the_port_at_once_is_told(process: Process) -> None:
    with socket.create_server((HERE, 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"port={taken}: cannot listen there"):
            process.server(taken).listen()
    with pytest.raises(SettingsError, match=r"host=.nowhere\.invalid."):
        MonitoringServer(process.app, "nowhere.invalid", 0).listen()


def test_it_ends_at_once_whether_it_listens_or_waits(process: Process) -> None:
    server = process.server()
    server.start()
    port = server.port
    assert port
    server.close()
    assert status(port) == (0, {})
    with socket.create_server((HERE, 0)) as other:
        waiting = process.server(other.getsockname()[1])
        waiting.start()
        waiting.close()
    assert not any(thread.name == "lmpool-monitoring" for thread in threading.enumerate())
