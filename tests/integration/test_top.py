"""`lmpool top` in a terminal, and where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import lmpool
from lmpool.cli import app
from lmpool.errors import PromptFailed
from tests.support.screens import Terminal, unbroken
from tests.support.server import RealServer
from tests.support.waiting import until
from tests.support.workers import clean_environment, in_process_worker

TOP = [sys.executable, "-m", "lmpool", "top", "--every", "0.2"]


@pytest.fixture
def server(server_binary: str) -> Iterator[RealServer]:
    with RealServer(maxmemory="100mb") as server:
        yield server


def terminal(server: RealServer, pool: str, width: int = 100, height: int = 30) -> Terminal:
    environment = {**clean_environment(), "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    return Terminal([*TOP, "--url", server.url, "--pool", pool], width, height, env=environment)


def shows(watched: Terminal, text: str) -> None:
    until(lambda: text in watched.drawn, what=f"{text!r} on\n{watched.drawn}", every=0.05)


def test_a_pool_as_it_changes(server: RealServer, pool_name: str) -> None:
    with terminal(server, pool_name) as watched:
        shows(watched, f"nobody serves a pool {pool_name}")
        with in_process_worker(server.url, pool_name, engine_opts={"fail_token": 200}):
            shows(watched, f" {os.getpid()} │ mock ")
            with lmpool.connect(server.url, pool_name, framework="numpy") as lm:
                lm.sync.batch_next_token_logprobs([[i] for i in range(20)])
                shows(watched, "20 computed")
                with pytest.raises(PromptFailed):
                    lm.sync.next_token_logprobs([200])
            shows(watched, "token 200")
            watched.resize(40, 30)
            shows(watched, f"  {os.uname().nodename}, pid {os.getpid()}"[:30])
            assert max(map(len, watched.drawn.splitlines())) <= 40
        shows(watched, "no worker is alive")
        watched.press("q")
        assert watched.process.wait(60) == 0
        # The terminal is as it was: on its first screen, with a cursor.
        until(lambda: "\x1b[?1049l" in watched.output[-20:], what=repr(watched.output[-40:]))


def test_a_server_that_goes_and_comes_back(server: RealServer, pool_name: str) -> None:
    with in_process_worker(server.url, pool_name), terminal(server, pool_name) as watched:
        shows(watched, "0 computed")
        server.kill()
        shows(watched, "no answer since ")
        shows(watched, "0 computed")
        server.start()
        until(lambda: "no answer since" not in watched.drawn, every=0.05)
        shows(watched, "mock, float32, 256 tokens")
        watched.process.send_signal(signal.SIGINT)
        assert watched.process.wait(60) == 130


def test_whoever_ends_it_gets_the_terminal_back(server: RealServer, pool_name: str) -> None:
    with terminal(server, pool_name) as watched:
        before = watched.modes()
        shows(watched, "nobody serves")
        assert watched.modes() != before
        watched.process.terminate()
        assert watched.process.wait(60) == 143
        until(lambda: "\x1b[?1049l" in watched.output[-20:], what=repr(watched.output[-40:]))
        assert watched.modes() == before


def test_a_server_that_hangs_is_gone_until_it_answers(server: RealServer, pool_name: str) -> None:
    with in_process_worker(server.url, pool_name), terminal(server, pool_name) as watched:
        shows(watched, "0 computed")
        server.pause()
        try:
            shows(watched, "no answer since ")
        finally:
            server.resume()
        until(lambda: "no answer since" not in watched.drawn, every=0.05)


def test_a_server_that_hangs_holds_up_no_key(server: RealServer, pool_name: str) -> None:
    with in_process_worker(server.url, pool_name), terminal(server, pool_name) as watched:
        shows(watched, "0 computed")
        server.pause()
        try:
            watched.press("q")
            assert watched.process.wait(60) == 0
        finally:
            server.resume()


def test_programs_read_a_line_for_each_look(server: RealServer, pool_name: str) -> None:
    with subprocess.Popen(
        [*TOP, "--json", "--url", server.url, "--pool", pool_name],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as watching:
        assert watching.stdout is not None
        lines = map(json.loads, watching.stdout)
        assert next(lines)["model"] is None
        with in_process_worker(server.url, pool_name):
            known = (look for look in lines if look["model"] is not None and look["rates"])
            # Its model may be there before it is.
            served = next(look for look in known if look["statistics"]["workers"])
            assert served["statistics"]["workers"][0]["pid"] == os.getpid()
            assert served["rates"]["computed"] == 0
            server.kill()
            gone = next(look for look in lines if look["error"])
            assert gone["pool"] == pool_name
            assert gone["gone_at"] > 0
            server.start()
            assert next(look for look in lines if not look["error"])["url"] == served["url"]
        watching.send_signal(signal.SIGINT)
        watching.wait(60)  # before its output is closed
    assert watching.returncode == 130


def test_once(server_url: str, pool_name: str) -> None:
    asked = ["top", "--once", "--url", server_url, "--pool", pool_name]
    nobody = CliRunner().invoke(app, asked)
    assert nobody.exit_code == 1
    assert "nobody serves a pool" in nobody.output
    with in_process_worker(server_url, pool_name):
        served = CliRunner().invoke(app, asked)
        assert served.exit_code == 0
        assert pool_name in unbroken(served.stdout.splitlines())
        found = CliRunner().invoke(app, [*asked, "--json"])
        assert json.loads(found.stdout)["model"]["vocab_size"] == 256
    gone = CliRunner().invoke(app, ["top", "--once", "--url", "redis://:geheim@127.0.0.1:1"])
    assert gone.exit_code == 2
    assert "no answer from redis://:***@127.0.0.1:1" in gone.output
