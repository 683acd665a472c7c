"""What memory a row keeps alive."""

from __future__ import annotations

from typing import Any

import numpy as np


def owner(row: Any) -> Any:
    """The object whose memory a row lies in: the row itself, or what it is a view of."""
    found: Any = row
    while True:
        if isinstance(found, np.ndarray):
            below: Any = found.base
        elif isinstance(found, memoryview):
            below = found.obj
        else:
            return found
        if below is None:
            return found
        found = below


def held_bytes(row: Any) -> int:
    """The bytes of that object."""
    found = owner(row)
    storage = getattr(found, "untyped_storage", None)  # a torch tensor, or a view of one
    size = storage().nbytes() if storage is not None else getattr(found, "nbytes", None)
    return int(size) if size is not None else len(found) if hasattr(found, "__len__") else 0
