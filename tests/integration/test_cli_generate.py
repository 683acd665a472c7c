"""``lmpool generate``, as those who type it see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lmpool.cli import app
from lmpool.cli.terminal import printable
from tests.support.server import RealServer
from tests.support.streams import continuation
from tests.support.waiting import until
from tests.support.workers import clean_environment, in_process_worker

TEXT = "hello"
IDS = [*TEXT.encode()]


def generate(*arguments: str) -> Result:
    """Run it in this process."""
    return CliRunner().invoke(app, ["generate", *arguments])


@pytest.fixture
def served(server_url: str, pool_name: str) -> Iterator[list[str]]:
    """The options that name a pool with one worker of the mock engine, whose tokens are bytes."""
    with in_process_worker(server_url, pool_name):
        yield ["--url", server_url, "--pool", pool_name]


def drawn(count: int, seed: int) -> tuple[list[int], str]:
    """What the mock engine draws, and its text; the last id of its vocabulary ends it."""
    ids = continuation(IDS, count, seed)
    if 255 in ids:
        ids = ids[: ids.index(255) + 1]
    return ids, bytes(i for i in ids if i != 255).decode("utf-8", "replace")


def test_it_shows_the_text(served: list[str]) -> None:
    ids, text = drawn(40, 3)
    shown = generate(TEXT, "-n", "40", "--seed", "3", *served)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == printable(text) + "\n"

    found = json.loads(generate(TEXT, "-n", "40", "--seed", "3", "--json", *served).stdout)
    reason = "eos" if ids[-1] == 255 else "length"
    assert found == {"text": text, "token_ids": ids, "finish_reason": reason}


def test_it_ends_before_a_stop_text(served: list[str]) -> None:
    _, text = drawn(40, 3)
    options = ["-n", "40", "--seed", "3", "--json", *served]
    for stop in (text[6], text[7:9], text[9:12]):
        arguments = [part for other in ("never", stop) for part in ("--stop", other)]
        found = json.loads(generate(TEXT, *arguments, *options).stdout)
        assert found["text"] == text[: text.index(stop)]
        assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--top-k", "-3"], "top_k"),
        (["--min-p", "2"], "min_p"),
        (["--max-tokens", "-1"], "--max-tokens"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--stop", ""], "--stop ''"),
        (["--lora", "nobody"], "nobody"),
        (["--timeout", "0"], "--timeout"),
    ],
)
def test_nonsense_is_refused(served: list[str], arguments: list[str], said: str) -> None:
    refused = generate(TEXT, *arguments, *served)
    assert refused.exit_code == 2
    assert said in refused.output
    assert "Traceback" not in refused.output


def test_it_shows_each_token_as_it_is_drawn_and_ends_at_once(
    server_binary: str, pool_name: str
) -> None:
    with (
        RealServer(binary=server_binary, tcp=True) as server,
        in_process_worker(server.url, pool_name, engine_opts={"delay": 0.05}) as worker,
    ):
        process: Any = subprocess.Popen(
            [sys.executable, "-m", "lmpool", "generate", TEXT, "-n", "4000", "--seed", "1",
             "--url", server.url, "--pool", pool_name],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment(),
        )  # fmt: skip
        try:
            assert process.stdout.read(3)
            assert process.poll() is None
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(60) == 130
            engine = worker.service.engine
            assert engine is not None
            until(lambda: not engine.in_flight(), what="the engine to be idle")
        finally:
            process.kill()
            process.communicate()
