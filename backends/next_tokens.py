"""The next tokens of continuations, drawn from rows where they are, as `sample_token` draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lmpool.backends.device import to_device
from lmpool.backends.engine import NextToken
from lmpool.backends.reduction import likeliest


def next_tokens(rows: torch.Tensor, wants: Sequence[NextToken]) -> torch.Tensor:
    """The token that follows each row, float32 [rows, vocab], as its want has it: int64 [rows, 1].

    Of a row without any probability it means nothing.
    """
    device = rows.device
    greedy = likeliest(rows, 1)
    if all(want.temperature == 0.0 for want in wants):
        return greedy

    def each(numbers: Sequence[float]) -> torch.Tensor:
        return to_device(np.array(numbers, np.float64)[:, None], device)

    warmth = each([want.temperature for want in wants])
    weights = rows.double().sub_(rows.amax(1, True)).div_(warmth).exp_()
    weights[rows == rows.amax(1, True)] = 1.0  # at temperature 0, too
    leave_out(weights, rows, wants)
    cumulative = weights.cumsum(1)
    at = each([want.place for want in wants]) * cumulative[:, -1:]
    # A product may round up to the total, past every token.
    places = torch.arange(rows.shape[1], device=device)
    last = torch.where(weights > 0, places, 0).amax(1, True)
    drawn = torch.searchsorted(cumulative, at, right=True).minimum(last)
    return torch.where(warmth > 0.0, drawn, greedy)


def leave_out(weights: torch.Tensor, rows: torch.Tensor, wants: Sequence[NextToken]) -> None:
    """Set the weights of tokens to 0 that may not be drawn; that of the likeliest is 1."""
    device, vocab = rows.device, rows.shape[1]

    def each(numbers: Sequence[float], dtype: type) -> torch.Tensor:
        return to_device(np.array(numbers, dtype)[:, None], device)

    if any(want.min_p > 0.0 for want in wants):
        weights[weights < each([want.min_p for want in wants], np.float64)] = 0.0
    bounds = [want.top_k if 0 < want.top_k < vocab else vocab for want in wants]
    few = max((bound for bound in bounds if bound < vocab), default=0)
    if few:
        likely = rows.topk(few).values
        least = likely.gather(1, each([min(bound, few) - 1 for bound in bounds], np.int64))
        bounded = each([bound < vocab for bound in bounds], np.bool_)
        weights[bounded & (rows < least)] = 0.0
    if any(want.top_p < 1.0 for want in wants):
        share = each([want.top_p for want in wants], np.float64)
        order = rows.sort(dim=1, descending=True, stable=True).indices
        sorted_weights = weights.gather(1, order)
        before = sorted_weights.cumsum(1) - sorted_weights
        kept = (before < share * weights.sum(1, True)) | (share == 1.0)
        weights.scatter_(1, order, sorted_weights * kept)
