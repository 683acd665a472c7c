"""Answers that follow from rows, reduced where MLX has the logits, so that no row is copied."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from lmpool.backends.engine import NextToken, Outcome, Request
from lmpool.backends.mlx.drawing import Distributions, places_of
from lmpool.backends.mlx.model import mx
from lmpool.backends.mlx.next_tokens import next_tokens
from lmpool.backends.mlx.reduction import integers, likeliest, processor, to_host, top_of
from lmpool.backends.words import alike, asked_of_row, outcome_of
from lmpool.uniforms import uniforms
from lmpool.wants import Choice, Draw, Tokens, Top
from lmpool.wants.distribution import scale

Parts = tuple[Any, ...]

_ROW_BYTES: Final = 64 << 20
"""Of rows in float32 that are reduced at once; several times as much is needed for that."""


def reduced(asked: Sequence[tuple[int, Request]], logits: Any, logsumexp: Any) -> Iterator[Outcome]:
    """The outcomes of requests, each beside its row of logits [rows, vocab].

    `logsumexp` float32 [rows] is theirs.
    """
    kinds: dict[Hashable, list[tuple[int, Request]]] = {}
    for place, request in asked:
        kinds.setdefault(alike(asked_of_row(request)), []).append((place, request))
    most = max(1, _ROW_BYTES // (4 * logits.shape[1]))
    for same in kinds.values():
        for start in range(0, len(same), most):
            yield from _reduced(same[start : start + most], logits, logsumexp)


def _reduced(
    asked: Sequence[tuple[int, Request]], logits: Any, logsumexp: Any
) -> Iterator[Outcome]:
    places = mx.array([place for place, _ in asked])
    scales = logsumexp[places]
    rows = logits[places].astype(mx.float32) - scales[:, None]
    parts = reduce_rows(rows, [asked_of_row(request) for _, request in asked])
    flat = [part.reshape(len(rows), -1).view(mx.int32) for part in parts]
    words = to_host(mx.concatenate(flat, axis=1))
    for (_, request), answer, total in zip(asked, words, scales.tolist(), strict=True):
        yield outcome_of(request, answer, total)


def reduce_rows(rows: Any, wants: Sequence[Any]) -> Parts:
    """The parts of the answers to wants that are `alike`, each [wants, ...].

    `rows` are their log-probabilities, float32 [wants, vocab].
    """
    first = wants[0]
    if isinstance(first, NextToken):
        ids = next_tokens(rows, wants)
        top = top_of(rows, first.top_logprobs) if first.top_logprobs else ()
        return (ids, mx.take_along_axis(rows, ids, axis=1), *top)
    if isinstance(first, Top):
        return top_of(rows, first.k)
    if isinstance(first, Tokens):
        ids = np.stack([np.frombuffer(want.token_ids, "<u4") for want in wants])
        return (mx.take_along_axis(rows, integers(ids), axis=1),)
    may = None
    if isinstance(first.allowed, Choice):
        may = mx.array(np.stack([want.allowed.members(rows.shape[1]) for want in wants]))
    return _drawn(replace(first, allowed=None), [want.seed for want in wants], rows, may)


def _drawn(want: Draw, seeds: Sequence[int], rows: Any, may: Any) -> Parts:
    some = rows if may is None else mx.where(may, rows, -mx.inf)
    below = some.max(axis=1) - rows.max(axis=1)
    if want.temperature == 0.0:
        ids = likeliest(some, 1 if want.replacement else want.n)
        ids = mx.broadcast_to(ids, (len(rows), want.n))
        proposals = mx.zeros(ids.shape)
        masses = mx.where(below < 0, -mx.inf, 0.0)
    else:
        heat = scale(want.temperature)
        left = Distributions(some, heat)
        masses = mx.zeros(len(rows))
        if may is not None:
            share = left.log_mass() - Distributions(rows, heat).log_mass()
            with processor():
                below = below.astype(mx.float64) / want.temperature
                masses = (share + below).astype(mx.float32)
        places = places_of(np.stack([uniforms(seed, want.n) for seed in seeds]))
        if want.replacement:
            ids = left.at(places)
            proposals = left.logprobs(ids)
        else:
            ids, proposals = left.without_replacement(places)
    return (
        ids,
        mx.take_along_axis(rows, ids, axis=1),
        mx.minimum(proposals, 0.0),
        mx.minimum(masses, 0.0),
        (some > -mx.inf).sum(axis=1),
    )
