"""However a program with an embedded pool ends, nothing of the pool is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.embedded import assert_nothing_left
from tests.support.processes import runs, wait_until_gone
from tests.support.waiting import until
from tests.support.workers import clean_environment

pytestmark = pytest.mark.usefixtures("server_binary")


class Program:
    """A program that starts an embedded pool and says which processes that takes."""

    def __init__(self, folder: Path, body: str, *, wait: bool = True) -> None:
        self.folder = folder
        code = textwrap.dedent(
            """
            import json, os, signal, sys, time
            import lmpool

            def tell(lm):
                workers = [worker["pid"] for worker in lm.pool_statistics_sync()["workers"]]
                pids = [*lm.processes().values(), *workers]
                print(json.dumps({"pids": pids, "folder": str(lm.folder)}), flush=True)

            def start(**settings):
                print("starting", flush=True)
                lm = lmpool.embedded(engine="mock", workers=2, framework="numpy", **settings)
                tell(lm)
                return lm
            """
        ) + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**clean_environment(), "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A terminal's Ctrl-C reaches the whole group.
            process_group=0,
        )
        assert self.read() == "starting"
        if wait:
            told = json.loads(self.read())
            self.pids: list[int] = told["pids"]
            assert len(self.pids) == 5
            assert all(map(runs, self.pids))

    def read(self) -> str:
        """The next line it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line.rstrip("\n")

    def signal_group(self, number: int) -> None:
        """As a terminal does."""
        os.killpg(self.process.pid, number)

    def end(self, timeout: float = 60.0) -> tuple[int, str]:
        """Its exit status and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


WAIT = "while True: time.sleep(0.1)\n"
"""A signal that comes just before a sleep begins does not end that one."""


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param("lm = start()", 0, id="forgotten"),
        pytest.param("lm = start()\nlm.close()", 0, id="closed"),
        pytest.param("lm = start()\nsys.exit(7)", 7, id="exit"),
        pytest.param("lm = start()\nraise ValueError", 1, id="exception"),
        pytest.param("lm = start()\nos._exit(5)", 5, id="no interpreter exit"),
    ],
)
def test_nothing_is_left_after_a_program_that_ends(
    pool_folder: Path, body: str, status: int
) -> None:
    with Program(pool_folder, body) as program:
        found, errors = program.end()
        assert found == status
        assert ("ValueError" in errors) == (status == 1)
        assert "Exception ignored" not in errors
        wait_until_gone(program.pids)
    assert_nothing_left(pool_folder)


@pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM", "SIGKILL", "SIGHUP"])
@pytest.mark.parametrize("when", ["while it serves", "while it starts"])
def test_nothing_is_left_after_a_signal(pool_folder: Path, ending: str, when: str) -> None:
    body = (
        "with start() as lm:\n    lm.next_token_logprobs_sync([1])\n    print('busy', flush=True)\n"
    )
    starting = when == "while it starts"
    with Program(pool_folder, body + "    " + WAIT, wait=not starting) as program:
        if starting:
            # From the first folder on something could be left.
            until(lambda: list(pool_folder.glob("*/events")), what="a pool that starts")
        else:
            assert program.read() == "busy"
        program.signal_group(signal.Signals[ending])
        status, _ = program.end()
        assert status == -signal.Signals[ending]
        if not starting:
            wait_until_gone(program.pids)
    assert_nothing_left(pool_folder)


def test_nothing_is_left_after_sigkill_under_load(pool_folder: Path) -> None:
    body = """
        lm = start(engine_opts={"delay": 0.05}, batch_size=8)
        print("busy", flush=True)
        lm.batch_next_token_logprobs_sync([[i % 256, i // 256] for i in range(60_000)])
    """
    with Program(pool_folder, body) as program:
        assert program.read() == "busy"
        program.process.kill()
        program.end()
        wait_until_gone(program.pids)
    assert_nothing_left(pool_folder)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_use_the_pool_and_does_not_own_it(pool_folder: Path) -> None:
    body = """
        lm = start()
        lm.next_token_logprobs_sync([1])
        child = os.fork()
        if child == 0:
            lm.next_token_logprobs_sync([2])
            lm.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        lm.next_token_logprobs_sync([3])
        child = os.fork()
        if child == 0:
            os.close(1), os.close(2)
            time.sleep(600)  # and still holds what it has inherited
        print(child, flush=True)
        time.sleep(600)
    """
    with Program(pool_folder, body) as program:
        child = int(program.read())
        try:
            program.process.kill()
            program.end()
            wait_until_gone(program.pids)
            assert runs(child)
        finally:
            os.kill(child, signal.SIGKILL)
            wait_until_gone([child])
    assert_nothing_left(pool_folder)
