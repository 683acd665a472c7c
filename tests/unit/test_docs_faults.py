"""The tables of faults say of each fault that is run what it cost, and of no other."""

from __future__ import annotations

import re

import pytest

from tests.chaos.clustered import CLUSTER_FAULTS
from tests.chaos.faults import FAULTS
from tests.support.markdown import ROOT

TEXT = (ROOT / "docs" / "faults.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("faults", [fault.name for fault in FAULTS]),
        ("cluster faults", [fault.name for fault in CLUSTER_FAULTS]),
    ],
)
def test_each_fault_that_is_run_has_its_line(table: str, names: list[str]) -> None:
    found = re.search(f"<!-- {table} -->\n(.*?)<!-- /{table} -->", TEXT, re.DOTALL)
    assert found is not None
    lines = [line.split("|")[1].strip() for line in found[1].splitlines()[2:]]
    assert sorted(lines) == sorted(names)
