"""What rows answer and texts score, on the vLLM engine, beside transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmpool.backends import load_engine
from tests.support.vllm_engine import QUICK, need_vllm

need_vllm()

from tests.support.exact_answers import ExactRows, check_answers, two_adapters  # noqa: E402
from tests.support.exact_scores import check_exact_scores  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3_600),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, many
]


@pytest.mark.parametrize("reduces", [False, True], ids=["beside", "inside"])
def test_answers_are_those_of_transformers(tmp_path: Path, answers: int, reduces: bool) -> None:
    adapters = two_adapters(tmp_path)
    rows = ExactRows("tiny", adapters)  # before the engine, which may change how models are loaded
    engine: Any = load_engine(
        "vllm", "tiny", **QUICK, enable_lora=True, max_loras=2, max_lora_rank=8
    )
    engine._reduces = reduces  # beside the engine, or where the logits are, as on a GPU
    try:
        check_answers(engine, rows, adapters, answers)
        if not reduces:
            check_exact_scores(engine, rows, adapters, answers)
    finally:
        engine.close()
