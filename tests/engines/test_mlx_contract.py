"""The MLX engine under the contract that holds for every engine."""

from __future__ import annotations

import pytest

from lmpool.backends.contract import EngineContract

pytest.importorskip("mlx_lm")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


class TestMLX(EngineContract):
    engine = "mlx"
    bounded = {"cache_bytes": 8 << 20}
