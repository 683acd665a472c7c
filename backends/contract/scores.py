"""What is right of the scores of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.operations import Asked, Prompt
from lmpool.backends.contract.prompts import Random
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.want_reference import Answered, WantReference
from lmpool.backends.engine import EngineInfo
from lmpool.wants import PositionIds, Score, TextScores, TopLogprobs

Rows = npt.NDArray[np.float64]

_SCORES: Final = "scores are the log-probabilities of a text's own tokens"
_RANKS: Final = "a rank is how many tokens have at least that log-probability"
_TOP: Final = "the likeliest tokens of each position come, likeliest first"
_BAD: Final = 0.06
"""The share of wants that an engine must refuse."""
_ROW_BYTES: Final = 32 << 20


class ScoreReference(WantReference[Score]):
    """Judges each position of a text by the row before it."""

    def draw(self, random: Random, prompt: Prompt, adapter: Adapter | None, truth: Truth) -> Score:
        vocab, size = truth.info.vocab_size, max(2, len(prompt))
        if random.random() < _BAD:
            return _misfit(random, size, vocab)
        start = 1 if random.random() < 0.4 else int(random.integers(1, size))
        top = 0 if random.random() < 0.5 else int(random.choice((1, 3, 20, vocab)))
        temperature = 1.0 if random.random() < 0.6 else float(random.choice((0.4, 1.5, 30.0)))
        kind, count = random.random(), int(random.integers(1, 5))
        if kind < 0.5:
            return Score(start, min(top, vocab), None, temperature)
        if kind < 0.75:
            return Score(start, min(top, vocab), _ids(random, count, vocab), temperature)
        each = PositionIds(count, _ids(random, count * (size - start), vocab))
        return Score(start, min(top, vocab), each, temperature)

    def refuses(self, want: Score, info: EngineInfo) -> bool:
        return want.misfit(info.vocab_size) is not None

    def judge(self, answered: Sequence[Answered], truth: Truth) -> None:
        for each in answered:
            want, scores = each.asked.want, each.outcome.answer
            assert isinstance(want, Score)
            _check_form(each.asked, want, scores)
            assert isinstance(scores, TextScores)
            for some, rows in _rows(each, want, truth):
                _Judge(each.asked, want, scores, truth.tolerance).check(some, rows)


class _Judge:
    """Compares the scores of one text with rows."""

    def __init__(self, asked: Asked, want: Score, scores: TextScores, tolerance: float) -> None:
        self._asked = asked
        self._want = want
        self._scores = scores
        # A low temperature has differences grow.
        self._within = tolerance * max(1.0, 2 / want.temperature)
        self._near = 2 * tolerance

    def check(self, some: slice, rows: Rows) -> None:
        """`rows`, float64 [positions, vocab], are those before `some` positions."""
        text, scores = np.array(self._asked.prompt), self._scores
        at, targets = np.arange(len(rows)), text[self._want.start :][some]
        given = rows[at, targets][:, None]
        fewest = (rows >= given + self._near).sum(1) + 1  # and itself
        most = (rows >= given - self._near).sum(1)
        ranks = scores.ranks[some]
        expect(
            bool(((fewest <= ranks) & (ranks <= most)).all()),
            _RANKS,
            f"{ranks} where {fewest} to {most} are right:",
            self._asked,
        )
        tempered = _normalized(rows / self._want.temperature)
        self._compare(scores.logprobs[some], tempered[at, targets], _SCORES)
        wanted = self._want.ids_of(len(scores.logprobs))
        if wanted is not None and scores.token_logprobs is not None:
            right = np.take_along_axis(tempered, wanted[some].astype(np.int64), 1)
            self._compare(scores.token_logprobs[some], right, _SCORES)
        if scores.top_logprobs is not None:
            self._check_top(scores.top_logprobs, some, tempered)

    def _check_top(self, top: TopLogprobs, some: slice, rows: Rows) -> None:
        ids, k = top.token_ids[some], top.token_ids.shape[1]
        best = -np.sort(-rows, axis=1)
        self._compare(top.logprobs[some], best[:, :k], _TOP)
        self._compare(top.logprobs[some], np.take_along_axis(rows, ids.astype(np.int64), 1), _TOP)
        distinct = all(np.unique(each).size == k for each in ids)
        expect(distinct, _TOP, "one came twice:", self._asked)
        others = np.exp(best[:, k:]).sum(1)
        error = np.abs(np.exp(np.asarray(top.rest)[some].astype(np.float64)) - others)
        expect(
            bool((error <= self._within).all()),
            "rest is the mass of all others",
            f"off by {error.max():.3g}:",
            self._asked,
        )

    def _compare(self, found: npt.NDArray[np.float32], right: Rows, promise: str) -> None:
        error = np.abs(found - right)
        bad = ~(error <= self._within) & ~((found == -np.inf) & (right == -np.inf))
        expect(
            not bad.any(),
            promise,
            f"off by {np.nanmax(error):.3g} nats ({int(bad.sum())} of {bad.size}):",
            self._asked,
        )


def _rows(answered: Answered, want: Score, truth: Truth) -> Iterator[tuple[slice, Rows]]:
    """The right rows before the scored positions, a few at a time."""
    prompt = answered.asked.prompt
    most = max(1, _ROW_BYTES // truth.info.vocab_size // 8)
    for start in range(want.start, len(prompt), most):
        stop = min(start + most, len(prompt))
        rows = truth.rows([prompt[:n] for n in range(start, stop)], answered.adapter)
        yield slice(start - want.start, stop - want.start), rows.astype(np.float64)


def _check_form(asked: Asked, want: Score, scores: object) -> None:
    promise = "a text has a score for each of its tokens from the start asked for on"
    expect(isinstance(scores, TextScores), promise, f"{type(scores)}:", asked)
    assert isinstance(scores, TextScores)
    right = want.blank(len(asked.prompt) - want.start)
    shapes = [(array.shape, array.dtype) for array in right.arrays()]
    found = [(array.shape, array.dtype) for array in scores.arrays()]
    expect(found == shapes, promise, f"{found} where {shapes} is right:", asked)


def _normalized(logits: Rows) -> Rows:
    logits = logits - logits.max(1, keepdims=True)
    found: Rows = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return found


def _ids(random: Random, count: int, vocab: int) -> bytes:
    return random.integers(0, vocab, count).astype("<u4").tobytes()


def _misfit(random: Random, size: int, vocab: int) -> Score:
    """One that no text of so many tokens can be asked."""
    beyond = np.array([0, vocab + int(random.integers(3))], "<u4").tobytes()
    bad = (
        Score(size),
        Score(2**20),
        Score(top_logprobs=vocab + 1),
        Score(token_ids=beyond),
        Score(token_ids=PositionIds(2, beyond * (size - 1))),
        Score(token_ids=PositionIds(1, _ids(random, size, vocab))),
    )
    return bad[int(random.integers(len(bad)))]
