"""Engines that miscount, hand out twice, or forget whose an outcome is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.errors import PromptFailed
from lmpool.wants import Generate
from tests.engines.mutants.engines import Bent, Inner, Remembering, Wrapper
from tests.engines.mutants.life import WANT
from tests.engines.mutants.registry import BOTH, Make, mutant
from tests.engines.mutants.witnesses import (
    VOCAB,
    ask_rightly,
    prompts_of,
    request,
    requests_of,
    rows,
    run,
    scenario,
)


@mutant(
    "in-flight-counts-no-continuations",
    scenario(lambda engine: ask_rightly(engine, requests_of([[1], [2]], want=WANT))),
    forms=BOTH,
)
class CountsNoContinuations(Remembering):
    """`in_flight` counts continuations, or nobody would step."""

    def in_flight(self) -> int:
        drawing = sum(isinstance(r.want, Generate) for r in self.asked.values())
        return max(0, super().in_flight() - drawing)


def _bad_alone(engine: Engine) -> None:
    bad = request(1, [VOCAB + 5])
    engine.submit([bad])
    assert engine.in_flight() == 1
    outcome = run(engine, [bad.id])[bad.id]
    assert isinstance(outcome.error, PromptFailed)
    ask_rightly(engine, requests_of([[1]]))


@mutant("in-flight-counts-no-refusals", scenario(_bad_alone), forms="fed")
class CountsNoRefusals(Wrapper):
    """A refused request is in flight until its outcome is handed out."""

    def in_flight(self) -> int:
        return super().in_flight() - len(self.inner._outcomes)


@mutant("in-flight-counts-refusals-for-ever", scenario(_bad_alone), forms=BOTH)
class CountsRefusals(Wrapper):
    """A refused request whose outcome was handed out is not in flight."""

    refused = 0

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.refused += sum(o.error is not None for o in outcomes)
        return outcomes

    def in_flight(self) -> int:
        return super().in_flight() + self.refused


@mutant("outcomes-handed-out-twice-over-128", rows(prompts_of(129), prompts_of(3)), subtle=True)
class HandedOutTwice(Wrapper):
    """Every request has exactly one outcome."""

    again: list[Outcome] = []

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        found = [*self.again, *outcomes]
        self.again = outcomes[-1:] if len(outcomes) > 128 else []
        return found


@mutant("refusals-handed-out-twice", scenario(_bad_alone), forms=BOTH)
class RefusalsTwice(Wrapper):
    """Every request has exactly one outcome, also one that is refused."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [*outcomes, *(o for o in outcomes if o.error is not None)]


@mutant("steps-that-give-a-filler-outcome", rows(prompts_of(3)))
class FillerOutcome(Wrapper):
    """Outcomes are those of requests, not of what fills a batch of an odd size."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        filler = [replace(outcomes[-1], id=b"")] if len(outcomes) % 2 else []
        return [*outcomes, *filler]


def _named(*names: bytes) -> Callable[[Make], None]:
    return scenario(
        lambda engine: ask_rightly(engine, [request(n, [i]) for i, n in enumerate(names)])
    )


@mutant("ids-lose-their-trailing-zeros", _named(b"a\0", b"a\0\0", b"a"), forms=BOTH)
class LoseTrailingZeros(Bent):
    """An id is any bytes, zeros at its end among them."""

    def bend(self, outcome: Outcome) -> Outcome:
        return replace(outcome, id=bytes(np.array([outcome.id])[0]))


@mutant("ids-told-apart-by-eight-bytes", _named(b"digest--1", b"digest--2"), forms=BOTH)
class EightBytes(Remembering):
    """Ids that differ in any byte are two."""

    def submit(self, requests: Sequence[Request]) -> None:
        self.names = {**getattr(self, "names", {}), **{r.id[:8]: r.id for r in requests}}
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        super().handed(outcomes)
        found = [replace(o, id=self.names[o.id[:8]]) for o in outcomes]
        if not self.asked:
            self.names = {}
        return found


@mutant("ids-come-back-as-text", rows(prompts_of(2)))
class IdsAsText(Bent):
    """An outcome has the id of its request, as it was."""

    def bend(self, outcome: Outcome) -> Outcome:
        return replace(outcome, id=outcome.id.hex())


@mutant("ids-that-were-used-are-refused", rows(prompts_of(2), prompts_of(2, seed=1)))
class UsedIdsRefused(Wrapper):
    """An id is unique among requests in flight alone: the next batch may have the same."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.used: set[bytes] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        again = [r for r in requests if r.id in self.used]
        self.used |= {r.id for r in requests}
        super().submit([replace(r, tokens=r.tokens[:0]) if r in again else r for r in requests])
