"""Drawing from rows on their device, by the law of `lmpool.wants.distribution`."""

from __future__ import annotations

from typing import Final

import torch

from lmpool.wants.distribution import BLOCK, FAINT

_PLACES: Final = 64
"""Of a row that are found at once: each has a block of its own in float64."""


class Distributions:
    """Rows, float32 [rows, vocab], at a temperature above 0 that float32 can divide by.

    Weights are float32, that of a row's likeliest is 1. Their sums are float64. What is taken out
    is taken out of `rows`, too. Of a row without any probability nothing means anything.
    """

    def __init__(self, rows: torch.Tensor, heat: float) -> None:
        self._rows = rows
        self._heat = heat
        count, self._vocab = rows.shape
        blocks = -(-self._vocab // BLOCK)
        self._weights = rows.new_zeros((count, blocks * BLOCK))
        self._tops = rows.amax(1, True)
        self._weigh(slice(None))

    def _weigh(self, some: slice | torch.Tensor) -> None:
        rows = self._rows[some]
        if isinstance(some, torch.Tensor):
            self._tops[some] = rows.amax(1, True)
        weights = (rows - self._tops[some]).div_(self._heat).exp_()
        self._weights[some, : self._vocab] = weights
        self._blocks = self._weights.unflatten(1, (-1, BLOCK))
        self._masses = self._blocks.sum(2, dtype=torch.float64)

    @property
    def masses(self) -> torch.Tensor:
        """Those of all tokens [rows, 1], beside the likeliest as 1."""
        found: torch.Tensor = self._masses.sum(1, keepdim=True)
        return found

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """The log-probability of each of these tokens [rows, n], at the temperature."""
        found = (self._rows.gather(1, ids).double() - self._tops.double()) / self._heat
        return found - self.masses.log()

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """The tokens, int64 [rows, n], at `places`, float64 [rows, n] in [0, 1)."""
        cumulative = self._masses.cumsum(1)
        parts = [self._find(cumulative, some) for some in places.split(_PLACES, 1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _find(self, cumulative: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        at = places * cumulative[:, -1:]
        block = torch.searchsorted(cumulative, at, right=True).minimum(_last(self._masses))
        left = at - torch.nn.functional.pad(cumulative, (1, 0)).gather(1, block)
        weights = self._blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))
        inside = weights.cumsum(2, dtype=torch.float64)
        place = torch.searchsorted(inside, left[:, :, None], right=True).minimum(_last(weights))
        return block * BLOCK + place[:, :, 0]

    def take(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take out a token of each row, those at `places` [rows, 1]; with their logprobs before."""
        faint = self._masses.sum(1) < FAINT
        if bool(faint.any()):  # what is left may be all that there is now
            self._weigh(faint)
        ids = self.at(places)
        logprobs = self.logprobs(ids)
        self._rows.scatter_(1, ids, -torch.inf)
        self._weights.scatter_(1, ids, 0.0)
        block = ids // BLOCK
        weights = self._blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))
        self._masses.scatter_(1, block, weights.sum(2, dtype=torch.float64))
        return ids, logprobs


def _last(weights: torch.Tensor) -> torch.Tensor:
    """The last place with any weight along the last dimension, which is kept: sums round apart."""
    places = torch.arange(weights.shape[-1], device=weights.device)
    return torch.where(weights > 0, places, 0).amax(-1, keepdim=True)
