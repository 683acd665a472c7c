"""Near-ties of routers: where rounding decides, a row may be that of either choice.

A wrong row counts as flipped only if a plain forward pass in which one near-tie is decided the
other way gives that very row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NEAR: Final = 1e-5
"""A tie is near where the last choice and the next differ by less, of the largest."""
_MOST: Final = 12


class _Choices(TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """Notes how near each choice of the greatest is to another, and swaps one of them."""

    def __init__(self, swapped: tuple[int, int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.near: list[tuple[float, tuple[int, int]]] = []
        self._swapped = swapped
        self._calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func.overloadpacket is not torch.ops.aten.topk:
            return func(*args, **given)
        scores, k, *rest = args
        dim = rest[0] if rest else given.get("dim", -1)
        values, indices = func(scores, k, dim, True, True)
        number, self._calls = self._calls, self._calls + 1
        if not 0 < k < scores.shape[dim] or dim not in (-1, scores.dim() - 1):
            return values, indices
        more, places = func(scores, k + 1, dim, True, True)
        margins = ((more[..., k - 1] - more[..., k]) / more.abs().amax(-1).clamp_min(1e-30)).ravel()
        for at in margins.argsort()[:_MOST].tolist():
            if float(margins[at]) < NEAR:
                self.near.append((float(margins[at]), (number, at)))
        if self._swapped is not None and self._swapped[0] == number:
            values, indices = values.clone(), indices.clone()
            at = self._swapped[1]
            values.view(-1, k)[at, k - 1] = more.reshape(-1, k + 1)[at, k]
            indices.view(-1, k)[at, k - 1] = places.reshape(-1, k + 1)[at, k]
        return values, indices


def margin_of_flip(
    model: Any, prompt: Sequence[int], row: torch.Tensor, tolerance: float
) -> float | None:
    """How near the tie was whose other side gives this row; None where no single one does."""
    ids = torch.tensor([list(prompt)])

    def plain(choices: _Choices) -> torch.Tensor:
        with torch.inference_mode(), choices:
            return torch.log_softmax(model(ids, use_cache=False).logits[0, -1].float(), -1)

    seen = _Choices()
    plain(seen)
    for margin, place in sorted(seen.near)[:_MOST]:
        if float((plain(_Choices(place)) - row).abs().max()) < tolerance:
            return margin
    return None
