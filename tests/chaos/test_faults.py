"""Every fault by itself: no prompt is lost, no row wrong, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.pool import ChaosPool, run_fault

pytestmark = [pytest.mark.server]

PATIENCE = 20.0 if "PYTEST_XDIST_WORKER" in os.environ else 0.0
"""Seconds more than is promised, where other tests run beside."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if fault.short else [pytest.mark.chaos], id=fault.name)
        for fault in FAULTS
    ],
)
def test_a_fault_loses_nothing(fault: Fault, server_binary: str, tmp_path: Path) -> None:
    with ChaosPool(tmp_path, seed=1, **fault.pool) as pool:
        pool.at_rest_in += PATIENCE
        result = run_fault(pool, fault.act, before=0.5, after=0.2)
    result.check()
    assert result.recovered_in < fault.within + PATIENCE
