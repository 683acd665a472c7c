"""Large rows in shared memory while workers are killed and frozen, and a ring that is soon full."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lmpool.keys import PoolKeys
from lmpool.model_info import ModelInfo
from lmpool.neighbours import Neighbourhood
from lmpool.row_ring import RowRingReader
from tests.chaos.pool import ChaosPool
from tests.support.waiting import until

pytestmark = pytest.mark.server

VOCAB = 8192
"""Rows of 32 KiB, of which a ring of 1 MiB holds fewer than a batch has."""


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often a row was found in a ring, and how often not."""
    found: Counter[bool] = Counter()
    copy = RowRingReader.copy

    def counted(ring: RowRingReader, *given: Any) -> Any:
        row = copy(ring, *given)
        found[row is not None] += 1
        return row

    monkeypatch.setattr(RowRingReader, "copy", counted)
    return found


def check_faults(folder: Path, looked: Counter[bool], seconds: float, seed: int) -> None:
    load = {"callers": 4, "size": 64, "timeout": 120.0}
    with ChaosPool(
        folder,
        seed=seed,
        workers=2,
        load=load,
        vocab_size=VOCAB,
        batch_size=64,
        near_bytes="1MiB",
        max_deliveries=50,
    ) as pool:
        with pool.admin() as client:
            packed: Any = client.get(PoolKeys("chaos").info)
            info = ModelInfo.unpack(packed)
        neighbourhood = Neighbourhood.of_pool("chaos", info.fingerprint8)
        over = threading.Event()

        def disturb() -> None:
            while not over.wait(pool.random.uniform(0.5, 1.5)):
                pool.kill_worker()
                frozen = pool.random.choice(pool.workers)
                frozen.pause()
                over.wait(pool.random.uniform(0.1, 1.0))
                frozen.resume()

        with pool.load() as running:
            until(lambda: running.answered() > 500, what="the load to begin")
            disturbing = threading.Thread(target=disturb)
            disturbing.start()
            time.sleep(seconds)
            until(lambda: pool.kills > 0, what="a worker to be killed")
            over.set()
            disturbing.join()
            answered = running.answered()
            until(lambda: running.answered() > answered + 500, what="the load to go on")
            until(lambda: looked[True] > 100, what="rows that are found in time")
            until(lambda: looked[False] > 0, what="rows that are there no more")
        pool.check_nothing_left()
        outcomes = running.outcomes
        assert (outcomes.wrong, outcomes.failed) == (0, [])
        assert outcomes.right == outcomes.asked
        assert neighbourhood.look("client") == {}
    assert neighbourhood.look("rows") == {}
    assert not [name for name in _names(neighbourhood.folder) if not name.startswith(".")]


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def test_rows_that_are_laid_while_workers_die_are_right(
    server_binary: str, tmp_path: Path, looked: Counter[bool]
) -> None:
    check_faults(tmp_path, looked, seconds=4.0, seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2, 3])
def test_rows_that_are_laid_while_workers_die_for_minutes_are_right(
    seed: int, server_binary: str, tmp_path: Path, looked: Counter[bool]
) -> None:
    check_faults(tmp_path, looked, seconds=120.0, seed=seed)
