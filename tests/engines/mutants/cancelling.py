"""Engines that mix up or miscount as requests are cancelled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from lmpool.backends import Engine, Outcome, Request
from lmpool.wants import Generate
from tests.engines.mutants.engines import Inner, Remembering, Wrapper
from tests.engines.mutants.life import WANT
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    ask_rightly,
    check,
    prompts_of,
    requests_of,
    run,
    scenario,
)


def _cancelling(engine: Engine) -> None:
    """Some of many are cancelled, before they begin and while they run; the others are right."""
    asked = [
        *requests_of(prompts_of(6)),
        *requests_of(prompts_of(6, 3), want=WANT, start=10),
    ]
    by_id = {each.id: each for each in asked}
    engine.submit(asked)
    engine.cancel([asked[1].id, asked[7].id])
    waiting = {name: each for name, each in by_id.items() if each not in (asked[1], asked[7])}
    for number in range(60):
        for outcome in engine.step():
            assert outcome.id in by_id, outcome.id
            check(by_id[outcome.id], outcome)
            waiting.pop(outcome.id, None)
        if number == 1:
            engine.cancel({asked[8].id})
            waiting.pop(asked[8].id)
        if not engine.in_flight():
            break
    assert not waiting, len(waiting)
    assert engine.in_flight() == 0
    ask_rightly(engine, requests_of(prompts_of(4, seed=4), start=50))


CANCELLING = scenario(_cancelling)


@mutant("cancelled-requests-are-answered-under-another-id", CANCELLING, forms=BOTH)
class CancelledUnderAnotherId(Remembering):
    """What was cancelled has an outcome of its own, or none."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.cancelled: set[bytes] = set()

    def cancel(self, ids: Collection[bytes]) -> None:
        self.cancelled |= self.asked.keys() & set(ids)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        late = {o.id for o in outcomes} & self.cancelled
        self.cancelled -= late
        super().handed(outcomes)
        return [replace(o, id=o.id + b"'") if o.id in late else o for o in outcomes]


@mutant("cancelled-rows-are-given-to-the-next", CANCELLING, forms=BOTH)
class CancelledRowsToTheNext(Wrapper):
    """Right row, right prompt: also beside one that was cancelled."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.free: list[Request] = []
        self.waiting: dict[bytes, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting |= {r.id: r for r in requests}
        # Those that come behind take over the places of those that left, with their prompts.
        reused = [
            replace(self.free.pop(0), id=r.id)
            if self.free and not isinstance(r.want, Generate)
            else r
            for r in requests
        ]
        super().submit(reused)

    def cancel(self, ids: Collection[bytes]) -> None:
        gone = [self.waiting.pop(name) for name in ids if name in self.waiting]
        self.free.extend(r for r in gone if not isinstance(r.want, Generate))
        super().cancel(ids)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            self.waiting.pop(outcome.id, None)
        return outcomes


@mutant(
    "cancelling-moves-the-rows-of-those-behind",
    scenario(lambda engine: _cancel_first(engine)),
    forms=BOTH,
    subtle=True,
)
class CancellingMovesRows(Remembering):
    """Right row, right prompt: those behind a cancelled one keep their places."""

    gap = 0

    def cancel(self, ids: Collection[bytes]) -> None:
        self.gap += sum(self.asked.pop(name, None) is not None for name in ids)
        super().cancel(ids)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        shifted = list(super().handed(outcomes))
        rows = [o.row for o in outcomes if o.row is not None]
        if self.gap and len(rows) > 1:
            turned = iter(rows[1:] + rows[:1])
            shifted = [o if o.row is None else replace(o, row=next(turned)) for o in outcomes]
            self.gap = 0
        return shifted


def _cancel_first(engine: Engine) -> None:
    asked = requests_of(prompts_of(5))
    engine.submit(asked)
    engine.cancel([asked[0].id])
    found = run(engine, [each.id for each in asked[1:]])
    for each in asked[1:]:
        check(each, found[each.id])


@mutant("cancelling-takes-the-neighbour-along", CANCELLING, forms=BOTH)
class CancelTakesTheNeighbour(Remembering):
    """Cancelling ends what was named, and no other."""

    def cancel(self, ids: Collection[bytes]) -> None:
        behind = [after for name, after in pairwise(self.asked) if name in set(ids)]
        super().cancel([*ids, *behind])


@mutant("cancelling-a-continuation-ends-all-continuations", CANCELLING, subtle=True)
class CancelEndsAllContinuations(Remembering):
    """Cancelling a continuation leaves the others."""

    def cancel(self, ids: Collection[bytes]) -> None:
        drawing = {name for name, r in self.asked.items() if isinstance(r.want, Generate)}
        super().cancel(drawing | set(ids) if drawing & set(ids) else ids)


@mutant("cancelling-what-runs-restarts-the-others", CANCELLING, forms=BOTH, subtle=True)
class CancelRestarts(Remembering):
    """Cancelling changes nothing of the others (here they draw anew, under the next seed)."""

    def cancel(self, ids: Collection[bytes]) -> None:
        super().cancel(ids)
        for name in ids:
            self.asked.pop(name, None)
        others = [r for r in self.asked.values() if isinstance(r.want, Generate)]
        super().cancel([r.id for r in others])
        self.inner.submit(
            [replace(r, want=replace(r.want, seed=(r.want.seed or 0) + 1)) for r in others]
        )


def _cancel_unknown(engine: Engine) -> None:
    asked = [*requests_of(prompts_of(3)), *requests_of(prompts_of(3), want=WANT, start=10)]
    engine.submit(asked)
    engine.cancel([b"nobody", b""])
    assert engine.in_flight() == 6
    found = run(engine, [each.id for each in asked])
    engine.cancel([each.id for each in asked])
    assert engine.in_flight() == 0
    for each in asked:
        check(each, found[each.id])
    ask_rightly(engine, requests_of(prompts_of(3, seed=1)))


UNKNOWN = scenario(_cancel_unknown)


@mutant("cancelling-an-unknown-id-drops-all", UNKNOWN, forms=BOTH)
class UnknownDropsAll(Remembering):
    """Cancelling what is not there does nothing."""

    def cancel(self, ids: Collection[bytes]) -> None:
        super().cancel(ids if set(ids) <= self.asked.keys() else list(self.asked))


@mutant("cancelling-an-unknown-id-raises", UNKNOWN, forms=BOTH)
class UnknownRaises(Remembering):
    """Cancelling what is not there, or has just ended, does nothing."""

    def cancel(self, ids: Collection[bytes]) -> None:
        for name in ids:
            del self.asked[name]
        super().cancel(ids)


@mutant("cancelling-an-unknown-id-is-counted", UNKNOWN, forms=BOTH)
class UnknownCounted(Wrapper):
    """`in_flight` counts those without an outcome, whatever was cancelled."""

    cancelled = 0

    def cancel(self, ids: Collection[bytes]) -> None:
        before = super().in_flight()
        super().cancel(ids)
        self.cancelled += len(set(ids)) - (before - super().in_flight())

    def in_flight(self) -> int:
        count = super().in_flight()
        return max(0, count - self.cancelled) if count else 0


@mutant("cancelling-takes-only-sets", CANCELLING)
class CancelTakesSets(Remembering):
    """Any collection of ids may be cancelled, as the worker's lists."""

    def cancel(self, ids: Collection[bytes]) -> None:
        super().cancel(self.asked.keys() & ids if isinstance(ids, set) else _not_a_set(ids))


def _not_a_set(ids: Collection[bytes]) -> Collection[bytes]:
    raise TypeError(f"unhashable type: {type(ids).__name__!r}")


@mutant("cancelled-requests-stay-in-flight", CANCELLING, forms=BOTH)
class CancelledStayInFlight(Wrapper):
    """What was cancelled and will have no outcome is not in flight: a worker would never idle."""

    cancelled = 0

    def cancel(self, ids: Collection[bytes]) -> None:
        before = super().in_flight()
        super().cancel(ids)
        self.cancelled += before - super().in_flight()

    def in_flight(self) -> int:
        return super().in_flight() + self.cancelled


def _cancel_and_ask_again(engine: Engine) -> None:
    asked = requests_of(prompts_of(3))
    engine.submit(asked)
    engine.cancel([each.id for each in asked])
    while engine.in_flight():
        engine.step()
    ask_rightly(engine, asked)


@mutant("cancelled-ids-are-never-answered-again", scenario(_cancel_and_ask_again), forms=BOTH)
class NeverAnsweredAgain(Wrapper):
    """Who cancelled a request may ask for it again: a job's id is that of its prompt."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.cancelled: set[bytes] = set()

    def cancel(self, ids: Collection[bytes]) -> None:
        self.cancelled |= set(ids)
        super().cancel(ids)

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([r for r in requests if r.id not in self.cancelled])
