"""The benchmark of the vllm engine, which needs vLLM to run at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarks import quick_figures
from tests.support.vllm_engine import need_vllm

need_vllm()

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(150)]


def test_the_benchmark_runs_and_its_rows_are_right(tmp_path: Path) -> None:
    quick_figures("vllm", tmp_path)
