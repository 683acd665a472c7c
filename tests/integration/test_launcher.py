"""``lmpool worker``: one process for each place, started again when it dies."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmpool.errors import ClientClosed
from lmpool.insistence import Insistence
from lmpool.worker import launcher as launcher_module
from lmpool.worker.launcher import Backoff, Launcher
from lmpool.worker.placement import Placement
from tests.support.clients import connected
from tests.support.freezing import freeze
from tests.support.gate import Gate
from tests.support.launchers import launcher
from tests.support.pools import Asking
from tests.support.processes import runs, wait_until_gone
from tests.support.waiting import until
from tests.support.workers import clean_environment, living_workers, worker_process

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux system call")


# --- real workers --------------------------------------------------------------------------------


def test_workers_serve_and_leave_in_order(server_url: str, pool_name: str) -> None:
    with launcher(server_url, pool_name, "--workers", "2", "--batch-size", "5") as found:
        pids = found.wait_for_workers(2)
        assert list(pids.values()) == ["", ""]
        with connected(server_url, pool_name) as lm:
            lm.batch_next_token_logprobs_sync([[1, i] for i in range(50)])
            statistics = lm.pool_statistics_sync()
            assert statistics["computed"] / statistics["batches"] <= 5
        found.send(signal.SIGTERM)
        assert found.wait() == 0
        wait_until_gone(pids)
        assert not living_workers(server_url, pool_name)
        assert "[worker 1] " in found.log
        assert "[worker 2] " in found.log


def test_a_worker_that_dies_is_replaced(server_url: str, pool_name: str) -> None:
    with launcher(server_url, pool_name, "--workers", "2") as found:
        before = found.wait_for_workers(2)
        victim, other = sorted(before)
        os.kill(victim, signal.SIGKILL)
        after = found.wait_for_workers(2, without=[victim])
        assert other in after
        assert f"(pid {victim}) was ended by SIGKILL" in found.log


def test_a_pool_outlives_its_working_directory(server_url: str, pool_name: str) -> None:
    """As where a deploy puts another one in its place."""
    with launcher(server_url, pool_name) as found:
        (first,) = found.wait_for_workers(1)
        found.cwd.rmdir()
        os.kill(first, signal.SIGKILL)
        gone = (
            f"cannot be started ([Errno 2] No such file or directory: '{found.cwd}'): tried again"
        )
        until(lambda: gone in found.log, what="it to be told")
        assert "Traceback" not in found.log
        found.cwd.mkdir()
        found.wait_for_workers(1, without=[first])
        with connected(server_url, pool_name) as lm:
            assert len(lm.next_token_logprobs_sync([1])) == 256


@pytest.mark.one_server
def test_each_gpu_has_a_worker(server_url: str, pool_name: str) -> None:
    # The mock engine needs no GPU: these are the workers' variables.
    with launcher(server_url, pool_name, "--gpus", "3,5+6") as found:
        assert sorted(found.wait_for_workers(2).values()) == ["3", "5,6"]


@pytest.mark.one_server
def test_settings_come_from_options_and_variables(server_url: str, pool_name: str) -> None:
    options = ["--engine-opts", '{"vocab_size": 300}', "--worker-name", "anna"]
    with launcher(server_url, pool_name, *options, LMPOOL_MAX_PROMPT_TOKENS="77") as found:
        found.wait_for_workers(1)
        with connected(server_url, pool_name) as lm:
            assert (lm.info.vocab_size, lm.info.max_prompt_tokens) == (300, 77)
            assert lm.pool_statistics_sync()["workers"][0]["id"].startswith("anna-")
        assert "[worker 1]" not in found.log  # a single one has the terminal to itself


@pytest.mark.one_server
def test_a_worker_that_was_told_to_leave_stays_away(server_url: str, pool_name: str) -> None:
    with launcher(server_url, pool_name, "--workers", "2") as found:
        first, second = found.wait_for_workers(2)
        os.kill(first, signal.SIGTERM)
        until(lambda: "was told to leave" in found.log, what="it to be noticed")
        assert runs(second)
        os.kill(second, signal.SIGTERM)
        assert found.wait() == 0


@pytest.mark.one_server
def test_refused_workers_end_it_with_the_reason(server_url: str, pool_name: str) -> None:
    with (
        worker_process(server_url, pool_name, engine_opts={"vocab_size": 300}),
        launcher(server_url, pool_name, "--workers", "2") as found,
    ):
        assert found.wait() == 78
        assert "vocab_size 300 there, 256 here" in found.log
        assert "Traceback" not in found.log
        assert found.log.count("is not started again") == 2


def test_a_server_that_is_not_there_is_tried_again(pool_name: str, tmp_path: Path) -> None:
    with launcher(f"unix://{tmp_path}/nobody", pool_name) as found:
        until(lambda: "waiting for the server, 60 s" in found.log, what="it to be tried")
        found.send(signal.SIGTERM)
        assert found.wait() == 0
        assert "Traceback" not in found.log


@pytest.mark.one_server
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGHUP])
def test_it_drains_on_other_signals_too(
    server_url: str, pool_name: str, told: signal.Signals
) -> None:
    with launcher(server_url, pool_name) as found:
        pids = found.wait_for_workers(1)
        found.send(told)
        assert found.wait() == 0
        wait_until_gone(pids)


@pytest.mark.one_server
def test_under_nohup_it_outlives_its_terminal(server_url: str, pool_name: str) -> None:
    with launcher(server_url, pool_name, nohup=True) as found:
        pids = found.wait_for_workers(1)
        found.send(signal.SIGHUP)
        found.send(signal.SIGTERM)
        assert found.wait() == 0
        wait_until_gone(pids)
        assert "SIGHUP" not in found.log
        assert "SIGTERM: the workers finish" in found.log


@pytest.mark.one_server
def test_a_second_signal_hastens(server_url: str, pool_name: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    held = gate.settings()
    options = ["--engine", held["engine"], "--engine-opts", json.dumps(held["engine_opts"])]
    with launcher(server_url, pool_name, *options, **held["environment"]) as found:
        pids = found.wait_for_workers(1)
        with connected(server_url, pool_name) as lm:
            asking = Asking(lm, [[1]])
            gate.wait_for_batch()  # which never ends
        with pytest.raises(ClientClosed):
            asking.rows()
        started = time.monotonic()

        def ended() -> bool:
            found.send(signal.SIGINT)
            return found.process.poll() is not None

        until(ended, what="a signal to be another one than the first")
        assert "a second signal" in found.log
        assert found.wait() == 1
        assert time.monotonic() - started < 100
        wait_until_gone(pids)


@pytest.mark.one_server
def test_a_frozen_worker_is_killed_in_the_end(server_url: str, pool_name: str) -> None:
    with launcher(server_url, pool_name, "--drain-timeout", "0.5") as found:
        pids = found.wait_for_workers(1)
        freeze(next(iter(pids)))
        found.send(signal.SIGTERM)
        assert found.wait() == 1
        wait_until_gone(pids)


@pytest.mark.one_server
@LINUX
def test_workers_do_not_outlive_a_killed_launcher(server_url: str, pool_name: str) -> None:
    with launcher(server_url, pool_name, "--workers", "2") as found:
        pids = found.wait_for_workers(2)
        found.send(signal.SIGKILL)
        found.wait()
        wait_until_gone(pids)
        assert not living_workers(server_url, pool_name)  # they have left in order


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch-size", "0"], "batch_size='0'"),
        (["--engine-opts", "{x"], "write JSON"),
        (["--gpus", "0,x"], "'x' is no GPU"),
        (["--gpus", "0", "--workers", "2"], "write one of them"),
        (["--workers", "0"], "workers=0"),
        (["--dtype", "int3"], "dtype='int3'"),
        (["--timeout", "nan"], "timeout='nan'"),
    ],
)
def test_nonsense_is_refused_before_anything_is_started(
    pool_name: str, tmp_path: Path, options: list[str], said: str
) -> None:
    events = tmp_path / "events"
    with launcher("redis://u:secret@h:1", pool_name, *options, "--events", str(events)) as found:
        assert found.wait() == 78
        lines = found.log.strip().splitlines()
        assert len(lines) == 1, found.log
        assert lines[0].startswith("error: ")
        assert said in lines[0]
        assert "secret" not in found.log
        assert not events.exists()


def test_a_variable_that_nothing_reads_is_refused(pool_name: str) -> None:
    with launcher("redis://localhost", pool_name, LMPOOL_BATCHSIZE="3") as found:
        assert found.wait() == 78
        assert "did you mean LMPOOL_BATCH_SIZE?" in found.log


# --- programs in place of workers ----------------------------------------------------------------


def run_launcher(
    code: str, tmp_path: Path, count: int = 1, drain_timeout: float = 5.0
) -> tuple[int, list[dict[str, Any]]]:
    """Run Python code in place of workers; the exit status, and what was reported."""
    events = tmp_path / "events"
    found = Launcher(
        placements=[
            Placement(f"place {number}", {"PLACE": str(number)}) for number in range(count)
        ],
        environment={"FOLDER": str(tmp_path)},
        drain_timeout=drain_timeout,
        events=events,
        command=[sys.executable, "-I", "-S", "-c", code],
        new_backoff=lambda: Backoff(first=0.01, most=0.05),
    )
    status = asyncio.run(found.run())
    reported = [json.loads(line) for line in events.read_text().splitlines()]
    return status, reported


DIES_TWICE = """
import os, sys
path = os.environ["FOLDER"] + "/lives" + os.environ["PLACE"]
with open(path, "ab") as lives:
    lives.write(b".")
sys.exit(3 if os.path.getsize(path) < 3 else int(os.environ["PLACE"]) and 78)
"""


def test_it_is_tried_until_it_lives(tmp_path: Path) -> None:
    status, reported = run_launcher(DIES_TWICE, tmp_path)
    assert status == 0
    assert [event.get("status") for event in reported] == [None, 3, None, 3, None, 0]


def assert_each_was_kept(reported: list[dict[str, Any]]) -> None:
    """Both places of `DIES_TWICE` had one life after another."""
    for place, last in (("place 0", 0), ("place 1", 78)):
        mine = [event for event in reported if event["placement"] == place]
        assert [event.get("status") for event in mine] == [None, 3, None, 3, None, last]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_one_that_cannot_be_started_for_now_is_tried_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends no others."""
    start, failed = launcher_module.Popen, []

    def fail_once(*words: Any, **options: Any) -> Any:
        lives = tmp_path / "lives0"
        if options["env"]["PLACE"] == "0" and lives.exists() and not failed:
            failed.append(number)
            raise OSError(number, os.strerror(number))
        return start(*words, **options)

    monkeypatch.setattr(launcher_module, "Popen", fail_once)
    status, reported = run_launcher(DIES_TWICE, tmp_path, count=2)
    assert (status, failed) == (78, [number])
    assert_each_was_kept(reported)


def test_where_no_thread_can_be_started_workers_are_watched_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a descriptor be had for each: one that runs by then would be forgotten."""

    def refuse_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def refuse_descriptor(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    monkeypatch.setattr(os, "pidfd_open", refuse_descriptor, raising=False)
    status, reported = run_launcher(DIES_TWICE, tmp_path, count=2)
    assert status == 78
    assert_each_was_kept(reported)


def test_what_cannot_be_reported_ends_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor starts another one beside it."""
    write, failed = Path.open, []

    def fail_at_first(path: Path, *how: Any, **options: Any) -> Any:
        if path.name == "events" and how == ("ab",) and len(failed) < 2:
            failed.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return write(path, *how, **options)

    monkeypatch.setattr(Path, "open", fail_at_first)
    status, reported = run_launcher(DIES_TWICE, tmp_path)
    assert (status, len(failed)) == (0, 2)
    assert [event.get("status") for event in reported] == [None, 3, None, 0]
    assert caplog.text.count("cannot be reported: [Errno 24]") == 2


def test_one_that_can_never_be_started_ends_the_launcher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Launcher([Placement("place", {})], {}, 5.0, command=[str(tmp_path / "nothing")])
    assert asyncio.run(found.run()) == 78
    said = (
        f"place cannot be started: [Errno 2] No such file or directory: '{tmp_path}/nothing': see"
    )
    assert said in caplog.text


REMOVED_ONCE = """#!/bin/sh
if [ -e "$FOLDER/new" ]; then exit 0; fi
mv "$FOLDER/program" "$FOLDER/new"
exit 3
"""


def test_a_program_that_a_deploy_replaces_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the virtual environment is removed and made anew under a launcher that runs."""
    program = tmp_path / "program"
    program.write_text(REMOVED_ONCE)
    program.chmod(0o755)
    tries: list[float] = []

    def put_back() -> float:
        tries.append(time.monotonic())
        if len(tries) == 3:  # after its death, and one try in vain
            shutil.copy(tmp_path / "new", program)
        return 0.0

    found = Launcher(
        [Placement("place", {})], {"FOLDER": str(tmp_path)}, 5.0, command=[str(program)],
        new_backoff=lambda: Backoff(first=0.01, most=0.05, jitter=put_back),
    )  # fmt: skip
    assert asyncio.run(found.run()) == 0
    gone = f"place cannot be started ([Errno 2] No such file or directory: '{program}'): tried"
    assert caplog.text.count(gone) == 2


def test_workers_start_where_the_name_of_the_folder_leads_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a deploy moves the symbolic link ``current`` on to a new release."""
    current = tmp_path / "current"
    for release in ("old", "new"):
        (tmp_path / release).mkdir()
    current.symlink_to("old")
    monkeypatch.chdir(current)
    monkeypatch.setenv("PWD", str(current))  # as shells do
    moves_on = """
import os, sys
here = os.path.basename(os.getcwd())
os.unlink("../current")
os.symlink("new", "../current")
sys.exit(0 if here == "new" else 3)
"""
    status, reported = run_launcher(moves_on, tmp_path)
    assert status == 0
    assert [event.get("status") for event in reported] == [None, 3, None, 0]


@pytest.mark.parametrize("named", ["", "current", "/", "/nothing"])
def test_a_name_that_is_not_that_of_the_folder_is_none(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a program has changed its folder and not the variable."""
    (tmp_path / "current").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", named)
    assert launcher_module.named_folder() == str(tmp_path.resolve())


TOLD_AS_IT_ENDS = """
import functools, os, signal, sys
from lmpool.worker import launcher
program = [sys.executable, "-I", "-S", "-c", ""]
launcher.Launcher = functools.partial(launcher.Launcher, command=program)
status = launcher.launch({"engine": "mock"})
for told in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), told)
sys.exit(status)
"""


def test_a_signal_that_comes_as_it_ends_is_no_death(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TOLD_AS_IT_ENDS],
        env=clean_environment(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_signals_that_come_together_are_one(tmp_path: Path) -> None:
    """As `timeout` tells a process, and then its group: that is no impatience."""
    now, killed = [100.0], []

    class Watched(Launcher):
        def _kill(self, why: str) -> None:
            killed.append((now[0], why))

    async def told_at(*times: float) -> None:
        found = Watched([], {}, 5.0, insistence=Insistence(lambda: now[0]))
        assert await found.run() == 0  # it has no place
        for now[0] in times:
            found._stop(signal.SIGTERM)

    asyncio.run(told_at(100.0, 100.0, 100.49))
    assert killed == []
    asyncio.run(told_at(100.0, 100.0, 100.5))
    assert killed == [(100.5, "told to stop a second time")]


def test_a_refusal_ends_one_place_and_not_the_others(tmp_path: Path) -> None:
    status, reported = run_launcher(DIES_TWICE, tmp_path, count=2)
    assert status == 78
    assert_each_was_kept(reported)


LEAVES_A_CHILD = """
import os, signal, time
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
with open(os.environ["FOLDER"] + "/child", "w") as file:
    file.write(str(child))
os._exit(0)
"""


def test_what_a_worker_leaves_behind_is_killed(tmp_path: Path) -> None:
    started = time.monotonic()
    status, _ = run_launcher(LEAVES_A_CHILD, tmp_path, count=2)
    assert status == 0
    assert time.monotonic() - started < 100  # though the child holds the worker's stdout
    wait_until_gone([int((tmp_path / "child").read_text())])


def test_lines_are_told_apart_and_kept_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os, sys; n = os.environ['PLACE']; sys.stdout.write('out' + n + '\\n');"
        "sys.stdout.flush(); sys.stderr.write('x' * 100_000 + n + '\\nno end of line' + n)"
    )
    status, _ = run_launcher(code, tmp_path, count=2)
    assert status == 0
    lines = capfd.readouterr().err.splitlines()
    for number in "01":
        prefix = f"[place {number}] "
        mine = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert mine[0] == f"out{number}"
        assert mine[-1] == f"no end of line{number}"
        assert "".join(mine[1:-1]) == "x" * 100_000 + number
