"""What rows answer and texts score, on the SGLang engine, beside transformers in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmpool.backends import load_engine
from tests.support.sglang_engine import WARNINGS

pytest.importorskip("sglang")

from lmpool.backends.sglang import SGLangEngine
from tests.support.exact_answers import ExactRows, check_answers, two_adapters
from tests.support.exact_scores import check_exact_scores

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3_600), *WARNINGS]


@pytest.mark.parametrize("reduce", [True, False], ids=["by-torch", "by-numpy"])
def test_answers_are_those_of_transformers(tmp_path: Path, answers: int, reduce: bool) -> None:
    adapters = two_adapters(tmp_path)
    rows = ExactRows("tiny", adapters)  # before the engine, which may change how models are loaded
    engine = load_engine("sglang", "tiny", max_loras=4)
    assert isinstance(engine, SGLangEngine)
    engine._reduce = reduce  # as on a GPU, and as on a CPU
    try:
        check_answers(engine, rows, adapters, answers)
        check_exact_scores(engine, rows, adapters, answers)
    finally:
        engine.close()
