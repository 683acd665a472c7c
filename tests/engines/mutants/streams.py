"""Engines that tell a stream wrongly, or go on wrongly behind what was begun of it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.engine import Part
from lmpool.wants import Generation, Stream
from tests.engines.mutants.engines import Bent, Inner, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import check, check_parts, drawn, request, scenario

STREAM = Stream(12, (), 0.8, 3, logprobs=True, top_logprobs=2)


def generation(tokens: Sequence[int]) -> Generation:
    """A part that has these alone."""
    return Generation(np.array(tokens, np.int32), 0, "length")


def told(engine: Engine) -> None:
    """Three streams, two of them begun elsewhere: told in order, without a gap, while drawn."""
    plain = replace(STREAM, logprobs=False, top_logprobs=0)
    first = request(1, [1, 2, 3], want=STREAM)
    others = [request(n, [n, 5], want=replace(plain, seed=n)) for n in (2, 3)]
    begun = [
        replace(other, begun=tuple(generation(part) for part in (tokens[:2], tokens[2:5])))
        for other, tokens in zip(others, map(drawn, others), strict=True)
    ]
    asked = {each.id: each for each in (first, *begun)}
    upto = {each.id: sum(part.token_ids.size for part in each.begun) for each in asked.values()}
    parts: dict[bytes, list[Part]] = {id_: [] for id_ in asked}
    engine.submit(list(asked.values()))
    outcomes: dict[bytes, Outcome] = {}
    while len(outcomes) < len(asked):
        for outcome in engine.step():
            assert outcome.id not in outcomes
            outcomes[outcome.id] = outcome
        for part in engine.parts():
            assert part.id not in outcomes, "told after its end"
            assert part.start == upto[part.id]
            assert part.drawn.token_ids.size > 0
            upto[part.id] += part.drawn.token_ids.size
            parts[part.id].append(part)
    for id_, each in asked.items():
        check(each, outcomes[id_])
        answer: Any = outcomes[id_].answer
        assert parts[id_], "nothing was told before the end"
        assert upto[id_] < answer.token_ids.size
        for part in parts[id_]:
            rest = answer.behind(part.start)
            for mine, whole in zip(part.drawn.arrays(), rest.arrays(), strict=True):
                check_parts(mine, whole[: len(mine)])
    assert not engine.parts()


TOLD = scenario(told)

# --- what is told --------------------------------------------------------------------------------


@mutant("parts-are-told-again", TOLD, forms=BOTH)
class ToldAgain(Wrapper):
    """The parts of a stream follow each other: none is there twice."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self._last: list[Part] = []

    def parts(self) -> Sequence[Part]:
        found = list(super().parts())
        again, self._last = self._last, found
        return again + found


@mutant("a-part-is-left-out", TOLD, forms=BOTH)
class PartLeftOut(Wrapper):
    """The parts of a stream follow each other without a gap."""

    _count = 0

    def parts(self) -> Sequence[Part]:
        found = list(super().parts())
        self._count += bool(found)
        return [] if self._count % 4 == 2 else found


@mutant("parts-are-counted-from-one", TOLD)
class CountedFromOne(Wrapper):
    """A part says how many tokens come before it."""

    def parts(self) -> Sequence[Part]:
        return [replace(part, start=part.start + 1) for part in super().parts()]


@mutant("parts-are-counted-without-what-was-begun", TOLD)
class CountedWithoutBegun(Bent):
    """What was begun elsewhere comes before the first part."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self._begun: dict[bytes, int] = {}

    def taken(self, request: Request) -> Request:
        self._begun[request.id] = sum(part.token_ids.size for part in request.begun)
        return request

    def parts(self) -> Sequence[Part]:
        return [replace(p, start=p.start - self._begun.get(p.id, 0)) for p in super().parts()]


@mutant("parts-are-those-of-another", TOLD, forms=BOTH)
class PartsOfAnother(Wrapper):
    """A part is of the stream whose id it bears."""

    def parts(self) -> Sequence[Part]:
        found = list(super().parts())
        drawn_next = [part.drawn for part in found[1:] + found[:1]]
        return [replace(part, drawn=d) for part, d in zip(found, drawn_next, strict=True)]


@mutant("nothing-is-told-before-the-end", TOLD, forms=BOTH)
class NothingTold(Wrapper):
    """What is drawn of a stream leaves the engine before it has ended."""

    def parts(self) -> Sequence[Part]:
        super().parts()
        return []


@mutant("the-end-is-told-too", TOLD)
class EndTold(Wrapper):
    """The last token of a stream comes with its answer, and nothing after it."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self._streams: set[bytes] = set()
        self._ended: list[Part] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._streams.update(r.id for r in requests if isinstance(r.want, Stream))
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self._ended = [
            Part(o.id, o.answer.token_ids.size - 1, o.answer.behind(o.answer.token_ids.size - 1))
            for o in outcomes
            if o.id in self._streams
            and isinstance(o.answer, Generation)
            and o.answer.token_ids.size
        ]
        return outcomes

    def parts(self) -> Sequence[Part]:
        return [*super().parts(), *self._ended]


@mutant("parts-have-other-numbers", TOLD)
class OtherNumbers(Wrapper):
    """A part has the log-probabilities that the answer has."""

    def parts(self) -> Sequence[Part]:
        return [
            part
            if part.drawn.logprobs is None
            else replace(part, drawn=replace(part.drawn, logprobs=part.drawn.logprobs * 2))
            for part in super().parts()
        ]


@mutant("parts-have-no-top", TOLD)
class NoTop(Wrapper):
    """A part has the likeliest tokens where they are asked for."""

    def parts(self) -> Sequence[Part]:
        return [replace(p, drawn=replace(p.drawn, top_logprobs=None)) for p in super().parts()]


# --- what was begun ------------------------------------------------------------------------------


@mutant("what-was-begun-is-drawn-again", TOLD, forms=BOTH)
class BegunIgnored(Bent):
    """A stream goes on behind what was begun of it."""

    def taken(self, request: Request) -> Request:
        return replace(request, begun=())


@mutant("only-the-first-part-was-begun", TOLD)
class FirstPartAlone(Bent):
    """All parts that were told before are begun."""

    def taken(self, request: Request) -> Request:
        return replace(request, begun=request.begun[:1])


@mutant("what-was-begun-is-no-part-of-the-answer", TOLD, forms=BOTH)
class BegunLeftOut(Bent):
    """The answer has what was begun, too."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self._begun: dict[bytes, int] = {}

    def taken(self, request: Request) -> Request:
        self._begun[request.id] = sum(part.token_ids.size for part in request.begun)
        return request

    def bend(self, outcome: Outcome) -> Outcome:
        return outcome

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [
            replace(o, answer=o.answer.behind(self._begun.get(o.id, 0)))
            if isinstance(o.answer, Generation)
            else o
            for o in outcomes
        ]


@mutant("what-was-begun-counts-not", TOLD)
class BegunNotCounted(Bent):
    """max_tokens are those that were begun, too."""

    def taken(self, request: Request) -> Request:
        more = sum(part.token_ids.size for part in request.begun)
        if not more or not isinstance(request.want, Stream):
            return request
        return replace(
            request, want=replace(request.want, max_tokens=request.want.max_tokens + more)
        )


@mutant("draws-are-numbered-anew-behind-what-was-begun", TOLD, forms=BOTH)
class DrawsAnew(Bent):
    """The draw of a token depends on how many come before it, whoever drew those."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self._begun: dict[bytes, Sequence[Generation]] = {}

    def taken(self, request: Request) -> Request:
        if not request.begun or not isinstance(request.want, Stream):
            return request
        tokens = [token for part in request.begun for token in part.token_ids.tolist()]
        self._begun[request.id] = request.begun
        left = max(0, request.want.max_tokens - len(tokens))
        return replace(
            request,
            tokens=np.append(request.tokens, np.array(tokens, np.uint32)),
            want=replace(request.want, max_tokens=left),
            begun=(),
        )

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        found = []
        for outcome in outcomes:
            begun = self._begun.pop(outcome.id, ())
            answer = outcome.answer
            if begun and isinstance(answer, Generation):
                ids = np.concatenate([*(part.token_ids for part in begun), answer.token_ids])
                answer = replace(answer, token_ids=ids)
            found.append(replace(outcome, answer=answer))
        return found

    def parts(self) -> Sequence[Part]:
        before = {id_: sum(p.token_ids.size for p in begun) for id_, begun in self._begun.items()}
        return [
            replace(part, start=part.start + before.get(part.id, 0)) for part in super().parts()
        ]
