"""Answers that follow from rows, reduced where the logits are, so that no row is copied.

An engine groups what it is asked by `alike`, has `reduce_logits` make numbers of each group, copies
these, and reads them by `outcome_of`: see `lmpool.backends.words`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from lmpool.backends.device import to_device
from lmpool.backends.drawing import Distributions
from lmpool.backends.engine import NextToken
from lmpool.backends.next_tokens import next_tokens
from lmpool.backends.reduction import likeliest
from lmpool.uniforms import uniforms
from lmpool.wants import Choice, Draw, Tokens, Top
from lmpool.wants.distribution import scale

Parts = tuple[torch.Tensor, ...]

_ROW_BYTES: Final = 64 << 20
"""Of rows in float32 that are reduced at once; several times as much is needed for that."""


def reduce_logits(
    logits: torch.Tensor, rows: torch.Tensor, wants: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the answers to wants that are `alike`, int32 [wants, words].

    `rows` [wants] are theirs of the `logits`. The second is float32 [wants]: a logsumexp where the
    logits make no row, and 0 where they make one.
    """
    size, vocab = len(wants), logits.shape[1]
    reduce, step = _reduction(wants, vocab, logits.device), max(1, _ROW_BYTES // (4 * vocab))
    words, scales = [], []
    for at in range(0, size, step):
        some = slice(at, at + step)
        few = logits.index_select(0, rows[some]).float()
        normal = torch.log_softmax(few, 1)
        # A row is one where a single token, the first, is impossible.
        scales.append(torch.where(normal.amax(1).isfinite(), 0.0, few[:, 0] - normal[:, 0]))
        parts = reduce(normal, some)
        words.append(torch.cat([part.reshape(len(few), -1).view(torch.int32) for part in parts], 1))
    return torch.cat(words), torch.cat(scales)


def _reduction(
    wants: Sequence[Any], vocab: int, device: torch.device
) -> Callable[[torch.Tensor, slice], Parts]:
    """What makes parts of answers of some of the rows, float32 [some, vocab]."""
    first = wants[0]
    if isinstance(first, Top):
        return lambda rows, _: _top(rows, first.k)
    if isinstance(first, NextToken):
        return lambda rows, some: _next(rows, wants[some])
    if isinstance(first, Tokens):
        ids = np.stack([np.frombuffer(want.token_ids, "<u4") for want in wants])
        given = to_device(ids.astype(np.int64), device)
        return lambda rows, some: (rows.gather(1, given[some]),)
    places = to_device(np.stack([uniforms(want.seed, want.n) for want in wants]), device)
    choices = [want.allowed for want in wants]
    may: torch.Tensor | None = None
    if isinstance(choices[0], Choice):
        may = to_device(np.stack([choice.members(vocab) for choice in choices]), device)
    return lambda rows, some: _drawn(first, rows, places[some], None if may is None else may[some])


def _top(rows: torch.Tensor, k: int) -> Parts:
    ids = likeliest(rows, k)
    others = rows.scatter(1, ids, -torch.inf)
    top = others.amax(1, True)
    mass = others.sub_(top).exp_().sum(1, dtype=torch.float64).log_()
    rest = torch.where(top[:, 0] == -torch.inf, -torch.inf, top[:, 0] + mass)
    return ids.int(), rows.gather(1, ids), rest.float()


def _next(rows: torch.Tensor, wants: Sequence[NextToken]) -> Parts:
    ids = next_tokens(rows, wants)
    top = wants[0].top_logprobs
    return ids.int(), rows.gather(1, ids), *(_top(rows, top) if top else ())


def _drawn(want: Draw, rows: torch.Tensor, places: torch.Tensor, may: torch.Tensor | None) -> Parts:
    some = rows.clone() if may is None else torch.where(may, rows, -torch.inf)
    possible = (some > -torch.inf).sum(1)
    below = (some.amax(1) - rows.amax(1)).double()
    if want.temperature == 0.0:
        ids = likeliest(some, 1 if want.replacement else want.n).expand(-1, want.n)
        proposals = places.new_zeros(places.shape)
        masses = torch.where(below < 0, -torch.inf, 0.0)
    else:
        heat = scale(want.temperature)
        left = Distributions(some, heat)
        masses = places.new_zeros(len(rows))
        if may is not None:
            everything = Distributions(rows, heat).masses
            masses = (left.masses.log() - everything.log())[:, 0] + below / want.temperature
        if want.replacement:
            ids = left.at(places)
            proposals = left.logprobs(ids)
        else:
            drawn = [left.take(place) for place in places.split(1, 1)]
            ids, proposals = (torch.cat(part, 1) for part in zip(*drawn, strict=True))
    return (
        ids.int(),
        rows.gather(1, ids),
        proposals.clamp_(max=0).float(),
        masses.clamp(max=0).float(),
        possible.int(),
    )
