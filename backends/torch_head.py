"""The matrix of a head in torch, as others read it and as it is tried."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.head_fit import NoHead
from lmpool.head_form import Numbers

_NUMBERS: Final[dict[torch.dtype, Numbers]] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
_BLOCK: Final = 1 << 24
"""Numbers of the matrix that are widened at once."""

F32 = npt.NDArray[np.float32]


class HeadMatrix:
    """The matrix [vocab_size, hidden] of a head's layer, and its bias, where there is one.

    Raises `NoHead` for a layer that is no plain matrix of a dtype that travels, as of a quantized
    model. What a matrix has beyond `vocab_size` rows, for alignment, is left out.
    """

    def __init__(self, layer: Any, vocab_size: int, bias: torch.Tensor | None = None) -> None:
        weight = getattr(layer, "weight", None)
        if (
            not isinstance(weight, torch.Tensor)
            or weight.dim() != 2
            or weight.shape[0] < vocab_size
            or weight.dtype not in _NUMBERS
        ):
            raise NoHead(f"its head is a {type(layer).__name__}, and no plain matrix")
        self._layer = layer
        self._vocab_size = vocab_size
        self._bias = bias
        self.numbers: Final[Numbers] = _NUMBERS[weight.dtype]
        self.hidden_size: Final = int(weight.shape[1])
        self.device: Final = weight.device
        self.biased: Final = bias is not None

    def weights(self, rows: slice) -> npt.NDArray[Any]:
        """These rows of the matrix, the bits of bfloat16 as uint16."""
        found = self._weight()[rows].cpu().contiguous()
        if found.dtype != torch.bfloat16:
            return found.numpy()
        bits: npt.NDArray[Any] = found.view(torch.int16).numpy()
        return bits.view(np.uint16)

    def bias(self) -> F32:
        """The bias, float32 [vocab]."""
        assert self._bias is not None
        return as_numbers(self._bias.detach()[: self._vocab_size])

    def products(self, states: F32) -> F32:
        """The products [states, vocab] of the matrix, with its bias, in float32."""
        weight = self._weight()
        placed = torch.from_numpy(states).to(weight.device).to(weight.dtype).float()
        rows = max(1, _BLOCK // weight.shape[1])
        parts = [placed @ part.float().T for part in weight.split(rows)]
        found = as_numbers(torch.cat(parts, dim=1))
        return found if self._bias is None else found + self.bias()

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = self._layer.weight
        return weight.detach()[: self._vocab_size]


def as_numbers(tensor: torch.Tensor) -> F32:
    """A tensor as float32 on the host."""
    found: F32 = tensor.float().cpu().numpy()
    return found
