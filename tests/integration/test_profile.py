"""Profiles of workers: real ones, by py-spy, and what is said where there can be none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmpool.errors import SettingsError
from lmpool.profiling import SUFFIX, profile
from tests.support.clients import connected
from tests.support.launchers import launcher
from tests.support.waiting import until
from tests.support.workers import worker_process

BESIDE = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


@pytest.fixture
def py_spy() -> None:
    if shutil.which("py-spy", path=BESIDE) is None:
        if os.environ.get("LMPOOL_REQUIRE_SERVERS", "") not in ("", "0"):
            pytest.fail("py-spy is not installed")
        pytest.skip("py-spy is not installed: pip install 'lmpool[profile]'")


def read(file: Path) -> tuple[set[str], set[str]]:
    """The threads of a profile, and the files of the code that they were in."""
    found: dict[str, Any] = json.loads(file.read_text())
    threads = {str(each["name"]).partition('"')[2].rstrip('"') for each in found["profiles"]}
    return threads, {frame["file"] for frame in found["shared"]["frames"]}


def is_written(file: Path) -> bool:
    """Whether all of a profile is there: it may be seen in the midst of that."""
    try:
        json.loads(file.read_text())
    except ValueError:
        return False
    return True


def keep_busy(url: str, pool: str, pids: Iterable[int]) -> None:
    """Have each of these workers compute for half a second of its processor's time."""
    workers = [psutil.Process(pid) for pid in pids]

    def used() -> list[float]:
        return [times.user + times.system for times in (w.cpu_times() for w in workers)]

    before = used()
    with connected(url, pool) as lm:
        for run in range(1000):
            lm.batch_next_token_logprobs_sync([[run % 256, run // 256, n] for n in range(200)])
            if all(now - then >= 0.5 for now, then in zip(used(), before, strict=True)):
                return
    raise AssertionError(f"one had nothing to do: {before}, {used()}")


@pytest.mark.one_server
@pytest.mark.usefixtures("py_spy")
def test_each_worker_leaves_a_profile_of_its_threads(
    server_url: str, pool_name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "profiles"
    options = ("--workers", "2", "--lanes", "1", "--profile", str(folder), "--worker-name", "w")
    with launcher(server_url, pool_name, *options) as found:
        pids = found.wait_for_workers(2)
        files = {folder / f"w-{pid}{SUFFIX}" for pid in pids}
        keep_busy(server_url, pool_name, pids)
        found.send(signal.SIGTERM)
        assert found.wait() == 0, found.log
    # They were written before the workers ended.
    assert set(folder.iterdir()) == files
    seen = [read(file) for file in files]
    assert all(threads for threads, _ in seen)
    assert any("lmpool-engine" in threads for threads, _ in seen), seen
    assert any(file.endswith("worker/engine_thread.py") for _, code in seen for file in code)


@pytest.mark.one_server
@pytest.mark.usefixtures("py_spy")
def test_a_worker_that_is_killed_leaves_one_too(
    server_url: str, pool_name: str, tmp_path: Path
) -> None:
    with worker_process(server_url, pool_name, profile=tmp_path, worker_name="w") as worker:
        (file,) = tmp_path.iterdir()
        keep_busy(server_url, pool_name, [worker.pid])
        worker.kill()
        until(lambda: is_written(file), what="the profile to be written", every=0.05)
    threads, code = read(file)
    assert threads
    assert code


def fake(folder: Path, script: str) -> None:
    command = folder / "py-spy"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)


def test_what_py_spy_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "echo Error: Permission Denied; exit 1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SettingsError, match=r"\(Error: Permission Denied\).*SYS_PTRACE"):
        profile(tmp_path / "profiles", "w")
    assert not list((tmp_path / "profiles").iterdir())


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, "exit 1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SettingsError, match="name a folder that can be written to"):
        profile(tmp_path / "py-spy", "w")


def test_without_py_spy_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SettingsError, match=r"pip install 'lmpool\[profile\]'"):
        profile(tmp_path, "w")
