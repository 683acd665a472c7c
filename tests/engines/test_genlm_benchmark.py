"""The benchmark of AWRS, which needs genlm-control to run at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import main

pytest.importorskip("genlm.control")

pytestmark = [
    pytest.mark.genlm,
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


def test_it_runs_in_small(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    assert main(["awrs", "--quick", "--runs", "1", "--json", str(written)]) == 0
    (report,) = json.loads(written.read_text())
    stored = {each["what"]: each["median"] for each in report["figures"]["Stored"]}
    assert stored["rows"] == 513_048
    assert 0 < stored["draws"] < 0.005 * stored["rows"]
