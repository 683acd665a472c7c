"""The contract suite on vLLM itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lmpool.backends.contract import EngineContract
from lmpool.backends.engine import Engine
from tests.support.vllm_engine import ENVIRONMENT, QUICK

if not os.environ.get("LMPOOL_REQUIRE_SERVERS"):
    pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, many
]

NO_SHAPES = pytest.mark.xfail(strict=True, reason="vLLM compares no shapes with the model's")


class TestContract(EngineContract):
    engine = "vllm"
    options = {**QUICK, "enable_lora": True, "max_loras": 4, "max_lora_rank": 16}

    @classmethod
    def open_engine(cls, **options: Any) -> Engine:
        os.environ.update(ENVIRONMENT)
        return super().open_engine(**options)

    @pytest.mark.usefixtures("needs_adapters")
    @pytest.mark.parametrize(
        "wrong",
        ["no folder", "no json", "cut short", pytest.param("other model", marks=NO_SHAPES)],
    )
    def test_a_folder_that_holds_no_adapter_of_the_model(
        self, opened: Engine, tmp_path: Path, wrong: str
    ) -> None:
        super().test_a_folder_that_holds_no_adapter_of_the_model(opened, tmp_path, wrong)
