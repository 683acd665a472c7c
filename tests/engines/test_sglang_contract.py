"""The SGLang engine under the contract that holds for every engine."""

from __future__ import annotations

import pytest

from lmpool.backends.contract import EngineContract

pytest.importorskip("sglang")

from tests.support.sglang_engine import SMALL, WARNINGS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180), *WARNINGS]


class TestSGLang(EngineContract):
    engine = "sglang"
    options = {"max_loras": 4}
    bounded = {"server_args": {"max_total_tokens": 4096}}


class TestInPieces(EngineContract):
    engine = "sglang"
    options = SMALL
    bounded = SMALL
    lacks = {"adapters": "opened without, which is the default"}
