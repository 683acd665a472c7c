"""Engines that lose requests, of many at once or in a long life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmpool.backends import Engine, Outcome, Request
from lmpool.errors import EngineBroken
from lmpool.wants import Generate
from tests.engines.mutants.engines import Remembering, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    ask_rightly,
    check,
    life,
    prompts_of,
    request,
    requests_of,
    rows,
    run,
    scenario,
)

WANT = Generate(6, (), 1.0, 4)


@mutant("requests-dropped-beyond-500", rows(prompts_of(501)), forms=BOTH, subtle=True)
class DroppedBeyond500(Wrapper):
    """Every request has an outcome, however many are submitted at once."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests[:500])


@mutant(
    "requests-dropped-beyond-500-in-flight",
    scenario(lambda engine: _in_pieces(engine)),
    subtle=True,
)
class DroppedBeyond500InFlight(Wrapper):
    """Every request has an outcome, however many are in flight."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests[: max(0, 500 - self.in_flight())])


def _in_pieces(engine: Engine) -> None:
    asked = requests_of(prompts_of(600))
    for start in range(0, 600, 100):
        engine.submit(asked[start : start + 100])
    found = run(engine, [each.id for each in asked])
    for each in asked:
        check(each, found[each.id])


@mutant("one-request-in-1000-has-no-outcome", life(1200), forms=BOTH, subtle=True)
class OneIn1000Lost(Wrapper):
    """Every request has an outcome, also the thousandth."""

    count = 0

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        first, self.count = self.count, self.count + len(outcomes)
        return [o for n, o in enumerate(outcomes, first + 1) if n % 1000]


@mutant("the-engine-breaks-after-3000-requests", life(3200), subtle=True)
class BreaksAfter3000(Wrapper):
    """An engine goes on as long as its worker lives."""

    count = 0

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.count += len(outcomes)
        if self.count > 3000:
            raise EngineBroken("no block is free")
        return outcomes


@mutant(
    "more-than-64-continuations-at-once-end-early",
    scenario(lambda engine: ask_rightly(engine, requests_of(prompts_of(66), want=WANT))),
    subtle=True,
)
class ManyContinuationsEndEarly(Wrapper):
    """Continuations have their length, however many are under way."""

    def submit(self, requests: Sequence[Request]) -> None:
        drawing = [r.id for r in requests if isinstance(r.want, Generate)]
        cut = set(drawing[64:])
        super().submit(
            [replace(r, want=replace(r.want, max_tokens=1)) if r.id in cut else r for r in requests]
        )


def _submit_twice(engine: Engine) -> None:
    first, second = requests_of(prompts_of(3)), requests_of(prompts_of(3, seed=1), start=10)
    engine.submit(first)
    engine.submit(second)
    engine.submit([])
    assert engine.in_flight() == 6
    found = run(engine, [each.id for each in (*first, *second)])
    for each in (*first, *second):
        check(each, found[each.id])


@mutant("what-is-submitted-takes-the-place-of-what-waits", scenario(_submit_twice))
class SubmitReplaces(Wrapper):
    """Requests are added to those that wait."""

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner._waiting = list(requests)


@mutant("submitting-nothing-breaks-the-engine", scenario(_submit_twice))
class EmptySubmitBreaks(Wrapper):
    """Submitting no requests does nothing."""

    empty = False

    def submit(self, requests: Sequence[Request]) -> None:
        self.empty |= not requests
        super().submit(requests)

    def step(self) -> Sequence[Outcome]:
        if self.empty:
            raise EngineBroken("max() arg is an empty sequence")
        return super().step()


def _own_list(engine: Engine) -> None:
    asked = requests_of(prompts_of(4))
    given = list(asked)
    engine.submit(given)
    given.clear()
    found = run(engine, [each.id for each in asked])
    for each in asked:
        check(each, found[each.id])


@mutant("submit-keeps-the-callers-list", scenario(_own_list), subtle=True)
class KeepsTheList(Wrapper):
    """The list that requests are submitted in stays the caller's, who may change it."""

    def submit(self, requests: Sequence[Request]) -> None:
        if self.inner._waiting:
            super().submit(requests)
        else:
            self.inner._waiting = requests


@mutant("stepping-while-idle-raises", scenario(lambda engine: _idle(engine)))
class IdleRaises(Wrapper):
    """A step with nothing in flight gives nothing."""

    def step(self) -> Sequence[Outcome]:
        if not self.in_flight():
            raise RuntimeError("nothing to run")
        return super().step()


def _idle(engine: Engine) -> None:
    assert engine.in_flight() == 0
    assert list(engine.step()) == []
    ask_rightly(engine, requests_of([[1]]))
    assert list(engine.step()) == []


def _rows_join(engine: Engine) -> None:
    long = requests_of(prompts_of(3), want=replace(WANT, max_tokens=12))
    engine.submit(long)
    pending = {each.id: each for each in long}
    for number in range(8):
        engine.submit(each := requests_of([[number, 5]], start=100 + number))
        pending |= {each[0].id: each[0]}
        for outcome in engine.step():
            check(pending.pop(outcome.id), outcome)
        assert engine.in_flight() == len(pending)
    found = run(engine, pending)
    for each in pending.values():
        check(each, found[each.id])


@mutant("continuations-lost-as-rows-join", scenario(_rows_join), forms=BOTH)
class LostAsRowsJoin(Remembering):
    """Rows join continuations under way, and end none."""

    def submit(self, requests: Sequence[Request]) -> None:
        going_on = [name for name, r in self.asked.items() if isinstance(r.want, Generate)]
        super().submit(requests)
        if len(going_on) > 2 and requests:
            self.cancel(going_on[-1:])


def _lengths(engine: Engine) -> None:
    lengths = (9, 3, 6, 1)
    ask_rightly(
        engine,
        [request(n, [n + 1], None, replace(WANT, max_tokens=m)) for n, m in enumerate(lengths)],
    )


@mutant("continuations-are-handed-out-in-the-order-they-came", scenario(_lengths), forms=BOTH)
class NamesInOrder(Remembering):
    """An outcome says whose it is, also where requests end in another order than they came."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        names = [name for name, each in self.asked.items() if isinstance(each.want, Generate)]
        drawn = [o for o in outcomes if o.answer is not None]
        renamed = dict(zip([o.id for o in drawn], names, strict=False))
        return super().handed([replace(o, id=renamed.get(o.id, o.id)) for o in outcomes])
