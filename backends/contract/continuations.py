"""What is right of a continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.draws import Draws, Weights
from lmpool.backends.contract.left import Left
from lmpool.backends.contract.operations import Asked
from lmpool.backends.contract.reduced import SAME, Within, check_top, check_values, checked_numbers
from lmpool.backends.contract.subject import Adapter
from lmpool.backends.contract.truth import Rows, Truth
from lmpool.backends.engine import Outcome
from lmpool.uniforms import uniform
from lmpool.wants import MAX_SEED, Generate, Generation, Reduced, TopLogprobs

_FOLLOWS: Final = "a continuation is drawn from the model's rows, at its temperature, by its seed"
_REPEATS: Final = "one seed and prompt give one continuation, whatever the company"
_LEFT: Final = "no token is drawn that top_p, top_k and min_p leave out"
_ENDS: Final = "a continuation ends with the first EOS token or stop sequence, or at its bound"
_SAYS: Final = "finish_reason and ending say why a continuation ended"

_Item: TypeAlias = tuple[Asked, Adapter | None, Reduced | None]


class ContinuationJudge:
    """Judges continuations by the rows before each of their tokens."""

    def __init__(self) -> None:
        self._draws = Draws()
        self._streams: dict[object, tuple[int, ...]] = {}
        self._compared = 0
        self._unlike = 0

    def judge(self, items: Sequence[_Item], truth: Truth) -> None:
        """Raise `BrokenPromise` where one is not right."""
        drawn = [_checked(asked, answer, truth) for asked, _, answer in items]
        by_adapter: dict[Adapter | None, list[int]] = {}
        for place, (_, adapter, _) in enumerate(items):
            by_adapter.setdefault(adapter, []).append(place)
        for adapter, places in by_adapter.items():
            prefixes = [
                (*items[place][0].prompt, *drawn[place][:n])
                for place in places
                for n in range(len(drawn[place]))
            ]
            if not prefixes:
                continue
            rows, start = truth.rows(prefixes, adapter), 0
            for place in places:
                asked, _, answer = items[place]
                end = start + len(drawn[place])
                assert isinstance(answer, Generation)
                _check_numbers(asked, answer, rows[start:end], truth)
                self._follow(asked, adapter, drawn[place], rows[start:end], truth)
                start = end
        self._draws.check()
        expect(
            self._unlike <= 1 + self._compared // 40,
            _REPEATS,
            f"{self._unlike} of {self._compared} that were asked for again are others",
        )

    def _follow(
        self,
        asked: Asked,
        adapter: Adapter | None,
        drawn: tuple[int, ...],
        rows: Rows,
        truth: Truth,
    ) -> None:
        """See each token drawn from its row."""
        want, ends = asked.want, _ends(asked, truth)
        assert isinstance(want, Generate)
        logprob, sure = 0.0, True
        self._draws.begin()
        for step, (token, row) in enumerate(zip(drawn, rows, strict=True)):
            where = (f"token {token} at step {step} of", drawn, asked)
            if want.temperature == 0.0:
                best = float(row.max()) - 2 * truth.tolerance
                expect(float(row[token]) >= best, "greedy takes the likeliest token", *where)
                continue
            left = Left.of(row, want, truth.tolerance)
            expect(bool(left.may[token]), _LEFT, *where)
            if left.weights is None:  # rounding decides what may be drawn
                sure = False
                self._draws.begin()
                continue
            if want.seed is not None and not truth.suite.own_draws:
                place = uniform(want.seed, step)
                expect(_drawn_at(left.weights, token, place, want, truth), _FOLLOWS, *where)
                continue
            if ends:
                self._draws.end(left.weights, ends, token in ends)
            kind = f"at temperature {want.temperature:g}{_cut(want)}"
            logprob += self._draws.draw(left.weights, token, kind, want.seed is not None)
        if want.temperature > 0.0 and sure and (want.seed is None or truth.suite.own_draws):
            law = (want.temperature, want.top_p, want.top_k, want.min_p)
            self._repeat((asked.prompt, adapter, *law), want, drawn, logprob)

    def _repeat(self, key: object, want: Generate, drawn: tuple[int, ...], logprob: float) -> None:
        """Compare with what was drawn before by the same seed, and by others."""
        seed = None if want.seed is None else want.seed & MAX_SEED
        self._draws.stream(key, seed, list(drawn), logprob)
        if seed is None:
            return
        known = self._streams.get((key, seed))
        if known is not None:
            self._compared += 1
            common = min(len(known), len(drawn))
            self._unlike += known[:common] != drawn[:common]
        if known is None or len(drawn) > len(known):
            self._streams[key, seed] = drawn


def _checked(asked: Asked, answer: Any, truth: Truth) -> tuple[int, ...]:
    """The tokens of an answer, which end where they have to."""
    expect(
        isinstance(answer, Generation),
        "a continuation is answered with a Generation",
        type(answer),
        asked,
    )
    ids = answer.token_ids
    expect(
        isinstance(ids, np.ndarray) and str(ids.dtype) == "int32" and ids.ndim == 1,
        "a continuation's tokens are int32 [n]",
        getattr(ids, "dtype", type(ids)),
        getattr(ids, "shape", ""),
        asked,
    )
    tokens = tuple(ids.tolist())
    wrong = [token for token in tokens if not 0 <= token < truth.info.vocab_size]
    expect(not wrong, "tokens are of the vocabulary", wrong, asked)
    for n in range(len(tokens)):
        early = _end(asked, tokens[:n], truth)
        expect(early is None, _ENDS, f"{early} after {n} tokens of {tokens}:", asked)
    right = _end(asked, tokens, truth)
    expect(right is not None, _ENDS, f"it does not, with {tokens}:", asked)
    said = (answer.finish_reason, answer.ending)
    expect(said == right and type(said[1]) is int, _SAYS, f"{said}, not {right}: {tokens}", asked)
    return tokens


def _end(asked: Asked, tokens: tuple[int, ...], truth: Truth) -> tuple[str, int] | None:
    """Why a continuation ends after these, and how many of them are its ending."""
    want = asked.want
    assert isinstance(want, Generate)
    if tokens[-1:] and tokens[-1] in _ends(asked, truth):
        return "eos", 1
    found = [len(ids) for ids in want.stop_sequences if tokens[-len(ids) :] == ids]
    if found:
        return "stop", max(found)
    if len(tokens) == want.max_tokens:
        return "length", 0
    # The last row an engine can compute is that of its longest prompt.
    room = truth.info.max_prompt_tokens - len(asked.prompt) + 1
    return ("context", 0) if len(tokens) >= room else None


def _ends(asked: Asked, truth: Truth) -> frozenset[int]:
    want = asked.want
    assert isinstance(want, Generate)
    ids = truth.info.eos_token_ids if want.eos_token_ids is None else want.eos_token_ids
    return frozenset(ids)


def _cut(want: Generate) -> str:
    """What is left out, in words."""
    names = ("top_p", "top_k", "min_p")
    asked = zip(names, (want.top_p < 1, want.top_k > 0, want.min_p > 0), strict=True)
    return "".join(f" with {name}" for name, cut in asked if cut)


def _check_numbers(asked: Asked, answer: Generation, rows: Rows, truth: Truth) -> None:
    """See to it that the log-probabilities asked for are there, and are the model's."""
    want, tokens, top = asked.want, answer.token_ids, answer.top_logprobs
    assert isinstance(want, Generate)
    promise = "a continuation has the log-probabilities that were asked for, and no others"
    expect((answer.logprobs is not None) == want.logprobs, promise, "logprobs:", asked)
    expect((top is not None) == (want.top_logprobs > 0), promise, "top_logprobs:", asked)
    if answer.logprobs is not None:
        found = checked_numbers(answer.logprobs, tokens.size, asked)
        right = rows[np.arange(tokens.size), tokens].astype(np.float64)
        check_values(found, right, truth.tolerance, SAME, asked)
    if top is None:
        return
    within = Within(truth.tolerance, 2 * truth.tolerance)
    shape = (tokens.size, want.top_logprobs)
    forms = [(each.shape, str(each.dtype)) for each in top.arrays()]
    right_forms = [(shape, "int32"), (shape, "float32"), (shape[:1], "float32")]
    expect(forms == right_forms, promise, f"{forms} where {right_forms} is right:", asked)
    for step, row in enumerate(rows):
        rest = np.asarray(top.rest)[step]
        each = TopLogprobs(top.token_ids[step], top.logprobs[step], rest)
        check_top(each, want.top_logprobs, row.astype(np.float64), within, asked)


def _drawn_at(weights: Weights, token: int, place: float, want: Generate, truth: Truth) -> bool:
    """Whether a token lies at this place of the cumulative distribution.

    Rounding of rows within the tolerance moves it by this much at most.
    """
    slack = min(0.05, 2 * truth.tolerance / want.temperature)
    upto = float(weights[: token + 1].sum())
    return upto - float(weights[token]) - slack <= place <= upto + slack


def is_cut_short(outcome: Outcome, asked: Asked) -> bool:
    """Whether a continuation ended long before it had the tokens that were asked for."""
    want, answer = asked.want, outcome.answer
    if not isinstance(want, Generate) or not isinstance(answer, Generation):
        return True
    return answer.token_ids.size < want.max_tokens // 2
