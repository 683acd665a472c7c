"""Faults drawn from a seeded list, one after another, under one load; and fuzzed streams."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.load import Outcomes
from tests.chaos.pool import ChaosPool
from tests.support.faults import Faults

pytestmark = pytest.mark.server


def check(found: Outcomes) -> None:
    assert found.wrong == 0
    assert found.failed == [], sorted(set(found.failed))
    assert found.right == found.asked
    assert found.streams > 0


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_hundred_kills_in_twenty_thousand_prompts(server_binary: str, tmp_path: Path) -> None:
    """One after another; what a killed worker held runs one at a time."""
    load = {"most": 20_000, "size": 40, "callers": 4, "timeout": 300.0}
    # So slow that twenty thousand prompts last for a hundred kills. A prompt may well be in the
    # hands of three workers that are killed: it needs more tries than one that kills them.
    slow = {**Faults(tmp_path / "slow").settings(delay=0.06), "batch_size": 4, "max_deliveries": 8}
    with ChaosPool(tmp_path, seed=3, workers=4, load=load, **slow) as pool:
        kills: list[float] = []
        over = threading.Event()

        def kill() -> None:
            while not over.wait(pool.random.uniform(0.3, 0.9)):
                if len(kills) < 100:
                    pool.kill_worker()
                    kills.append(time.monotonic())

        with pool.load() as running:
            killer = threading.Thread(target=kill)
            killer.start()
            running.wait()
            over.set()
            killer.join()
        pool.check_nothing_left()
        check(running.outcomes)
        assert pool.kills == 100
        print(
            f"{pool.kills} kills, {running.outcomes.asked} prompts, longest wait "
            f"{max(end - begin for begin, end, _ in running.outcomes.calls):.1f} s"
        )


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_faults_one_after_another_lose_nothing(
    seed: int, server_binary: str, tmp_path: Path
) -> None:
    options = {"server": {"enable-debug-command": "yes"}, "load": {"timeout": 120.0}}
    with ChaosPool(tmp_path, seed=seed, workers=3, max_deliveries=5, **options) as pool:
        with pool.load() as running:
            time.sleep(1)
            for fault in random.Random(seed).sample([f for f in FAULTS if not f.alone], 8):
                fault.act(pool)
                time.sleep(pool.random.uniform(0, 2))
            time.sleep(3)
        pool.check_nothing_left()
    check(running.outcomes)
