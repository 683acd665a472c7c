"""The vLLM engine under the contract that holds for every engine."""

from __future__ import annotations

import pytest

from lmpool.backends.contract import EngineContract
from tests.support.vllm_engine import QUICK, need_vllm

need_vllm()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, many
]


class TestVLLM(EngineContract):
    engine = "vllm"
    options = {**QUICK, "enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    most_adapters = 64
    most_temperature = 2.0
    own_draws = True
