"""What ``rope_parameters`` leave to whoever reads them, said in words that engines know."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any


def name_longrope_scale(rope: MutableMapping[str, Any]) -> None:
    """Name the scale of queries and keys, which engines take from the model's positions alone."""
    scale, factor = rope.get("attention_factor"), rope.get("factor")
    original = rope.get("original_max_position_embeddings")
    if scale is None and factor is not None and original:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if scale is not None:
        rope.setdefault("short_mscale", scale)
        rope.setdefault("long_mscale", scale)
