"""Embedded pools: what they serve, and what is refused."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import tempfile
import threading
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
from tests.support.embedded import MOCK, instead_of_arq, processes, program
from tests.support.processes import runs, wait_until_gone

pytestmark = pytest.mark.usefixtures("server_binary")


def test_it_serves_from_processes_of_its_own(pool_folder: Path, pool_name: str) -> None:
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
        assert lm.folder.parent == pool_folder
        assert "serves tiny" in lm.worker_log.read_text()
    wait_until_gone(pids)
    assert list(pool_folder.iterdir()) == []
    with pytest.raises(ClientClosed):
        lm.next_token_logprobs_sync([1])
    lm.close()  # once more, for nothing


def test_nobody_else_reaches_its_server(pool_folder: Path) -> None:
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


def test_its_control_jobs_go_through_its_server(
    pool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMPOOL_CONTROL_URL", "redis://127.0.0.1:1")
    with lmpool.embedded(**MOCK) as lm:
        lm.clear_kv_cache(timeout=60)


def test_where_no_socket_can_be_had_it_is_a_port_with_a_password(pool_folder: Path) -> None:
    long = pool_folder / ("x" * 100)
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


def test_it_is_an_async_context_manager(pool_folder: Path) -> None:
    lm = lmpool.embedded(**MOCK)
    row = asyncio.run(_one_row(lm))
    np.testing.assert_array_equal(row, mock_row([7, 7], 256))
    assert list(pool_folder.iterdir()) == []


def test_two_pools_of_one_process_are_two(pool_folder: Path) -> None:
    with (
        lmpool.embedded(**MOCK, pool="a") as a,
        lmpool.embedded(**MOCK, pool="a", engine_opts={"vocab_size": 300}) as b,
    ):
        assert a.url != b.url
        assert (a.info.vocab_size, b.info.vocab_size) == (256, 300)
        a.close()
        assert len(b.next_token_logprobs_sync([1])) == 300


def test_it_shows_what_the_workers_say_if_asked(
    pool_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lmpool.embedded(**MOCK, log_level="info"):
        pass
    shown = capsys.readouterr().err
    assert "serves tiny" in shown
    assert "left the pool" in shown  # to the end


def test_what_the_workers_say_may_find_no_stderr(
    pool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(sys, "stderr", None)  # as with 2>&-
    with lmpool.embedded(**MOCK, log_level="info") as lm:
        assert len(lm.next_token_logprobs_sync([1])) == 256
    assert not failed


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_sise": 3}, "did you mean batch_size?"),
        ({"cache_byte": 3}, "did you mean cache_bytes?"),
        ({"nonsense": 3}, "there are"),
        ({"url": "redis://localhost"}, "lmpool.connect"),
        ({"control_url": "redis://localhost"}, "control_url: an embedded pool has a server"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"cache_bytes": -1}, "cache_bytes=-1"),
        ({"pool": "a b"}, "no pool name"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 2.0}, "workers=2.0"),
        ({"start_timeout": 0}, "start_timeout=0"),
        ({"start_timeout": "x"}, "start_timeout='x': write a positive number"),
        ({"model": None}, "model=None: write tiny, a folder, or a hub id"),
        ({"model": "/\udc80"}, "model="),
        ({"shards": True}, "shards=True"),
        ({"verbose": "yes"}, "verbose='yes': write True or False"),
        ({"gpus": {}}, "gpus={}: write the GPUs' numbers"),
        ({"gpus": []}, "gpus"),
        ({"gpus": "all"}, "gpus"),
        ({"gpus": [0, 1], "workers": 3}, "leave workers="),
        ({"engine_opts": {"x": object()}}, "JSON"),
    ],
)
def test_nonsense_is_refused_before_anything_is_started(
    pool_folder: Path, settings: dict[str, Any], said: str
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
    pool_folder: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        lmpool.embedded(**{**MOCK, **settings})
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert "Traceback" not in str(refused.value)


def test_a_worker_that_dies_at_start_is_told_with_its_last_words(pool_folder: Path) -> None:
    with (
        instead_of_arq(pool_folder, "import sys; print('out of luck', flush=True); sys.exit(3)"),
        pytest.raises(PoolError, match="status 3") as died,
    ):
        lmpool.embedded(**MOCK, start_timeout=60)
    assert "out of luck" in str(died.value)


def test_a_worker_that_is_killed_at_start_is_told(pool_folder: Path) -> None:
    with (
        instead_of_arq(pool_folder, "import os; os.kill(os.getpid(), 9)"),
        pytest.raises(PoolError, match="SIGKILL"),
    ):
        lmpool.embedded(**MOCK, start_timeout=60)


def test_workers_that_take_too_long_are_given_up(pool_folder: Path) -> None:
    busy = "import time; print('still busy', flush=True); time.sleep(600)"
    for seconds in (3, 15, 60):
        with (
            instead_of_arq(pool_folder, busy),
            pytest.raises(PoolTimeout, match="0 of 2 workers") as late,
        ):
            lmpool.embedded(**MOCK, workers=2, start_timeout=seconds)
        if "still busy" in str(late.value):  # they had begun, on a machine this slow
            break
    assert "still busy" in str(late.value)


def test_a_server_that_does_not_start_is_told(
    pool_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = program(tmp_path / "server", "out of luck")
    monkeypatch.setattr(
        private_pool, "find_server", lambda: private_server.Program(str(broken), "Redis 7")
    )
    with pytest.raises(PoolError, match="private server ended with status 0:\nout of luck"):
        lmpool.embedded(**MOCK, start_timeout=60)
