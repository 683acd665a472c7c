"""However an embedded pool ends in its own process, nothing of it is left."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import lmpool
from tests.support.embedded import MOCK, processes
from tests.support.freezing import freeze
from tests.support.processes import wait_until_gone
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("server_binary")


def test_an_exception_ends_it(pool_folder: Path) -> None:
    pids: set[int] = set()

    def fail() -> None:
        with lmpool.embedded(**MOCK) as lm:
            pids.update(processes(lm))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_until_gone(pids)


def test_nobody_holding_it_ends_it(pool_folder: Path) -> None:
    lm = lmpool.embedded(**MOCK)
    lm.next_token_logprobs_sync([1])
    pids = processes(lm)
    del lm
    gc.collect()
    wait_until_gone(pids)


def test_one_whose_closing_is_interrupted_is_closed_by_the_next(
    pool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = lmpool.embedded(**MOCK)
    pids, folder = processes(lm), lm.folder

    def interrupt(timeout: float) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lm._private._reaper, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lm.close()
    lm.close()
    assert lm._private._reaper.returncode is not None, "who closes it waits until all have ended"
    assert not folder.exists()
    lm.close()
    wait_until_gone(pids)


def test_a_killed_worker_is_replaced_under_load(pool_folder: Path) -> None:
    with lmpool.embedded(**MOCK, workers=2, batch_size=4, engine_opts={"delay": 0.01}) as lm:
        stop = threading.Event()

        def load() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                try:
                    lm.batch_next_token_logprobs_sync(
                        [[number % 256, number // 256, i] for i in range(32)], timeout=3
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

            now = until(replaced, what="another worker", every=0.05)
            assert now is not None
            assert len(now) == 2
            assert "was ended by SIGKILL" in lm.worker_log.read_text()
        finally:
            stop.set()
            loader.join(60)
    wait_until_gone(before | now)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children outlive it elsewhere")
def test_a_killed_reaper_leaves_nothing(pool_folder: Path) -> None:
    with lmpool.embedded(**MOCK, workers=2) as lm:
        pids = processes(lm)
        os.kill(lm.processes()["reaper"], signal.SIGKILL)
        wait_until_gone(pids)


def test_a_frozen_worker_does_not_stop_the_end(pool_folder: Path) -> None:
    lm = lmpool.embedded(**MOCK, drain_timeout=0.5)
    (worker,) = lm.pool_statistics_sync()["workers"]
    pids = processes(lm)
    freeze(worker["pid"])
    started = time.monotonic()
    lm.close()
    assert time.monotonic() - started < 60
    wait_until_gone(pids)
