"""The SGLang engine under the contract that holds for every engine."""

from __future__ import annotations

from typing import Any

import pytest

from lmpool.backends import Engine
from lmpool.backends.contract import EngineContract

pytest.importorskip("sglang")

from lmpool.backends.sglang import SGLangEngine
from tests.support.sglang_engine import SMALL, WARNINGS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), *WARNINGS]


class TestSGLang(EngineContract):
    engine = "sglang"
    options = {"max_loras": 4}
    bounded = {"server_args": {"max_total_tokens": 4096}}


class TestInPieces(EngineContract):
    """And what follows from rows, and next tokens, where the logits are: as on a GPU."""

    engine = "sglang"
    options = SMALL
    bounded = SMALL
    lacks = {"adapters": "opened without, which is the default"}

    @classmethod
    def open_engine(cls, **options: Any) -> Engine:
        engine = super().open_engine(**options)
        assert isinstance(engine, SGLangEngine)
        engine._reduce = True
        return engine
