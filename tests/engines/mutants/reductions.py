"""Engines that answer something else than what a row says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.mock import mock_row
from lmpool.wants import Choice, Draw, Draws, OfRow, Tokens, Top, TopLogprobs
from tests.engines.mutants.engines import F32, Bent, Inner, Remembering
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    VOCAB,
    ask_rightly,
    prompts_of,
    reduced,
    request,
    scenario,
)


def tokens(*ids: int) -> Tokens:
    """The want of some ids, as it travels."""
    return Tokens(np.array(ids, "<u4").tobytes())


def choice(allowed: Sequence[int] | None = None, excluded: Sequence[int] | None = None) -> Choice:
    """A set of tokens, as it travels."""
    found = Choice.of(allowed, excluded, VOCAB)
    assert found is not None
    return found


TOP: Final = Top(5)
TOKENS: Final = tokens(3, 299, 3, 7)
DRAW: Final = Draw(12, 7, 0.8)
SOME: Final = replace(DRAW, allowed=choice(range(0, 300, 2)))
FEW: Final = replace(DRAW, allowed=choice([2, 250, 4]))
MOST: Final = replace(DRAW, n=60, temperature=0.4, allowed=choice(None, [*range(5), 222]))
ONCE: Final = replace(DRAW, replacement=False)


class Reduced(Remembering):
    """Changes what wants of rows are answered with."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        changed = [self._changed(outcome) for outcome in outcomes]
        super().handed(outcomes)
        return changed

    def _changed(self, outcome: Outcome) -> Outcome:
        request = self.asked.get(outcome.id)
        if request is None or outcome.answer is None or not isinstance(request.want, OfRow):
            return outcome
        return replace(outcome, answer=self.answered(request, outcome.answer))

    def answered(self, request: Request, answer: Any) -> Any:
        return answer

    def row(self, request: Request) -> F32:
        return mock_row(request.tokens, self.info.vocab_size, request.adapter)


class Wanted(Bent):
    """Answers another want than the one that was asked for."""

    def taken(self, request: Request) -> Request:
        if not isinstance(request.want, Draw):
            return request
        return replace(request, want=self.instead(request.want))

    def instead(self, want: Draw) -> Draw:
        return want


# --- the likeliest tokens ----------------------------------------------------------------------


class _Top(Reduced):
    def answered(self, request: Request, answer: Any) -> Any:
        if not isinstance(answer, TopLogprobs):
            return answer
        return self.top(answer, self.row(request))

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        return answer


@mutant("top-tokens-by-their-ids", reduced(TOP), forms=BOTH)
class TopById(_Top):
    """The likeliest tokens come likeliest first."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        ids = np.sort(answer.token_ids)
        return replace(answer, token_ids=ids, logprobs=row[ids])


@mutant("top-tokens-likeliest-last", reduced(TOP))
class TopBackwards(_Top):
    """The likeliest tokens come likeliest first."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        return replace(
            answer, token_ids=answer.token_ids[::-1].copy(), logprobs=answer.logprobs[::-1].copy()
        )


def _by_larger_ids(row: F32, k: int) -> Any:
    backwards = np.argsort(-row[::-1], kind="stable")
    return (row.size - 1 - backwards[:k]).astype(np.int32)


def _between_equals(engine: Engine) -> None:
    """The first of two equally likely tokens is asked for, and then all tokens."""
    for prompt in prompts_of(290):
        likely = np.sort(mock_row(prompt, VOCAB))[::-1]
        places = np.flatnonzero(likely[1:] == likely[:-1]) + 1
        if places.size:
            wants = [Top(int(places[0])), Top(VOCAB)]
            ask_rightly(engine, [request(n, prompt, None, want) for n, want in enumerate(wants)])
            return
    raise AssertionError("no two tokens are equally likely")


EQUALS: Final = scenario(_between_equals)


@mutant("equally-likely-tokens-by-the-larger-id", EQUALS, forms=BOTH, subtle=True)
class TiesByLargerId(_Top):
    """Equally likely tokens come by their ids."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        return replace(answer, token_ids=_by_larger_ids(row, answer.token_ids.size))


@mutant("the-last-of-equally-likely-tokens-gets-in", EQUALS, subtle=True)
class TiesAtTheEnd(_Top):
    """Of equally likely tokens the first ones are among the k, also where k cuts them."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        found = _by_larger_ids(row, answer.token_ids.size)
        order = np.lexsort((found, -row[found]))
        return replace(answer, token_ids=found[order])


@mutant("rest-forgotten", reduced(TOP), forms=BOTH)
class RestForgotten(_Top):
    """`rest` is the mass of all others."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        return replace(answer, rest=np.float32(-np.inf))


@mutant("rest-is-what-the-likeliest-have", reduced(TOP))
class RestOfTheOthers(_Top):
    """`rest` is the mass of all others, not of these."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        mass = np.exp(answer.logprobs, dtype=np.float64).sum()
        return replace(answer, rest=np.float32(np.log(mass)))


@mutant("rest-by-subtraction", reduced(Top(VOCAB - 1)), subtle=True)
class RestBySubtraction(_Top):
    """`rest` is summed over the tail: 1 less the rest of it is mostly rounding."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        if answer.token_ids.size < row.size // 2:
            return answer
        mass = 1 - np.exp(answer.logprobs).sum(dtype=np.float32)
        return replace(answer, rest=np.log(np.maximum(mass, np.float32(1e-9))))


@mutant("top-logprobs-in-bfloat16", reduced(TOP), subtle=True)
class TopInBfloat16(_Top):
    """Log-probabilities are normalized in float32."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        short = (answer.logprobs.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return replace(answer, logprobs=short)


@mutant("top-ids-as-int64", reduced(TOP), forms=BOTH)
class TopIdsAsInt64(_Top):
    """The ids of an answer are int32."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        return replace(answer, token_ids=answer.token_ids.astype(np.int64))  # type: ignore[arg-type]


@mutant("no-more-than-16-likeliest", reduced(Top(20)), forms=BOTH, subtle=True)
class NoMoreThan16(_Top):
    """As many come as were asked for."""

    def top(self, answer: TopLogprobs, row: F32) -> TopLogprobs:
        return replace(answer, token_ids=answer.token_ids[:16], logprobs=answer.logprobs[:16])


# --- given tokens ------------------------------------------------------------------------------


class _Tokens(Reduced):
    def answered(self, request: Request, answer: Any) -> Any:
        if not isinstance(request.want, Tokens):
            return answer
        return self.of(np.frombuffer(request.want.token_ids, "<u4"), self.row(request))  # type: ignore[arg-type]

    def of(self, ids: Any, row: F32) -> F32:
        return row[ids]


@mutant("tokens-by-their-ids", reduced(TOKENS), forms=BOTH)
class TokensById(_Tokens):
    """Log-probabilities come in the order of the ids that were given."""

    def of(self, ids: Any, row: F32) -> F32:
        return row[np.sort(ids)]


@mutant("tokens-of-the-neighbours", reduced(TOKENS))
class NeighboursTokens(_Tokens):
    """They are those of the ids that were given."""

    def of(self, ids: Any, row: F32) -> F32:
        return row[(ids + 1) % row.size]


@mutant("tokens-that-come-twice-once", reduced(TOKENS), subtle=True)
class TokensOnce(_Tokens):
    """An id may come twice."""

    def of(self, ids: Any, row: F32) -> F32:
        return row[np.array(list(dict.fromkeys(ids.tolist())))]


@mutant("the-last-token-is-nothing", reduced(tokens(5, VOCAB - 1)), forms=BOTH, subtle=True)
class LastTokenIsNothing(_Tokens):
    """The last id of the vocabulary is a token."""

    def of(self, ids: Any, row: F32) -> F32:
        return np.where(ids == row.size - 1, np.float32(-np.inf), row[ids])


@mutant("tokens-normalized-over-themselves", reduced(TOKENS))
class TokensAmongThemselves(_Tokens):
    """Log-probabilities are normalized over the whole vocabulary."""

    def of(self, ids: Any, row: F32) -> F32:
        some = row[ids]
        total: F32 = some - np.log(np.exp(some).sum())
        return total


# --- draws -------------------------------------------------------------------------------------

_INSTEAD: Final[dict[str, tuple[str, Callable[[Draw], Draw], Draw]]] = {
    "draws-ignore-what-is-allowed": (
        "Only what is allowed is drawn.",
        lambda w: replace(w, allowed=None),
        FEW,
    ),
    "draws-ignore-masks": (
        "A mask holds as ids do.",
        lambda w: (
            replace(w, allowed=None) if w.allowed and w.allowed.form == "mask" else w  # type: ignore[union-attr]
        ),
        SOME,
    ),
    "draws-ignore-what-is-excluded": (
        "What is excluded is not drawn.",
        lambda w: (
            replace(w, allowed=None) if w.allowed and w.allowed.form == "but" else w  # type: ignore[union-attr]
        ),
        MOST,
    ),
    "draws-without-the-seed": (
        "A seed decides what is drawn.",
        lambda w: replace(w, seed=1),
        DRAW,
    ),
    "draws-by-32-bits-of-the-seed": (
        "All bits of a seed count.",
        lambda w: replace(w, seed=(w.seed or 0) & 0xFFFFFFFF),
        replace(DRAW, seed=(5 << 32) + 1),
    ),
    "draws-at-temperature-1": (
        "Tokens are drawn at the temperature asked for.",
        lambda w: replace(w, temperature=1.0 if w.temperature else 0.0),
        DRAW,
    ),
    "greedy-draws-at-temperature-1": (
        "Temperature 0 draws the likeliest token.",
        lambda w: replace(w, temperature=w.temperature or 1.0),
        replace(DRAW, temperature=0.0),
    ),
    "draws-always-with-replacement": (
        "Without replacement a token is drawn once.",
        lambda w: replace(w, replacement=True),
        replace(ONCE, temperature=0.2),
    ),
    "draws-never-with-replacement": (
        "With replacement each draw is from all tokens.",
        lambda w: replace(w, replacement=w.allowed is not None),
        replace(DRAW, temperature=0.2),
    ),
}


def _instead_of(breaks: str, other: Callable[[Draw], Draw]) -> type[Wanted]:
    class Instead(Wanted):
        def instead(self, want: Draw) -> Draw:
            return other(want)

    Instead.__doc__ = breaks
    Instead.__module__ = __name__
    return Instead


for _name, (_breaks, _other, _shown) in _INSTEAD.items():
    mutant(_name, reduced(_shown), forms=BOTH)(_instead_of(_breaks, _other))


class _Drawn(Reduced):
    def answered(self, request: Request, answer: Any) -> Any:
        if not isinstance(answer, Draws):
            return answer
        assert isinstance(request.want, Draw)
        return self.drawn(answer, request.want, self.row(request))

    def drawn(self, answer: Draws, want: Draw, row: F32) -> Draws:
        return answer


@mutant("log-mass-0", reduced(SOME), forms=BOTH)
class LogMassZero(_Drawn):
    """`log_mass` is that of what may be drawn."""

    def drawn(self, answer: Draws, want: Draw, row: F32) -> Draws:
        return replace(answer, log_mass=np.float32(0))


@mutant("log-mass-at-temperature-1", reduced(SOME), subtle=True)
class LogMassAtOne(_Drawn):
    """`log_mass` is that at the temperature of the draws."""

    def drawn(self, answer: Draws, want: Draw, row: F32) -> Draws:
        if not isinstance(want.allowed, Choice):
            return answer
        some = row[want.allowed.members(row.size)]
        return replace(answer, log_mass=np.float32(np.log(np.exp(some.astype(np.float64)).sum())))


@mutant("draws-with-logprobs-at-the-temperature", reduced(DRAW), forms=BOTH)
class LogprobsAtTheTemperature(_Drawn):
    """`logprobs` are the model's, at temperature 1."""

    def drawn(self, answer: Draws, want: Draw, row: F32) -> Draws:
        return replace(answer, logprobs=answer.proposal_logprobs)


@mutant("proposals-of-the-model", reduced(SOME))
class ProposalsOfTheModel(_Drawn):
    """`proposal_logprobs` are those of what was drawn from."""

    def drawn(self, answer: Draws, want: Draw, row: F32) -> Draws:
        return replace(answer, proposal_logprobs=answer.logprobs)


@mutant("proposals-as-if-with-replacement", reduced(ONCE), subtle=True)
class ProposalsWithReplacement(_Drawn):
    """Without replacement, `proposal_logprobs` are of what was left."""

    def drawn(self, answer: Draws, want: Draw, row: F32) -> Draws:
        if want.replacement or want.temperature == 0.0 or want.allowed is not None:
            return answer
        scaled = row.astype(np.float64) / want.temperature
        scaled -= np.log(np.exp(scaled).sum())
        proposals = scaled[answer.token_ids].astype(np.float32)
        return replace(answer, proposal_logprobs=proposals)


@mutant("draws-sorted-by-id", reduced(ONCE))
class DrawsSorted(_Drawn):
    """Tokens come in the order in which they are drawn."""

    def drawn(self, answer: Draws, want: Draw, row: F32) -> Draws:
        order = np.argsort(answer.token_ids)
        return Draws(
            answer.token_ids[order],
            answer.logprobs[order],
            answer.proposal_logprobs[order],
            answer.log_mass,
        )


@mutant("one-draw-for-all", reduced(DRAW), subtle=True)
class OneDrawForAll(_Drawn):
    """Each token has a draw of its own."""

    def drawn(self, answer: Draws, want: Draw, row: F32) -> Draws:
        if not want.replacement:
            return answer
        return Draws(
            np.full_like(answer.token_ids, answer.token_ids[0]),
            np.full_like(answer.logprobs, answer.logprobs[0]),
            np.full_like(answer.proposal_logprobs, answer.proposal_logprobs[0]),
            answer.log_mass,
        )


class Kept(Reduced):
    """Answers that are kept by less than what decides them."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.kept: dict[Any, Any] = {}

    def key(self, request: Request) -> Any:
        return request.want, request.tokens.tobytes(), request.adapter

    def answered(self, request: Request, answer: Any) -> Any:
        if len(self.kept) > 30:  # or the memory would tell
            self.kept.clear()
        return self.kept.setdefault(self.key(request), answer)
