"""The benchmark of the vllm engine, which needs vLLM to run at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.benchmarks.__main__ import main
from tests.support.vllm_engine import need_vllm

need_vllm()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

MEASURED = {
    "Rows": {
        "pool",
        "pool, two callers",
        "capture",
        "logprobs=-1",
        "logprobs=-1, flat",
        "vllm serve over HTTP",
    },
    "Particles": {
        "live prompts",
        "prefix cache of 32-token blocks alone",
        "a fresh request a row, no reuse",
        "the hf engine",
    },
    "Rows of another process": {"shared memory", "collective_rpc", "no other process"},
}

FEW_CHOICES = 8
"""Of the 32 that are measured, which make half of all that is computed here."""

SCORED = {
    "Texts of 200, top-20": {"pool", "own", "HTTP"},
    f"{FEW_CHOICES} choices of 20 on 4 contexts of 400, top-20": {"pool", "own", "HTTP"},
    "Top-20 of the next token": {"pool", "own", "HTTP"},
}


BY_HTTP = {
    "Distinct prompts, the top 20": {"gateway", "vllm serve"},
    "2 contexts of 180 shared by 4, the top 20": {"gateway", "vllm serve"},
    "Distinct prompts, the top 100": {"gateway", "vllm serve"},
    "First token of a stream": {
        "gateway",
        "vllm serve",
        "the gateway beyond 1.2 x vllm serve",
    },
    "Binary against JSON": {".npy", "msgpack"},
}


@pytest.mark.parametrize(
    ("name", "measured"), [("vllm", MEASURED), ("vllm_scores", SCORED), ("gateway", BY_HTTP)]
)
def test_the_benchmark_runs_and_its_answers_are_right(
    name: str, measured: dict[str, set[str]], tmp_path: Path
) -> None:
    written = tmp_path / "figures.json"
    # In this process, which has imported vLLM: that takes longer than all that is measured.
    with (
        patch.dict(os.environ, PYTHONWARNINGS="ignore"),
        patch("tests.benchmarks.vllm_scores.CHOICES", FEW_CHOICES),
    ):
        assert main([name, "--quick", "--runs", "1", "--json", str(written)]) == 0
    (found,) = json.loads(written.read_text())
    for section, names in measured.items():
        assert {figure["what"] for figure in found["figures"][section]} == names
