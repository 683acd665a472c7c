"""Faults drawn from a seeded list, one after another, under one load; and fuzzed streams."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.load import Outcomes
from tests.chaos.pool import ChaosPool
from tests.support.faults import Faults
from tests.support.waiting import until

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
        assert pool.stolen > 0
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
    """Drawn from all; engines hold their jobs for a while, so that each fault finds some."""
    slow = Faults(tmp_path / "slow").settings(delay=0.4)
    options: dict[str, Any] = {
        **slow,
        "server": {"enable-debug-command": "yes"},
        "load": {"timeout": 120.0, "callers": 4, "longest_stream": 4},
        "batch_size": 8,
        "max_deliveries": 20,
    }
    done: list[str] = []
    with ChaosPool(tmp_path, seed=seed, workers=4, **options) as pool:
        ends = time.monotonic() + 240.0
        with pool.load() as running:
            until(lambda: running.answered() > 100, what="the load to begin")
            while time.monotonic() < ends:
                fault = pool.random.choice([f for f in FAULTS if not f.alone])
                done.append(fault.name)
                fault.act(pool)
                over = time.monotonic()
                # The next one would make those wait longer that wait for the end of this one.
                until(
                    lambda: running.waits_since() > over,  # noqa: B023
                    fault.within + 5.0,
                    what=f"all to be answered after {done}",
                )
        pool.check_nothing_left()
        print(
            f"{len(done)} faults, {running.outcomes.asked} prompts, {running.outcomes.resubmitted} "
            f"asked again, {pool.taken_over()} taken over, {pool.stolen} stolen, longest call "
            f"{max(end - begin for begin, end, _ in running.outcomes.calls):.1f} s"
        )
        check(running.outcomes)
        assert running.outcomes.resubmitted > 0
        assert pool.taken_over() > 0
        assert pool.stolen > 0
