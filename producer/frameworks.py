"""Rows as callers want them: torch tensors, or read-only numpy arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmpool.errors import SettingsError
from lmpool.rows import EncodedRow


class Framework:
    """``torch``, ``numpy``, or ``auto``: torch where it is installed."""

    def __init__(self, name: str) -> None:
        self._torch = _wants_torch(name)

    def one(self, row: EncodedRow) -> Any:
        """One row, float32 [vocab]; the caller owns it."""
        values = row.logprobs()
        if self._torch:
            import torch

            return torch.from_numpy(np.array(values) if row.encoding == "f32" else values)
        values.flags.writeable = False
        return values

    def stack(self, rows: Sequence[EncodedRow], vocab_size: int) -> Any:
        """Rows in one block, float32 [rows, vocab]."""
        block = np.empty((len(rows), vocab_size), np.float32)
        for number, row in enumerate(rows):
            block[number] = row.logprobs()
        if self._torch:
            import torch

            return torch.from_numpy(block)
        block.flags.writeable = False
        return block


def _wants_torch(framework: str) -> bool:
    if framework == "auto":
        return importlib.util.find_spec("torch") is not None
    if framework == "torch" and importlib.util.find_spec("torch") is None:
        raise SettingsError("framework='torch': torch is not installed; write framework='numpy'")
    return framework == "torch"
