"""Embedded pools: what they serve, and that nothing of them is left behind, however they end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import redis

import lmpool
from lmpool.backends.mock import mock_row
from lmpool.errors import ClientClosed, PoolError, PoolTimeout, SettingsError
from lmpool.producer.embedded import EmbeddedLM, private_pool, private_server
from tests.support.processes import runs, short_folder, users_of, wait_until_gone
from tests.support.waiting import until
from tests.support.workers import clean_environment

pytestmark = pytest.mark.usefixtures("server_binary")

MOCK: dict[str, Any] = {"engine": "mock", "framework": "numpy"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's pools put their folders. At the end nothing is there, and nobody.

    `tmp_path`, which must not come to lie there, is made first.
    """
    with short_folder() as short:
        monkeypatch.setattr(tempfile, "tempdir", str(short))
        monkeypatch.setenv("TMPDIR", str(short))
        yield short
        assert_nothing_left(short)


def assert_nothing_left(folder: Path) -> None:
    until(lambda: not users_of(folder), 20, what=f"nobody to use {folder}", every=0.05)
    # torch leaves a folder of its own.
    until(lambda: not list(folder.glob("lmpool*")), 5, what=f"{folder} to be empty")


def processes(lm: EmbeddedLM) -> set[int]:
    """Every process of the pool: reaper, server, launcher, workers."""
    workers = {worker["pid"] for worker in lm.pool_statistics_sync()["workers"]}
    return {*lm.processes().values(), *workers}


# --- what it serves ------------------------------------------------------------------------------


def test_it_serves_from_processes_of_its_own(folder: Path, pool_name: str) -> None:
    with lmpool.embedded(
        "tiny", "mock", workers=2, pool=pool_name, framework="numpy", batch_size=3
    ) as lm:
        row = lm.next_token_logprobs_sync([1, 5, 9])
        np.testing.assert_array_equal(row, mock_row([1, 5, 9], 256))
        found = lm.pool_statistics_sync()["workers"]
        pids = processes(lm)
        assert len(found) == 2
        assert len(pids) == 5
        assert all(map(runs, pids))
        assert os.getpid() not in pids
        assert lm.pool == pool_name
        # Both kinds of settings reached whom they are for.
        lm.batch_next_token_logprobs_sync([[i, i] for i in range(100)])
        statistics = lm.pool_statistics_sync()
        assert statistics["computed"] / statistics["batches"] <= 3
        assert lm.options.framework == "numpy"
        assert lm.folder.parent == folder
        assert "serves tiny" in lm.worker_log.read_text()
    wait_until_gone(pids, timeout=1)  # close() has waited for it
    assert list(folder.iterdir()) == []
    with pytest.raises(ClientClosed):
        lm.next_token_logprobs_sync([1])
    lm.close()  # once more, for nothing


def test_nobody_else_reaches_its_server(folder: Path) -> None:
    with lmpool.embedded(**MOCK) as lm:
        assert lm.url.startswith("unix://")
        assert stat.S_IMODE(lm.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((lm.folder / "server.sock").stat().st_mode) == 0o700
        with redis.Redis.from_url(lm.url) as server:
            configuration = server.config_get("*")
        assert configuration["port"] == "0"
        assert configuration["save"] == ""
        assert configuration["appendonly"] == "no"
        assert configuration["protected-mode"] == "yes"
        assert int(configuration["maxmemory"]) > 0


def test_where_no_socket_can_be_had_it_is_a_port_with_a_password(folder: Path) -> None:
    long = folder / ("x" * 100)
    long.mkdir()
    tempfile.tempdir = str(long)
    with lmpool.embedded(**MOCK) as lm:
        assert lm.url.startswith("redis://:")
        np.testing.assert_array_equal(lm.next_token_logprobs_sync([3]), mock_row([3], 256))
        port = redis.connection.parse_url(lm.url)["port"]
        with (
            redis.Redis(port=port) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()
        password = redis.connection.parse_url(lm.url)["password"]
        assert password not in repr(lm)
        for pid in processes(lm):
            assert password not in " ".join(psutil.Process(pid).cmdline())
    long.rmdir()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


async def _one_row(lm: EmbeddedLM) -> np.ndarray[Any, Any]:
    async with lm:
        found: np.ndarray[Any, Any] = await lm.next_token_logprobs([7, 7])
        return found


def test_it_is_an_async_context_manager(folder: Path) -> None:
    lm = lmpool.embedded(**MOCK)
    row = asyncio.run(_one_row(lm))
    np.testing.assert_array_equal(row, mock_row([7, 7], 256))
    assert list(folder.iterdir()) == []


def test_two_pools_of_one_process_are_two(folder: Path) -> None:
    with (
        lmpool.embedded(**MOCK, pool="a") as a,
        lmpool.embedded(**MOCK, pool="a", engine_opts={"vocab_size": 300}) as b,
    ):
        assert a.url != b.url
        assert (a.info.vocab_size, b.info.vocab_size) == (256, 300)
        a.close()
        assert len(b.next_token_logprobs_sync([1])) == 300


def test_it_shows_what_the_workers_say_if_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lmpool.embedded(**MOCK, log_level="info"):
        pass
    shown = capsys.readouterr().err
    assert "serves tiny" in shown
    assert "left the pool" in shown  # to the end


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_sise": 3}, "did you mean batch_size?"),
        ({"cache_byte": 3}, "did you mean cache_bytes?"),
        ({"nonsense": 3}, "there are"),
        ({"url": "redis://localhost"}, "lmpool.connect"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"cache_bytes": -1}, "cache_bytes=-1"),
        ({"pool": "a b"}, "no pool name"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 2.0}, "workers=2.0"),
        ({"start_timeout": 0}, "start_timeout=0"),
        ({"gpus": []}, "gpus"),
        ({"gpus": "all"}, "gpus"),
        ({"gpus": [0, 1], "workers": 3}, "leave workers="),
        ({"engine_opts": {"x": object()}}, "JSON"),
    ],
)
def test_nonsense_is_refused_before_anything_is_started(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        lmpool.embedded(**settings)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine_opts": {"log": "/nowhere/log"}}, "create the folder '/nowhere' first"),
        ({"engine": "mokc"}, "did you mean 'mock'?"),
        ({"max_batch_tokens": 10}, "max_batch_tokens=10"),
        pytest.param(
            {"engine": "hf", "model": "/no/such/model"}, "/no/such/model", marks=pytest.mark.slow
        ),
    ],
)
def test_what_a_worker_refuses_is_told_in_its_words(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        lmpool.embedded(**{**MOCK, **settings})
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert "Traceback" not in str(refused.value)


@contextmanager
def instead_of_arq(folder: Path, program: str) -> Iterator[None]:
    """Let workers run `program`."""
    package = folder.parent / f"{folder.name}-arq" / "arq"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(textwrap.dedent(program))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package.parent))
        try:
            yield
        finally:
            subprocess.run(["rm", "-r", str(package.parent)], check=True)


def test_a_worker_that_dies_at_start_is_told_with_its_last_words(folder: Path) -> None:
    with (
        instead_of_arq(folder, "import sys; print('out of luck', flush=True); sys.exit(3)"),
        pytest.raises(PoolError, match="status 3") as died,
    ):
        lmpool.embedded(**MOCK, start_timeout=60)
    assert "out of luck" in str(died.value)


def test_a_worker_that_is_killed_at_start_is_told(folder: Path) -> None:
    with (
        instead_of_arq(folder, "import os; os.kill(os.getpid(), 9)"),
        pytest.raises(PoolError, match="SIGKILL"),
    ):
        lmpool.embedded(**MOCK, start_timeout=60)


def test_workers_that_take_too_long_are_given_up(folder: Path) -> None:
    with (
        instead_of_arq(folder, "import time; print('still busy', flush=True); time.sleep(600)"),
        pytest.raises(PoolTimeout, match="0 of 2 workers") as late,
    ):
        lmpool.embedded(**MOCK, workers=2, start_timeout=3)
    assert "still busy" in str(late.value)


def test_a_server_that_does_not_start_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = program(tmp_path / "server", "out of luck")
    monkeypatch.setattr(
        private_pool, "find_server", lambda: private_server.Program(str(broken), "Redis 7")
    )
    with pytest.raises(PoolError, match="private server ended with status 0:\nout of luck"):
        lmpool.embedded(**MOCK, start_timeout=30)


# --- which server --------------------------------------------------------------------------------


def program(path: Path, version: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def test_without_a_server_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LMPOOL_TEST_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(private_server, "_bundled", lambda: None)
    with pytest.raises(SettingsError, match=r"lmpool\[embedded\]"):
        lmpool.embedded(**MOCK)


def test_a_server_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LMPOOL_TEST_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "redis-server", "Redis server v=6.2.14 sha=0:0 bits=64")
    monkeypatch.setattr(private_server, "_bundled", lambda: None)
    with pytest.raises(SettingsError, match=r"6\.2\.14"):
        private_server.find_server()
    newer = program(tmp_path / "valkey-server", "Valkey server v=8.1.0 sha=0:0 bits=64")
    assert private_server.find_server() == private_server.Program(str(newer), "Valkey 8.1.0")
    newer.unlink()
    bundled = program(tmp_path / "bundled", "Valkey server v=9.1.2 sha=0:1 bits=64")
    monkeypatch.setattr(private_server, "_bundled", lambda: str(bundled))
    assert private_server.find_server().version == "Valkey 9.1.2"


def test_the_named_server_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = program(tmp_path / "mine", "Redis server v=7.4.1 sha=0:0 bits=64")
    monkeypatch.setenv("LMPOOL_TEST_SERVER", str(named))
    assert private_server.find_server() == private_server.Program(str(named), "Redis 7.4.1")
    monkeypatch.setenv("LMPOOL_TEST_SERVER", str(tmp_path / "nothing"))
    with pytest.raises(SettingsError, match="LMPOOL_TEST_SERVER"):
        private_server.find_server()
    monkeypatch.setenv("LMPOOL_TEST_SERVER", str(program(tmp_path / "other", "hello")))
    with pytest.raises(SettingsError, match="no Redis or Valkey"):
        private_server.find_server()


# --- the end, in this process --------------------------------------------------------------------


def test_an_exception_ends_it(folder: Path) -> None:
    pids: set[int] = set()

    def fail() -> None:
        with lmpool.embedded(**MOCK) as lm:
            pids.update(processes(lm))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_until_gone(pids, timeout=1)


def test_nobody_holding_it_ends_it(folder: Path) -> None:
    lm = lmpool.embedded(**MOCK)
    lm.next_token_logprobs_sync([1])
    pids = processes(lm)
    del lm
    gc.collect()
    wait_until_gone(pids, timeout=1)


def test_a_killed_worker_is_replaced_under_load(folder: Path) -> None:
    with lmpool.embedded(
        **MOCK, workers=2, batch_size=4, engine_opts={"delay": 0.01}, request_timeout=3.0
    ) as lm:
        stop = threading.Event()

        def load() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                try:
                    lm.batch_next_token_logprobs_sync(
                        [[number % 256, number // 256, i] for i in range(32)]
                    )
                except lmpool.LmpoolError:
                    continue  # rows of the dead worker: recovery is not this test's business

        loader = threading.Thread(target=load)
        loader.start()
        try:
            before = processes(lm)
            workers = {worker["pid"] for worker in lm.pool_statistics_sync()["workers"]}
            killed = min(workers)
            os.kill(killed, signal.SIGKILL)

            def replaced() -> set[int] | None:
                now = {worker["pid"] for worker in lm.pool_statistics_sync()["workers"]}
                return now if len(now - workers) == 1 and killed not in now else None

            now = until(replaced, 30, what="another worker", every=0.05)
            assert now is not None
            assert len(now) == 2
            assert "was ended by SIGKILL" in lm.worker_log.read_text()
        finally:
            stop.set()
            loader.join(10)
    wait_until_gone(before | now, timeout=1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children outlive it elsewhere")
def test_a_killed_reaper_leaves_nothing(folder: Path) -> None:
    with lmpool.embedded(**MOCK, workers=2) as lm:
        pids = processes(lm)
        os.kill(lm.processes()["reaper"], signal.SIGKILL)
        wait_until_gone(pids)


def test_a_frozen_worker_does_not_stop_the_end(folder: Path) -> None:
    lm = lmpool.embedded(**MOCK, drain_timeout=0.5)
    (worker,) = lm.pool_statistics_sync()["workers"]
    pids = processes(lm)
    os.kill(worker["pid"], signal.SIGSTOP)
    started = time.monotonic()
    lm.close()
    assert time.monotonic() - started < 10
    wait_until_gone(pids, timeout=1)


# --- the end, of a process of its own ------------------------------------------------------------


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

    def end(self, timeout: float = 30.0) -> tuple[int, str]:
        """Its exit status and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


WAIT = "time.sleep(600)\n"


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
def test_nothing_is_left_after_a_program_that_ends(folder: Path, body: str, status: int) -> None:
    with Program(folder, body) as program:
        found, errors = program.end()
        assert found == status
        assert ("ValueError" in errors) == (status == 1)
        assert "Exception ignored" not in errors
        wait_until_gone(program.pids)
    assert_nothing_left(folder)


@pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM", "SIGKILL", "SIGHUP"])
@pytest.mark.parametrize("when", ["while it serves", "while it starts"])
def test_nothing_is_left_after_a_signal(folder: Path, ending: str, when: str) -> None:
    body = (
        "with start() as lm:\n    lm.next_token_logprobs_sync([1])\n    print('busy', flush=True)\n"
    )
    starting = when == "while it starts"
    with Program(folder, body + "    " + WAIT, wait=not starting) as program:
        if starting:
            # From the first folder on something could be left.
            until(lambda: list(folder.glob("*/events")), 30, what="a pool that starts")
        else:
            assert program.read() == "busy"
        program.signal_group(signal.Signals[ending])
        status, _ = program.end()
        assert status == -signal.Signals[ending]
        if not starting:
            wait_until_gone(program.pids)
    assert_nothing_left(folder)


def test_nothing_is_left_after_sigkill_under_load(folder: Path) -> None:
    body = """
        lm = start(engine_opts={"delay": 0.05}, batch_size=8)
        print("busy", flush=True)
        lm.batch_next_token_logprobs_sync([[i % 256, i // 256] for i in range(60_000)])
    """
    with Program(folder, body) as program:
        assert program.read() == "busy"
        program.process.kill()
        program.end()
        wait_until_gone(program.pids)
    assert_nothing_left(folder)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_use_the_pool_and_does_not_own_it(folder: Path) -> None:
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
    with Program(folder, body) as program:
        child = int(program.read())
        try:
            program.process.kill()
            program.end()
            wait_until_gone(program.pids)
            assert runs(child)
        finally:
            os.kill(child, signal.SIGKILL)
            wait_until_gone([child])
    assert_nothing_left(folder)


# --- the words of a worker -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("00:00:01 ERROR   lmpool.a: model='x': nothing there", "model='x': nothing there"),
        ("[gpu 1] 00:00:01 ERROR   lmpool.a: of one of several", "of one of several"),
        ("00:00:01 ERROR   lmpool.a: first\n00:00:02 ERROR   lmpool.b: two\nlines", "two\nlines"),
        ("00:00:01 ERROR   lmpool.a: this\n00:00:02 INFO    lmpool.b: not this", "this"),
        ("00:00:01 ERROR   lmpool.a: this\n00:00:01 ERROR   lmpool.worker.launcher: no", "this"),
        ("lmpool worker: batch_size=0: too small", "batch_size=0: too small"),
        ("nothing of the kind", ""),
    ],
)
def test_the_last_complaint_is_found_in_the_log(said: str, complaint: str) -> None:
    assert private_pool._last_complaint(said) == complaint
