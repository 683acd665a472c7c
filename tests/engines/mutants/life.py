"""Engines that lose, mix up or miscount requests, or that are not alone in their process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.errors import EngineBroken, PromptFailed
from lmpool.wants import Generate
from tests.engines.mutants.engines import Bent, Wrapper
from tests.engines.mutants.registry import BOTH, Make, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    OPTIONS,
    VOCAB,
    ask,
    ask_rightly,
    check,
    life,
    prompt_of,
    prompts_of,
    refused,
    request,
    requests_of,
    rows,
    run,
    scenario,
)

WANT = Generate(6, (), 1.0, 4)


class Remembering(Wrapper):
    """Knows the requests in flight."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.asked: dict[bytes, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked |= {r.id: r for r in requests}
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            self.asked.pop(outcome.id, None)
        return outcomes


# --- many at once, and many in a life ------------------------------------------------------------


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
        going_on = [id for id, r in self.asked.items() if isinstance(r.want, Generate)]
        super().submit(requests)
        if len(going_on) > 2 and requests:
            self.cancel(going_on[-1:])


@mutant(
    "rows-that-join-continuations-are-handed-out-in-their-order",
    scenario(_rows_join),
    forms="fed",
    subtle=True,
)
class NamesInOrder(Remembering):
    """An outcome says whose it is, also where requests end in another order than they came."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        kinds = {True: list[bytes](), False: list[bytes]()}
        for id, asked in self.asked.items():
            kinds[isinstance(asked.want, Generate)].append(id)
        return super().handed([replace(o, id=kinds[o.row is None].pop(0)) for o in outcomes])


# --- cancelling ----------------------------------------------------------------------------------


def _cancelling(engine: Engine) -> None:
    """Some of many are cancelled, before they begin and while they run; the others are right."""
    asked = [
        *requests_of(prompts_of(6)),
        *requests_of(prompts_of(6, 3), want=WANT, start=10),
    ]
    by_id = {each.id: each for each in asked}
    engine.submit(asked)
    engine.cancel([asked[1].id, asked[7].id])
    waiting = {id: each for id, each in by_id.items() if each not in (asked[1], asked[7])}
    for number in range(60):
        for outcome in engine.step():
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

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.cancelled: set[bytes] = set()

    def cancel(self, ids: Collection[bytes]) -> None:
        self.cancelled |= self.asked.keys() & set(ids)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        late = {o.id for o in outcomes} & self.cancelled
        self.cancelled -= late
        super().handed(outcomes)
        return [replace(o, id=o.id[::-1]) if o.id in late else o for o in outcomes]


@mutant("cancelled-rows-are-given-to-the-next", CANCELLING, forms=BOTH)
class CancelledRowsToTheNext(Wrapper):
    """Right row, right prompt: also beside one that was cancelled."""

    def __init__(self, inner) -> None:
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
        gone = [self.waiting.pop(id) for id in ids if id in self.waiting]
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
        self.gap += sum(1 for id in ids if self.asked.pop(id, None) is not None)
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
        names = list(self.asked)
        behind = [names[n + 1] for n, id in enumerate(names[:-1]) if id in set(ids)]
        super().cancel([*ids, *behind])


@mutant("cancelling-a-continuation-ends-all-continuations", CANCELLING, subtle=True)
class CancelEndsAllContinuations(Remembering):
    """Cancelling a continuation leaves the others."""

    def cancel(self, ids: Collection[bytes]) -> None:
        drawing = {id for id, r in self.asked.items() if isinstance(r.want, Generate)}
        super().cancel(drawing | set(ids) if drawing & set(ids) else ids)


@mutant("cancelling-what-runs-restarts-the-others", CANCELLING, forms=BOTH, subtle=True)
class CancelRestarts(Remembering):
    """Cancelling changes nothing of the others (here they draw anew, under the next seed)."""

    def cancel(self, ids: Collection[bytes]) -> None:
        super().cancel(ids)
        for id in ids:
            self.asked.pop(id, None)
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
        for id in ids:
            del self.asked[id]
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

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.cancelled: set[bytes] = set()

    def cancel(self, ids: Collection[bytes]) -> None:
        self.cancelled |= set(ids)
        super().cancel(ids)

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([r for r in requests if r.id not in self.cancelled])


# --- counting and handing out --------------------------------------------------------------------


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


@mutant("steps-that-give-a-filler-outcome", rows(prompts_of(3)), subtle=True)
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

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.used: set[bytes] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        again = [r for r in requests if r.id in self.used]
        self.used |= {r.id for r in requests}
        super().submit([replace(r, tokens=r.tokens[:0]) if r in again else r for r in requests])


# --- what cannot be run --------------------------------------------------------------------------


TOO_LONG, TOO_LARGE, EMPTY = prompt_of(LONGEST + 1), [1, VOCAB, 2], []
REFUSED = refused([TOO_LONG, TOO_LARGE, EMPTY, [2**32 - 1]])


class Sorting(Wrapper):
    """Looks for what cannot be run before the right engine does."""

    def bad(self, request: Request) -> bool:
        tokens, info = request.tokens, self.info
        return not 0 < tokens.size <= info.max_prompt_tokens or tokens.max() >= info.vocab_size


@mutant("submitting-a-bad-prompt-raises", REFUSED, forms=BOTH)
class BadPromptRaises(Sorting):
    """A request that cannot be run becomes an outcome with an error."""

    def submit(self, requests: Sequence[Request]) -> None:
        if any(map(self.bad, requests)):
            raise PromptFailed("a prompt that cannot be run")
        super().submit(requests)


@mutant("a-bad-prompt-fails-its-batch", REFUSED, forms=BOTH)
class BadPromptFailsAll(Sorting):
    """One bad prompt fails alone."""

    def submit(self, requests: Sequence[Request]) -> None:
        bad = any(map(self.bad, requests))
        super().submit([replace(r, tokens=r.tokens[:0]) for r in requests] if bad else requests)


@mutant("a-bad-prompt-has-no-outcome", REFUSED, forms=BOTH)
class BadPromptDropped(Sorting):
    """A request that cannot be run becomes an outcome with an error."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([r for r in requests if not self.bad(r)])


@mutant("a-bad-prompt-breaks-the-engine", REFUSED)
class BadPromptBreaks(Wrapper):
    """A worker does not die of one bad prompt."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        if any(o.error is not None for o in outcomes):
            raise EngineBroken("device-side assert triggered")
        return outcomes


@mutant("a-bad-prompt-moves-the-rows-behind-it", REFUSED, subtle=True)
class BadPromptMovesRows(Wrapper):
    """Right row, right prompt: also behind one that is refused."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        rows = [o.row for o in outcomes if o.row is not None]
        if len(rows) == len(outcomes) or len(rows) < 2:
            return outcomes
        turned = iter(rows[1:] + rows[:1])
        return [o if o.row is None else replace(o, row=next(turned)) for o in outcomes]


@mutant("errors-that-are-text", REFUSED)
class ErrorsAreText(Wrapper):
    """An outcome's error is an `EngineError`."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [o if o.error is None else replace(o, error=str(o.error)) for o in outcomes]  # type: ignore[arg-type]


@mutant("errors-that-say-the-engine-broke", REFUSED, subtle=True)
class ErrorsSayBroken(Wrapper):
    """A prompt that cannot be run is `PromptFailed`, and nothing broke."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [
            o if o.error is None else replace(o, error=ValueError(str(o.error))) for o in outcomes
        ]  # type: ignore[arg-type]


class Mended(Bent):
    """Runs something else instead of what cannot be run."""

    def taken(self, request: Request) -> Request:
        return replace(request, tokens=np.asarray(self.mended(request.tokens), np.uint32))

    def mended(self, tokens):
        return tokens


@mutant("empty-prompts-are-the-beginning-of-a-text", refused([EMPTY]), forms=BOTH)
class EmptyIsBos(Mended):
    """An empty prompt is refused."""

    def mended(self, tokens):
        return tokens if tokens.size else [0]


@mutant("prompts-that-are-too-long-lose-their-beginning", refused([TOO_LONG]), forms=BOTH)
class TooLongCut(Mended):
    """A prompt that is too long is refused, not cut."""

    def mended(self, tokens):
        return tokens[-self.info.max_prompt_tokens :]


@mutant("prompts-that-are-too-long-lose-their-end", refused([TOO_LONG]))
class TooLongCutAtTheEnd(Mended):
    """A prompt that is too long is refused, not cut."""

    def mended(self, tokens):
        return tokens[: self.info.max_prompt_tokens]


@mutant("ids-past-the-vocabulary-are-the-last", refused([TOO_LARGE]), forms=BOTH)
class TooLargeClipped(Mended):
    """A token id that the vocabulary lacks is refused."""

    def mended(self, tokens):
        return np.minimum(tokens, self.info.vocab_size - 1)


@mutant("ids-past-the-vocabulary-taken-from-its-beginning", refused([[1, 2**32 - 1]]), subtle=True)
class TooLargeWraps(Mended):
    """A token id that the vocabulary lacks is refused, also one that a signed integer takes for -1."""

    def mended(self, tokens):
        size = self.info.vocab_size
        return np.where(tokens >= 2**31, size - (2**32 - tokens.astype(np.int64)), tokens)


@mutant("longest-prompts-refused", rows([prompt_of(LONGEST)]), forms=BOTH)
class LongestRefused(Bent):
    """A prompt of `max_prompt_tokens` is run."""

    def taken(self, request: Request) -> Request:
        longest = request.tokens.size == self.info.max_prompt_tokens
        return replace(request, tokens=request.tokens[:0]) if longest else request


@mutant("last-id-of-the-vocabulary-refused", rows([[1, VOCAB - 1]]), subtle=True)
class LastIdRefused(Bent):
    """Every id below `vocab_size` is a token, the last one, too."""

    def taken(self, request: Request) -> Request:
        last = bool((request.tokens == self.info.vocab_size - 1).any())
        return replace(request, tokens=request.tokens[:0]) if last else request


# --- several engines in one process --------------------------------------------------------------


def _two(make: Make) -> None:
    first = make(**OPTIONS)
    first.add_adapter("a", "/adapters/a")
    ask_rightly(first, requests_of([[1, 2]]))
    second = make(**OPTIONS)
    ask_rightly(second, requests_of([[3, 4]]))
    unknown = ask(second, requests_of([[3, 4]], "a"))[0]
    assert isinstance(unknown.error, PromptFailed)
    ask_rightly(first, requests_of([[1, 2]], "a"))
    second.close()
    ask_rightly(first, requests_of([[1, 2], [5]]))
    first.close()
    first.close()


@mutant("opening-a-second-engine-closes-the-first", _two, forms=BOTH)
class SecondClosesFirst(Wrapper):
    """Engines of one process leave each other alone."""

    newest: ClassVar[dict[str, Any]] = {}

    def __init__(self, inner) -> None:
        super().__init__(inner)
        other = self.newest.get("engine")
        if other is not None:
            other.inner.close()
        self.newest["engine"] = self

    def close(self) -> None:
        if self.newest.get("engine") is self:
            del self.newest["engine"]
        super().close()


@mutant("closing-an-engine-closes-all", _two, forms=BOTH)
class ClosingClosesAll(Wrapper):
    """Engines of one process end one by one."""

    all: ClassVar[list[Any]] = []

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.all.append(inner)

    def close(self) -> None:
        for inner in self.all:
            inner.close()
        self.all.clear()


@mutant("adapters-shared-by-all-engines", _two, subtle=True)
class SharedAdapters(Wrapper):
    """An adapter is loaded in one engine, not in every one of its process."""

    shared: ClassVar[dict[str, str]] = {}

    def __init__(self, inner) -> None:
        super().__init__(inner)
        inner.adapters = self.shared


@mutant(
    "a-second-engines-requests-are-in-flight-in-the-first",
    lambda make: _two_apart(make),
    subtle=True,
)
class SharedCount(Wrapper):
    """`in_flight` counts an engine's own requests."""

    counts: ClassVar[dict[str, int]] = {"all": 0}

    def submit(self, requests: Sequence[Request]) -> None:
        self.counts["all"] += len(requests)
        super().submit(requests)

    def cancel(self, ids: Collection[bytes]) -> None:
        before = super().in_flight()
        super().cancel(ids)
        self.counts["all"] -= before - super().in_flight()

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.counts["all"] -= len(outcomes)
        return outcomes

    def in_flight(self) -> int:
        return self.counts["all"]


def _two_apart(make: Make) -> None:
    first, second = make(**OPTIONS), make(**OPTIONS)
    waiting = requests_of([[1]])
    first.submit(waiting)
    try:
        assert second.in_flight() == 0
        ask_rightly(second, requests_of([[2]]))
    finally:
        run(first, [each.id for each in waiting])


@mutant("closing-twice-raises", _two)
class ClosingTwiceRaises(Wrapper):
    """A closed engine may be closed again, as at a worker's end after a failure."""

    closed = False

    def close(self) -> None:
        if self.closed:
            raise EngineBroken("the engine was closed")
        self.closed = True
        super().close()


@mutant("rows-end-with-their-engine", lambda make: _rows_outlive(make), forms=BOTH, subtle=True)
class RowsEndWithTheirEngine(Wrapper):
    """Rows that were handed out outlive the engine."""

    last: Sequence[np.ndarray] = ()

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        given = [o if o.row is None else replace(o, row=o.row.copy()) for o in outcomes]
        self.last = [o.row for o in given if o.row is not None] or self.last
        return given

    def close(self) -> None:
        for row in self.last:
            row[:] = 0
        super().close()


def _rows_outlive(make: Make) -> None:
    engine = make(**OPTIONS)
    asked = requests_of(prompts_of(3))
    outcomes = ask(engine, asked)
    engine.close()
    for each, outcome in zip(asked, outcomes, strict=True):
        check(each, outcome)
