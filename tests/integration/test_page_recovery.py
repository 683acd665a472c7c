"""The live page while a server, a gateway and workers go and come: it says so, and goes on."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Route, expect

from tests.support.browser import chromium, tab
from tests.support.gateways import GatewayProcess
from tests.support.ports import free_port
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import clean_environment, in_process_worker

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.one_server]

PAGE = [sys.executable, "-m", "lmpool", "page"]
WATCH = """
window.states = [];
window.state = document.getElementById("state");
new MutationObserver(() => window.states.push(state.dataset.state))
    .observe(state, { attributes: true });
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def server(server_binary: str) -> Iterator[RealServer]:
    with RealServer(binary=server_binary, tcp=True) as server:
        yield server


def test_a_pool_and_its_workers_come_and_go(browser: Browser, server: RealServer) -> None:
    with (
        GatewayProcess(server.url, "late") as gateway,
        tab(browser, gateway.base_url) as page,
    ):
        page.state("no pool")
        page.shows("#banner", "Nobody has served the pool late yet")
        with in_process_worker(server.url, "late"):
            page.state("serving")
            expect(page["#banner"]).to_be_hidden()
            page.shows("#alive", "1")
        page.state("no workers")
        page.shows("#banner", re.compile(r"No worker is alive since \d\d:\d\d:\d\d"))
        expect(page["#workers-none"]).to_be_visible()
        page["#text"].fill("anyone")
        page.shows("#text-error", "no worker is alive")
        with in_process_worker(server.url, "late"):
            page.state("serving")  # and it is asked anew by itself
            page.shows("#surprise-sum", "bits a token")
            expect(page["#text-error"]).to_be_empty()


def test_what_failed_as_workers_came_is_asked_anew(browser: Browser, server: RealServer) -> None:
    """Its answer may come when the page knows of them already."""

    def refuse(route: Route) -> None:
        route.fulfill(status=503, json={"error": {"message": "no worker is alive"}})

    with (
        in_process_worker(server.url, "came"),
        GatewayProcess(server.url, "came") as gateway,
        tab(browser, gateway.base_url, complains=True) as page,
    ):
        page.state("serving")
        page.page.route("**/live/surprise", refuse, times=1)
        page["#text"].fill("anyone")
        page.shows("#text-error", "no worker is alive")
        page.shows("#surprise-sum", "bits a token")
        expect(page["#text-error"]).to_be_empty()


def test_a_server_that_is_killed_hangs_and_comes_again(
    browser: Browser, server: RealServer
) -> None:
    with (
        in_process_worker(server.url, "kept"),
        GatewayProcess(server.url, "kept") as gateway,
        tab(browser, gateway.base_url) as page,
    ):
        page.state("serving")
        server.kill()
        page.state("no server")
        page.shows("#banner", re.compile(r"The pool's server does not answer since \d\d:\d\d:\d\d"))
        page.shows("#as-of", "as it was at")
        page.shows("#workers-rows", "mock")  # what was known
        server.start()
        page.state("serving")
        expect(page["#banner"]).to_be_hidden()
        server.pause()
        try:
            page.state("no server")
        finally:
            server.resume()
        page.state("serving")


def test_a_gateway_that_is_killed_and_comes_again(browser: Browser, server: RealServer) -> None:
    with (
        in_process_worker(server.url, "kept"),
        # A stream ends with its request's time: the page asks anew, and nobody sees it.
        GatewayProcess(server.url, "kept", options=("--timeout", "3")) as gateway,
        tab(browser, gateway.base_url, complains=True) as page,
    ):
        page.state("serving")
        asked: list[float] = []
        page.page.on("request", lambda request: asked.append(time.monotonic()))
        page.page.evaluate(WATCH)

        def nobody_saw() -> bool:
            """A machine that stands still for long may show itself at times."""
            page.page.evaluate("window.states = [state.dataset.state]")
            before = len(asked)
            until(lambda: page.page.wait_for_timeout(50) or len(asked) > before + 1)
            return set(page.page.evaluate("window.states")) == {"serving"}

        until(nobody_saw)
        gateway.kill()
        page.state("no gateway")
        page.shows("#banner", re.compile(r"The gateway does not answer since \d\d:\d\d:\d\d"))
        gateway.start_again()
        page.state("serving")


def test_a_page_that_nobody_sees_watches_nothing_and_holds_up_no_end(
    browser: Browser, server: RealServer
) -> None:
    with (
        in_process_worker(server.url, "kept"),
        GatewayProcess(server.url, "kept") as gateway,
        tab(browser, gateway.base_url, complains=True) as page,
    ):
        page.state("serving")
        # The stream, and who asks: what else the page has asked for may still be on its way.
        until(lambda: running(gateway) == 2)
        hide = "(how) => { Object.defineProperty(document, 'hidden', {value: how, "
        hide += "configurable: true}); document.dispatchEvent(new Event('visibilitychange')); }"
        page.page.evaluate(hide, True)
        until(lambda: running(gateway) == 1)
        page.page.evaluate(hide, False)
        until(lambda: running(gateway) == 2)
        # An open page holds up no end: its streams end at once.
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(60) == 0
        assert "timeout graceful shutdown exceeded" not in gateway.log(), "a stream was waited for"
        page.state("no gateway")


def running(gateway: GatewayProcess) -> float:
    """Requests that it answers at the moment."""
    metrics = httpx.get(gateway.base_url + "/metrics", timeout=60).text
    name = "lmpool_gateway_requests_running"
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
    assert found is not None, metrics
    return float(found[1])


# --- lmpool page ---------------------------------------------------------------------------------


class PageCommand:
    """``lmpool page`` as a process."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*PAGE, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**clean_environment(), "COLUMNS": "500", **environment},
        )

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> str:
        """Everything that it said, once it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        said, _ = self.process.communicate(timeout=150)
        return said


def test_the_command_shows_a_pool_until_ctrl_c(browser: Browser, server: RealServer) -> None:
    with in_process_worker(server.url, "mine"):
        command = PageCommand("--url", server.url, "--pool", "mine")
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/", command.first_line())
            assert found is not None
            with tab(browser, found[0]) as page:
                page.state("serving")
                page.shows("#pool-name", "mine")
            # The page alone: no API is there.
            assert httpx.get(found[0] + "v1/models", timeout=60).status_code == 404
            assert httpx.get(found[0] + "health", timeout=60).status_code == 200
        finally:
            said = command.close()
        assert command.process.returncode in (0, 130)
        assert "Traceback" not in said


def test_the_command_without_a_server_says_so_on_the_page(browser: Browser) -> None:
    command = PageCommand("--url", f"redis://:secret@127.0.0.1:{free_port()}/0", "--pool", "mine")
    try:
        found = re.search(r"http://\S+/", command.first_line())
        assert found is not None
        with tab(browser, found[0]) as page:
            page.state("no server")
            page.shows("#banner", "Connection refused")
            assert "secret" not in page["body"].inner_text()
    finally:
        assert "secret" not in command.close()


def test_the_command_opens_a_browser(tmp_path: Path) -> None:
    program, told = tmp_path / "browser", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$1" > {told}.new && mv {told}.new {told}\n')
    program.chmod(0o755)
    command = PageCommand("--url", "redis://127.0.0.1:1/0", "--open", BROWSER=str(program))
    try:
        found = re.search(r"http://\S+/", command.first_line())
        assert found is not None
        until(told.exists, what="the browser to be told where")
        assert told.read_text().strip() == found[0]
    finally:
        command.close()


def test_a_port_that_is_taken_is_said_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = PageCommand("--port", str(port))
        said = command.process.communicate(timeout=150)[0]
    assert command.process.returncode == 2
    assert f"port={port}: cannot listen there" in said
    assert "write another port" in said
    assert "Traceback" not in said
