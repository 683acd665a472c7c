"""What rows answer and texts score, on the engines of the base environment, beside float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.backends import Engine, load_engine
from lmpool.backends.contract.operations import Prompt
from lmpool.backends.mock import MockEngine, mock_row
from tests.support.exact_answers import F64, ExactRows, check_answers, two_adapters
from tests.support.exact_scores import check_exact_scores
from tests.support.fed_engine import FedEngine

pytestmark = pytest.mark.timeout(3_600)

VOCAB = 2000


def row(prompt: Prompt, adapter: str | None) -> F64:
    return mock_row(prompt, VOCAB, adapter).astype(np.float64)


@pytest.mark.parametrize("make", [MockEngine, FedEngine])
def test_answers_are_those_of_the_rows(make: type[Engine], answers: int) -> None:
    engine = make("mock", vocab_size=VOCAB)  # type: ignore[call-arg]
    adapters = {"one@1": "/adapters/one", "two@2": "/adapters/two"}
    check_answers(engine, row, adapters, answers)
    check_exact_scores(engine, row, adapters, answers)


@pytest.mark.parametrize(
    ("reduce", "options"), [(False, {}), (True, {"kv_cache_bytes": 1 << 20, "forward_tokens": 29})]
)
def test_answers_of_hf_are_those_of_transformers(
    reduce: bool, options: dict[str, Any], tmp_path: Path, answers: int
) -> None:
    """Reduced by NumPy, as on a CPU, and where the logits are, as on a GPU."""
    adapters = two_adapters(tmp_path)
    engine: Any = load_engine("hf", "tiny", threads=1, **options)
    engine._reduce = reduce
    rows = ExactRows("tiny", adapters)
    check_answers(engine, rows, adapters, answers)
    check_exact_scores(engine, rows, adapters, answers)
    engine.close()
