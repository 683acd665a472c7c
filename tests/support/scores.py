"""Scores of texts, made up and judged by the rows that they follow from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract import ask
from lmpool.backends.engine import Outcome, Request
from lmpool.wants import Score, TextScores

F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.uint32]

NEAR = 1e-5
"""Tokens whose log-probabilities are as near may stand in either order."""


def random_score(rng: np.random.Generator, size: int, vocab: int) -> Score:
    """Any want of scores that a text of so many tokens may be asked."""
    start = 1 if rng.random() < 0.3 else int(rng.integers(1, size))
    top = 0 if rng.random() < 0.5 else int(rng.choice([1, 3, vocab]))
    temperature = 1.0 if rng.random() < 0.6 else float(rng.choice([0.3, 2.5]))
    kind, ids = rng.random(), None
    if kind < 0.3:
        ids = rng.integers(0, vocab, int(rng.integers(1, 6))).tolist()
    elif kind < 0.6:
        ids = rng.integers(0, vocab, (size - start, int(rng.integers(1, 4))))
    return Score(start, top, ids, temperature)


def score_all(
    engine: Any,
    texts: Sequence[Ids],
    wants: Sequence[Score] | None,
    logits_of: Callable[[Ids], F64],
    adapter: str | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Have an engine score texts, by default each as some random want says, and judge that.

    `logits_of` gives those of a text that are right, [len - 1, vocab].
    """
    rng = np.random.default_rng(len(texts))
    chosen = wants or [random_score(rng, text.size, engine.info.vocab_size) for text in texts]
    requests = [
        Request(b"%d" % n, text, adapter, want.checked(engine.info))
        for n, (text, want) in enumerate(zip(texts, chosen, strict=True))
    ]
    for request, outcome in zip(requests, ask(engine, requests), strict=True):
        check_scores(outcome, request, logits_of(request.tokens), tolerance)


def log_softmax(logits: F64, temperature: float = 1.0) -> F64:
    """Of each row, in float64."""
    scaled = logits / temperature
    scaled = scaled - scaled.max(-1, keepdims=True)
    found: F64 = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return found


def check_scores(outcome: Outcome, request: Request, logits: F64, tolerance: float = 1e-4) -> None:
    """Raise where these are not the scores of a text, by its logits [len - 1, vocab]."""
    want, text, scores = request.want, request.tokens.astype(np.int64), outcome.answer
    assert isinstance(want, Score)
    assert isinstance(scores, TextScores), outcome.error
    logits = logits[want.start - 1 :]
    rows, targets = log_softmax(logits, want.temperature), text[want.start :]
    at = np.arange(targets.size)
    assert (scores.logprobs.dtype, scores.ranks.dtype) == (np.float32, np.int32)
    assert scores.logprobs.shape == scores.ranks.shape == targets.shape
    assert np.abs(scores.logprobs - rows[at, targets]).max() < tolerance
    given = log_softmax(logits)[at, targets][:, None]
    near = max(NEAR, tolerance / 10)
    fewest = (log_softmax(logits) >= given + near).sum(1) + 1  # and itself
    most = (log_softmax(logits) >= given - near).sum(1)
    assert ((fewest <= scores.ranks) & (scores.ranks <= most)).all()
    wanted = want.ids_of(targets.size)
    assert (wanted is None) == (scores.token_logprobs is None)
    if wanted is not None and scores.token_logprobs is not None:
        expected = np.take_along_axis(rows, wanted.astype(np.int64), 1)
        assert np.abs(scores.token_logprobs - expected).max() < tolerance
    assert (want.top_logprobs == 0) == (scores.top_logprobs is None)
    if scores.top_logprobs is not None:
        check_top(scores, rows, want.top_logprobs, tolerance)


def check_top(scores: TextScores, rows: F64, k: int, tolerance: float) -> None:
    """Raise where these are not the likeliest `k` of each row."""
    top = scores.top_logprobs
    assert top is not None
    assert (top.token_ids.shape, top.token_ids.dtype) == ((len(rows), k), np.int32)
    best = -np.sort(-rows, axis=1)
    assert np.abs(top.logprobs - best[:, :k]).max() < tolerance
    chosen = np.take_along_axis(rows, top.token_ids.astype(np.int64), 1)
    assert np.abs(top.logprobs - chosen).max() < tolerance
    assert all(np.unique(ids).size == k for ids in top.token_ids)
    rest = np.asarray(top.rest)
    assert rest.shape == (len(rows),)
    if k == rows.shape[1]:
        assert (rest == -np.inf).all()
    else:
        with np.errstate(divide="ignore"):
            expected = np.log(np.exp(best[:, k:]).sum(1))
        assert np.abs(np.exp(rest) - np.exp(expected)).max() < tolerance
        assert np.abs(rest - expected).max() < max(tolerance, 1e-3)
