"""What is asked of logits, reduced on their device: the answer is copied, and not the row."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from lmpool.wants.distribution import scale

_UNDERFLOWS: Final = 1e-30
"""Below it float32 sums lose their terms."""
_BLOCK: Final = 64
"""Places of which first the greatest alone is looked at."""
_CACHED_BYTES: Final = 1 << 19
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
        cached = 2 * _CACHED_BYTES if top else _CACHED_BYTES  # to select takes many small steps
        step = min(step, max(1, cached // (4 * vocab)))
    temperature = scale(temperature)
    given = logits.gather(1, targets[:, None]) if rows is None else logits[rows, targets][:, None]
    given = given.float()
    ranks, largest, mass = logits.new_empty((3, size, 1), dtype=torch.float32)
    found: list[list[torch.Tensor]] = [[], [], [], []]
    block = logits.new_empty((min(step, size), vocab), dtype=torch.float32)
    for at in range(0, size, step):
        some = slice(at, min(at + step, size))
        few = (logits[some] if rows is None else logits.index_select(0, rows[some])).float()
        scratch = torch.ge(few, given[some], out=block[: len(few)])
        torch.sum(scratch, 1, True, out=ranks[some])
        torch.amax(few, 1, True, out=largest[some])
        _beside(few, largest[some], temperature, out=scratch)
        if token_ids is not None:
            found[0].append(scratch.gather(1, token_ids[some]))
        best = likeliest(few, top) if top else None
        if best is not None:
            found[1].append(best)
            found[2].append(scratch.gather(1, best))
        torch.sum(scratch.exp_(), 1, True, out=mass[some])
        if best is not None:
            rest = scratch.scatter_(1, best, 0.0).sum(1, True)
            found[3].append(_others(rest, few, best, largest[some], temperature))
    log_mass = mass.log_()
    ids, best, likely, others = (torch.cat(parts) if parts else None for parts in found)
    return Reduced(
        (_beside(given, largest, temperature) - log_mass)[:, 0],
        ranks[:, 0].to(torch.int32),  # counts are exact in float32 below 2**24
        None if ids is None else ids - log_mass,
        None if best is None else best.to(torch.int32),
        None if likely is None else likely - log_mass,
        None if others is None else (others - log_mass)[:, 0],
        (largest + log_mass)[:, 0],
    )


def _beside(
    logits: torch.Tensor,
    largest: torch.Tensor,
    temperature: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits beside the `largest` of their row [rows, 1] as 0, at this temperature."""
    beside = torch.sub(logits, largest, out=out)
    return beside if temperature == 1.0 else beside.div_(temperature)


def _others(
    mass: torch.Tensor,
    logits: torch.Tensor,
    best: torch.Tensor,
    largest: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """The log of the mass [rows, 1] of all but `best` of each row, beside `largest` as 1.

    Where it is too small to be summed beside that, it is summed beside the largest of those left.
    """
    few = mass[:, 0] < _UNDERFLOWS
    log_mass = mass.log_()
    if bool(few.any()):
        others = logits[few].scatter_(1, best[few], -torch.inf)
        top = others.amax(1, True)
        least = _beside(others, top, temperature, out=others).exp_().sum(1, keepdim=True).log_()
        least += (top - largest[few]) / temperature
        log_mass[few] = torch.where(top.isfinite(), least, -torch.inf)
    return log_mass


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
