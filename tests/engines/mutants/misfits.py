"""Engines whose small answers are another request's, or that answer what they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.errors import EngineError, PromptFailed
from lmpool.wants import Choice, Draw, OfRow, Row, Tokens, Top, Want
from tests.engines.mutants.engines import Bent, Inner, Remembering
from tests.engines.mutants.reductions import DRAW, TOKENS, TOP, Kept, Reduced, tokens
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    VOCAB,
    ask,
    ask_rightly,
    bounded,
    check,
    prompts_of,
    reduced,
    request,
    requests_of,
    scenario,
)

SMALL: Final[tuple[Want, ...]] = (TOP, TOKENS, DRAW)


# --- whose answer it is ------------------------------------------------------------------------


@mutant("answers-kept-by-the-want-alone", reduced(*SMALL), forms=BOTH)
class KeptByWant(Kept):
    """An answer is the prompt's own."""

    def key(self, request: Request) -> Any:
        return request.want


def _of_two_adapters(engine: Engine) -> None:
    engine.add_adapter("a", "/adapters/a")
    asked = [request(n, [1, 2], by, want) for n, (by, want) in enumerate(
        (by, want) for by in (None, "a") for want in SMALL
    )]  # fmt: skip
    ask_rightly(engine, asked)


@mutant("answers-kept-without-the-adapter", scenario(_of_two_adapters), subtle=True)
class KeptWithoutAdapter(Kept):
    """An answer is by the adapter that was asked for."""

    def key(self, request: Request) -> Any:
        return request.want, request.tokens.tobytes()


@mutant("answers-kept-by-the-prompt-and-kind", reduced(*SMALL, Top(7), tokens(9)), subtle=True)
class KeptByPrompt(Kept):
    """A want is answered by its fields."""

    def key(self, request: Request) -> Any:
        return request.want.kind, request.tokens.tobytes(), request.adapter


@mutant(
    "answers-kept-by-the-last-tokens",
    reduced(*SMALL, prompts=([1, 2, 3, 4, 5], [9, 2, 3, 4, 5])),
    subtle=True,
)
class KeptByLastTokens(Kept):
    """An answer follows from the whole prompt."""

    def key(self, request: Request) -> Any:
        return request.want, request.tokens[-4:].tobytes(), request.adapter


@mutant("adapters-ignored-for-small-answers", scenario(_of_two_adapters), forms=BOTH, subtle=True)
class AdaptersIgnored(Reduced):
    """An answer is by the adapter that was asked for, as a row is."""

    def answered(self, request: Request, answer: Any) -> Any:
        assert isinstance(request.want, OfRow)
        return request.want.of_row(self.row(replace(request, adapter=None)))


@mutant("answers-of-the-neighbour", reduced(TOP), forms=BOTH, most=64)
class Neighbours(Remembering):
    """Of requests that want the same, each has its own answer."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        places = [
            n
            for n, o in enumerate(outcomes)
            if isinstance(self.asked[o.id].want, OfRow) and o.answer is not None
        ]
        for a, b in pairwise(places):
            if self.asked[outcomes[a].id].want == self.asked[outcomes[b].id].want:
                answers = outcomes[b].answer, outcomes[a].answer
                outcomes[a], outcomes[b] = (
                    replace(outcomes[n], answer=answer)
                    for n, answer in zip((a, b), answers, strict=True)
                )
        return super().handed(outcomes)


@mutant("ids-of-the-neighbour", reduced(TOP), forms=BOTH, most=64)
class NeighboursIds(Remembering):
    """The ids of an answer are its own, as its numbers are."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        tops = [o for o in outcomes if o.answer is not None and self._wants_top(o)]
        turned = [*tops[1:], *tops[:1]]
        ids = {o.id: other.answer.token_ids for o, other in zip(tops, turned, strict=True)}  # type: ignore[union-attr]
        found = [
            replace(o, answer=replace(o.answer, token_ids=ids[o.id]))  # type: ignore[arg-type, type-var]
            if o.id in ids and ids[o.id].size == o.answer.token_ids.size  # type: ignore[union-attr]
            else o
            for o in outcomes
        ]
        return super().handed(found)

    def _wants_top(self, outcome: Outcome) -> bool:
        return isinstance(self.asked[outcome.id].want, Top)


def _again(engine: Engine) -> None:
    first = requests_of(prompts_of(4), want=TOP)
    engine.submit(first)
    engine.cancel([each.id for each in first])
    ask(engine, requests_of(prompts_of(2), start=50))
    for want in (TOKENS, Row(), DRAW):
        ask_rightly(engine, requests_of(prompts_of(4), want=want))


@mutant("ids-keep-their-first-want", scenario(_again), forms=BOTH, subtle=True)
class IdsKeepTheirWant(Bent):
    """An id that was cancelled may stand for another want."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.wants: dict[bytes, Want] = {}

    def taken(self, request: Request) -> Request:
        if not isinstance(request.want, (OfRow, Row)) or len(self.wants) > 200:
            self.wants.clear()
            return request
        return replace(request, want=self.wants.setdefault(request.id, request.want))


@mutant("rows-instead-of-answers", reduced(TOP), forms=BOTH)
class RowsInstead(Bent):
    """Who asks for a few numbers has them, and no row."""

    def taken(self, request: Request) -> Request:
        return replace(request, want=Row()) if isinstance(request.want, OfRow) else request


@mutant("answers-beside-a-row-are-rows", reduced(*SMALL), subtle=True)
class RowsBesideRows(Bent):
    """Who asks for a few numbers has them, beside rows of the same prompt, too."""

    def submit(self, requests: Sequence[Request]) -> None:
        rows = {r.tokens.tobytes() for r in requests if isinstance(r.want, Row)}
        self.inner.submit(
            [replace(r, want=Row()) if r.tokens.tobytes() in rows else r for r in requests]
        )


def _cancelled(engine: Engine, number: int) -> None:
    asked = [request(1000 * number + n, [n % 200], None, TOP) for n in range(5)]
    engine.submit(asked)
    engine.cancel([each.id for each in asked])
    while engine.in_flight():
        engine.step()


@mutant("wants-of-cancelled-requests-are-kept", bounded(_cancelled), subtle=True)
class CancelledWantsKept(Remembering):
    """Nothing is kept of a request that was cancelled."""

    def cancel(self, ids: Any) -> None:
        self.inner.cancel(ids)


# --- what cannot be answered -------------------------------------------------------------------


def _misfits(*wants: Want) -> Any:
    """Each of these is refused alone; its company is answered."""

    def play(engine: Engine) -> None:
        good = requests_of(prompts_of(3), want=TOP, start=100)
        bad = [request(n, [1, 2], None, want) for n, want in enumerate(wants)]
        outcomes = ask(engine, [good[0], *bad, *good[1:]])
        for each, outcome in zip(good, [outcomes[0], *outcomes[-2:]], strict=True):
            check(each, outcome)
        for outcome in outcomes[1:-2]:
            assert isinstance(outcome.error, EngineError), outcome
            assert outcome.answer is None

    return scenario(play)


class _Mended(Bent):
    def taken(self, request: Request) -> Request:
        want = request.want
        if not isinstance(want, OfRow) or want.misfit(self.info.vocab_size) is None:
            return request
        return replace(request, want=self.mended(want))

    def mended(self, want: Any) -> Want:
        found: Want = want
        return found


@mutant("k-past-the-vocabulary-is-cut", _misfits(Top(VOCAB + 1)), forms=BOTH)
class TooManyCut(_Mended):
    """More tokens than there are cannot be the likeliest."""

    def mended(self, want: Any) -> Want:
        return replace(want, k=self.info.vocab_size) if isinstance(want, Top) else want


@mutant("ids-past-the-vocabulary-wrap", _misfits(tokens(1, VOCAB)), forms=BOTH)
class IdsWrap(_Mended):
    """Ids that the vocabulary does not have are refused."""

    def mended(self, want: Any) -> Want:
        if not isinstance(want, Tokens):
            return want  # type: ignore[no-any-return]
        ids = np.frombuffer(want.token_ids, "<u4") % self.info.vocab_size  # type: ignore[arg-type]
        return Tokens(ids.astype("<u4").tobytes())


@mutant(
    "draws-of-no-token-draw-any",
    _misfits(Draw(1, 1, allowed=Choice("mask", bytes(40)))),
    forms=BOTH,
)
class NothingAllowedIsAll(_Mended):
    """Where nothing may be drawn, nothing is."""

    def mended(self, want: Any) -> Want:
        return replace(want, allowed=None) if isinstance(want, Draw) else want


@mutant(
    "more-draws-than-tokens-are-with-replacement",
    _misfits(Draw(4, 1, 1.0, False, Choice.of([1, 2, 3], None, VOCAB))),
    subtle=True,
)
class TooManyDraws(Bent):
    """Without replacement no more tokens are drawn than there are."""

    def taken(self, request: Request) -> Request:
        want = request.want
        if not isinstance(want, Draw) or not isinstance(want.allowed, Choice):
            return request
        if want.allowed.misfit(self.info.vocab_size) is not None:
            return request
        few = int(want.allowed.members(self.info.vocab_size).sum()) < want.n
        return replace(request, want=replace(want, replacement=True)) if few else request


@mutant("wants-that-do-not-fit-raise", _misfits(Top(VOCAB + 1)))
class MisfitsRaise(Bent):
    """A want that cannot be answered becomes an outcome with an error."""

    def taken(self, request: Request) -> Request:
        wrong = isinstance(request.want, OfRow) and request.want.misfit(self.info.vocab_size)
        if wrong:
            raise PromptFailed(str(wrong))
        return request
