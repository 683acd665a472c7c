"""Rows as callers want them: torch tensors, or read-only numpy arrays."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

from lmpool.checks import said
from lmpool.errors import SettingsError
from lmpool.producer.blocking import in_thread
from lmpool.producer.blocks import Blocks
from lmpool.producer.waits import Future
from lmpool.rows import EncodedRow

if TYPE_CHECKING:
    from torch import Tensor

NumpyRows: TypeAlias = npt.NDArray[np.float32]
"""Read-only float32, [vocab_size] or [prompts, vocab_size]."""
TorchRows: TypeAlias = "Tensor"
"""The same as a torch tensor on the CPU, the caller's own. To a type checker that finds no torch
it is anything."""

RowT_co = TypeVar("RowT_co", covariant=True, default="TorchRows")
"""What rows are. ``framework="auto"`` means torch to a type checker: it checks what runs where
torch is installed; whoever runs without torch writes ``framework="numpy"`` to have rows checked."""


_importing: Final = threading.RLock()
"""Held while torch is imported in a thread of ours: a process that forked then could never import
it, as Python's own lock of the module would be held in it by nobody."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire,
        after_in_parent=_importing.release,
        after_in_child=_importing.release,
    )


class Framework(Protocol[RowT_co]):
    """How rows are handed to callers."""

    name: Literal["numpy", "torch"]
    is_shared: bool
    """Whether nobody writes to rows, so that several may have the same."""
    is_there: bool
    """Whether it is imported; else `load` does that, before any row is handed out."""

    def load(self) -> Future[None]:
        """Have it imported, in a thread of its own: that takes seconds, for which an event loop
        would stand still."""
        ...

    def one(self, row: EncodedRow) -> RowT_co:
        """One row, float32 [vocab_size]."""
        ...

    def empty(self, rows: int, vocab_size: int) -> NumpyRows:
        """Room for rows in one block, float32 [rows, vocab_size], to be written to."""
        ...

    def whole(self, block: NumpyRows) -> RowT_co:
        """Such a block, once all rows are in it."""
        ...

    def own(self, rows: Any) -> RowT_co:
        """Rows that were computed here, in an array or a tensor that nobody else has."""
        ...


class _Numpy:
    """Arrays that are nobody's to write: the local cache may hold the same numbers."""

    name: Literal["numpy", "torch"] = "numpy"
    is_shared = True
    is_there = True

    def __init__(self) -> None:
        self._blocks = Blocks()

    def load(self) -> Future[None]:
        raise AssertionError("numpy is there")

    def one(self, row: EncodedRow) -> NumpyRows:
        values = row.logprobs()
        values.setflags(write=False)
        return values

    def empty(self, rows: int, vocab_size: int) -> NumpyRows:
        return self._blocks.empty(rows, vocab_size)

    def whole(self, block: NumpyRows) -> NumpyRows:
        # Of memory that was given away read-only: its flag cannot be set again.
        return np.asarray(block.data.toreadonly())

    def own(self, rows: Any) -> NumpyRows:
        values: NumpyRows = rows if isinstance(rows, np.ndarray) else rows.detach().cpu().numpy()
        values.flags.writeable = False
        return values


class _Torch:
    """Tensors that the caller owns. torch is read for the first one."""

    name: Literal["numpy", "torch"] = "torch"
    is_shared = False

    def __init__(self) -> None:
        self._blocks = Blocks()
        self.is_there = False
        self._loading: tuple[int, Future[None]] | None = None
        """That of a process."""

    def load(self) -> Future[None]:
        loading = self._loading
        if loading is None or loading[0] != os.getpid():  # a fork has not the thread
            loading = self._loading = os.getpid(), in_thread(self._import, "lmpool-torch")
        return loading[1]

    def _import(self) -> None:
        try:
            with _importing:
                importlib.import_module("torch")
        except Exception as error:  # whatever stands in the way of its libraries
            raise SettingsError(
                f"torch cannot be imported ({said(error)}): write framework='numpy'"
            ) from error
        self.is_there = True

    def one(self, row: EncodedRow) -> TorchRows:
        import torch

        values = row.logprobs()
        return torch.from_numpy(np.array(values) if row.encoding == "f32" else values)

    def empty(self, rows: int, vocab_size: int) -> NumpyRows:
        return self._blocks.empty(rows, vocab_size)

    def whole(self, block: NumpyRows) -> TorchRows:
        import torch

        return torch.from_numpy(block)

    def own(self, rows: TorchRows) -> TorchRows:
        return rows


def framework(name: str) -> Framework[Any]:
    """``torch``, ``numpy``, or ``auto``: torch where it is installed, else numpy.

    Raises `SettingsError` for ``torch`` where it is not installed.
    """
    if name == "numpy":
        return _Numpy()
    if importlib.util.find_spec("torch") is not None:
        return _Torch()
    if name == "torch":
        raise SettingsError("framework='torch': torch is not installed; write framework='numpy'")
    return _Numpy()
