"""The vLLM engine under the contract that holds for every engine."""

from __future__ import annotations

from typing import Any

import pytest

from lmpool.backends import Engine
from lmpool.backends.contract import EngineContract
from tests.support.vllm_engine import QUICK, need_vllm

need_vllm()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, many
]


class TestVLLM(EngineContract):
    engine = "vllm"
    options = {**QUICK, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    most_adapters = 64
    most_temperature = 2.0
    own_draws = True


class TestReducing(TestVLLM):
    """As on a GPU: rows are reduced where the logits are."""

    @classmethod
    def open_engine(cls, **options: Any) -> Engine:
        engine: Any = super().open_engine(**options)
        engine._reduces = True
        return engine  # type: ignore[no-any-return]

    test_says = test_adapter_folders = test_ends = None  # type: ignore[assignment]
