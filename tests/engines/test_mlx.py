"""The MLX engine on mlx itself."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from lmpool.backends.contract import EngineContract

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


class TestContract(EngineContract):
    engine = "mlx"
    bounded = {"cache_bytes": 8 << 20}
