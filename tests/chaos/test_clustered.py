"""Faults of a cluster, one after another under a load, while workers are killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.clustered import (
    CLUSTER_FAULTS,
    ClusterFault,
    ClusterPool,
    lose_writes,
    move_slots,
    pause_primary,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.server]

LONG = [pytest.mark.chaos, pytest.mark.timeout(700)]
SHORT = [fault for fault in CLUSTER_FAULTS if fault.act in (lose_writes, move_slots, pause_primary)]


def test_a_cluster_loses_nothing(server_binary: str, tmp_path: Path) -> None:
    with ClusterPool(tmp_path, seed=1, patience=60.0) as pool:
        with pool.load() as load:
            until(lambda: load.answered() > 100, what="the load to begin")
            for fault in SHORT:
                pool.befall(load, fault)
        pool.check_nothing_left()
        pool.check(load)
        assert load.outcomes.resubmitted > 0
        assert pool.taken_over() > 0


@pytest.mark.chaos
@pytest.mark.parametrize("append_only", [False, True], ids=["empty", "AOF"])
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in CLUSTER_FAULTS])
def test_a_fault_of_a_cluster_loses_nothing(
    fault: ClusterFault, append_only: bool, server_binary: str, tmp_path: Path
) -> None:
    with ClusterPool(tmp_path, seed=2, cluster={"append_only": append_only}) as pool:
        with pool.load() as load:
            until(lambda: load.answered() > 100, what="the load to begin")
            pool.befall(load, fault)
            time.sleep(2.0)
        pool.check_nothing_left()
        pool.check(load)


@pytest.mark.parametrize(
    ("append_only", "seed"),
    [
        pytest.param(append_only, seed, marks=LONG, id=f"{name}-{seed}")
        for seed in (3, 4)
        for append_only, name in ((False, "empty"), (True, "AOF"))
    ],
)
def test_faults_of_a_cluster_drawn_one_after_another(
    append_only: bool, seed: int, server_binary: str, tmp_path: Path
) -> None:
    with ClusterPool(tmp_path, seed=seed, cluster={"append_only": append_only}) as pool:
        ends = time.monotonic() + 450.0
        with pool.load() as load:
            until(lambda: load.answered() > 100, what="the load to begin")
            while time.monotonic() < ends:
                pool.befall(load, pool.random.choice(CLUSTER_FAULTS))
        pool.check_nothing_left()
        pool.check(load)
        assert load.outcomes.resubmitted > 0
        assert pool.taken_over() > 0
        assert pool.stolen > 0
