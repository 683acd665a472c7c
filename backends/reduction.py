"""What is asked of logits, reduced on their device: the answer is copied, and not the row."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from lmpool.wants.distribution import scale

_UNDERFLOWS: Final = 1e-30
"""Below it float32 sums lose their terms."""
_BLOCK: Final = 64
"""Places of which first the greatest alone is looked at."""
_CACHED_BYTES: Final = 2 << 20
"""Of logits in float32 that a CPU goes over several times while they are in its cache."""


class Reduced(NamedTuple):
    """Scores of T rows, as `TextScores` has them and in its order, and the rows' `logsumexp` [T].

    Where that is not finite, the others mean nothing.
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    token_logprobs: torch.Tensor | None
    top_ids: torch.Tensor | None
    top_logprobs: torch.Tensor | None
    rest: torch.Tensor | None
    logsumexp: torch.Tensor


def score_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    top: int = 0,
    temperature: float = 1.0,
) -> Reduced:
    """The scores of `targets` [T] by logits [T, vocab], or by `rows` [T] of them.

    `token_ids` is int64 [T, n].
    """
    size, vocab = len(targets), logits.shape[1]
    step = len(logits)  # no more at a time than there are, however many ask for one
    if logits.device.type == "cpu":
        step = min(step, max(1, _CACHED_BYTES // (4 * vocab)))
    scratch = logits.new_empty((min(step, size), vocab), dtype=torch.float32)
    parts = []
    for at in range(0, size, step):
        some = slice(at, at + step)
        few = logits[some] if rows is None else logits.index_select(0, rows[some])
        ids = None if token_ids is None else token_ids[some]
        parts.append(_few(few.float(), targets[some], ids, top, scale(temperature), scratch))
    joined: list[Any] = [
        None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)
    ]
    return Reduced(*joined)


def _few(
    logits: torch.Tensor,
    targets: torch.Tensor,
    token_ids: torch.Tensor | None,
    top: int,
    temperature: float,
    scratch: torch.Tensor,
) -> Reduced:
    """The scores of as many rows as `scratch` has at most."""
    given = logits.gather(1, targets[:, None])
    scratch = torch.ge(logits, given, out=scratch[: len(logits)])
    ranks = scratch.sum(1).to(torch.int32)  # counts are exact in float32 below 2**24
    largest = logits.amax(1, True)
    torch.sub(logits, largest, out=scratch)
    if temperature != 1.0:
        scratch.div_(temperature)
    ids = None if token_ids is None else scratch.gather(1, token_ids)
    best = likeliest(logits, top) if top else None
    likely = None if best is None else scratch.gather(1, best)
    chosen = scratch.gather(1, targets[:, None])
    log_mass = scratch.exp_().sum(1, keepdim=True).log_()
    rest = None
    if best is not None:
        others = scratch.scatter_(1, best, 0.0).sum(1, keepdim=True)
        few = others[:, 0] < _UNDERFLOWS
        rest = (others.log_() - log_mass)[:, 0]
        if bool(few.any()):
            least = _rest(logits[few], best[few], largest[few], temperature)
            rest[few] = (least - log_mass[few])[:, 0]
    return Reduced(
        (chosen - log_mass)[:, 0],
        ranks,
        None if ids is None else ids - log_mass,
        None if best is None else best.to(torch.int32),
        None if likely is None else likely - log_mass,
        rest,
        (largest + log_mass)[:, 0],
    )


def _rest(
    logits: torch.Tensor, best: torch.Tensor, largest: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The log of the mass of all but `best` of each row [rows, 1], beside `largest` as 1: summed
    beside the largest of those left, where they are too small to be summed beside that."""
    others = logits.scatter(1, best, -torch.inf)
    top = others.amax(1, True)
    mass = others.sub_(top).div_(temperature).exp_().sum(1, keepdim=True).log_()
    mass += (top - largest) / temperature
    return torch.where(top.isfinite(), mass, -torch.inf)


def likeliest(values: torch.Tensor, k: int) -> torch.Tensor:
    """The places of the `k` greatest of each row, int64 [rows, k], equal ones by their place.

    They lie in the `k` blocks of the greatest maxima, equal ones by their place, or in the tail.
    """
    rows, size = values.shape
    blocks = size // _BLOCK
    if 2 * k >= blocks:
        return _greatest(values, torch.arange(size, device=values.device), k)
    whole = values[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).amax(2)
    chosen = _greatest(whole, torch.arange(blocks, device=values.device), k)[:, :, None]
    inside = (chosen * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(1)
    tail = torch.arange(blocks * _BLOCK, size, device=values.device).expand(rows, -1)
    places = torch.cat((inside, tail), 1)
    return places.gather(1, _greatest(values.gather(1, places), places, k))


def _greatest(values: torch.Tensor, places: torch.Tensor, k: int) -> torch.Tensor:
    """Where the `k` greatest of float32 [rows, n] are, equal ones by their `places` [rows, n]."""
    bits = (values + 0.0).view(torch.int32)  # there is one zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of these numbers
    return ((ordered.long() << 32) - places).topk(k).indices
