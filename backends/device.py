"""Copies between host and device that the computation does not wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Copied = Callable[[], Sequence[torch.Tensor]]
"""Waits for copies to the host, and returns them."""


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor on `device`; to a GPU from pinned memory, in order with what it runs."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def all_to_device(
    arrays: Sequence[np.ndarray[Any, Any]], device: torch.device
) -> list[torch.Tensor]:
    """Several arrays of one dtype as tensors on `device`; to a GPU they go in one copy."""
    if device.type != "cuda":
        return [to_device(array, device) for array in arrays]
    flat = to_device(np.concatenate([array.ravel() for array in arrays]), device)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def refill(target: torch.Tensor, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Put arrays one after another where a tensor is; on a GPU in order with what it runs."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if target.device.type == "cuda":
        flat = flat.pin_memory()
    target.copy_(flat, non_blocking=True)


def avoid_cudnn_attention(device: torch.device) -> None:
    """Switch cuDNN's attention off in this process, which torch prefers on newer GPUs: it builds a
    plan for each shape that it has not seen, which takes about half a second, and batches come in
    all shapes. The other kernels need none."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class HostCopies:
    """Brings tensors to the host: from a GPU on a stream of its own, into pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, *tensors: torch.Tensor) -> Copied:
        """Begin to copy what the compute stream has been given so far."""
        if self._stream is None:
            return lambda: [tensor.cpu() for tensor in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            ]
            done = self._stream.record_event()

        def finish(_still_read: Sequence[torch.Tensor] = tensors) -> Sequence[torch.Tensor]:
            done.synchronize()
            return copies

        return finish
