"""The MLX engine under the contract that holds for every engine."""

from __future__ import annotations

from typing import Any

import pytest

from lmpool.backends import Engine
from lmpool.backends.contract import EngineContract

pytest.importorskip("mlx_lm")

from lmpool.backends.mlx import MLXEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class TestMLX(EngineContract):
    engine = "mlx"
    bounded = {"cache_bytes": 8 << 20}


class TestReducing(TestMLX):
    """What follows from rows, scores and next tokens where MLX has the logits: as on a GPU."""

    @classmethod
    def open_engine(cls, **options: Any) -> Engine:
        engine = super().open_engine(**options)
        assert isinstance(engine, MLXEngine)
        engine._reduce = True
        return engine
