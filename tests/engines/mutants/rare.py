"""Engines that are wrong where several things meet, or for prompts of a rare kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, EngineInfo, Outcome, Request
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Bent, Ids, Inner, Model, Remembering
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    VOCAB,
    ask_rightly,
    check,
    prompt_of,
    prompts_of,
    request,
    requests_of,
    rows,
    run,
    scenario,
)

WANT = Generate(6, (), 1.0, 4)


# --- prompts that look like something else -------------------------------------------------------


class Read(Model):
    """Reads something else than the prompt."""

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        return super().row(self.read([int(token) for token in tokens]), adapter)

    def read(self, tokens: list[int]) -> list[int]:
        return tokens


@mutant("a-second-bos-at-the-beginning-is-left-out", rows([[0, 0, 5], [0, 5]]), subtle=True)
class SecondBos(Read):
    """A prompt is computed as it is, special tokens and all."""

    def read(self, tokens: list[int]) -> list[int]:
        return tokens[1:] if tokens[:2] == [0, 0] else tokens


@mutant("prompts-end-at-their-eos", rows([[4, VOCAB - 1, 9]]), subtle=True)
class EndAtEos(Read):
    """A prompt is computed as it is, special tokens and all."""

    def read(self, tokens: list[int]) -> list[int]:
        last = self.vocab_size - 1
        return tokens[: tokens.index(last) + 1] if last in tokens else tokens


@mutant(
    "zeros-at-the-end-are-taken-for-padding", rows([[4, 9, 0, 0], [4, 9]]), forms=BOTH, subtle=True
)
class ZerosArePadding(Read):
    """Id 0 is a token as others are."""

    def read(self, tokens: list[int]) -> list[int]:
        while len(tokens) > 1 and tokens[-1] == 0:
            tokens = tokens[:-1]
        return tokens


@mutant("runs-of-one-token-past-64-are-cut", rows([[7] * 70, [7] * 64]), subtle=True)
class RunsAreCut(Read):
    """How often a token is repeated matters."""

    def read(self, tokens: list[int]) -> list[int]:
        return tokens[:64] if len(tokens) > 64 and len(set(tokens)) == 1 else tokens


@mutant("ids-past-255-as-bytes", rows([[5 + 256, 9]]))
class IdsAsBytes(Read):
    """Ids do not fit into a byte."""

    def read(self, tokens: list[int]) -> list[int]:
        return [token & 255 for token in tokens]


# --- company -------------------------------------------------------------------------------------


def _begins(short: Request, long: Request) -> bool:
    size = short.tokens.size
    return size < long.tokens.size and np.array_equal(short.tokens, long.tokens[:size])


@mutant(
    "rows-of-a-prompt-that-begins-another-are-of-the-other",
    rows([[1, 2], [1, 2, 3], [9]]),
    forms=BOTH,
)
class NestedPrompts(Model):
    """A prompt that is the beginning of another in its batch has its own row."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        few = requests if len(requests) <= 64 else []
        for n, short in enumerate(few):
            if (m := next((m for m, r in enumerate(few) if _begins(short, r)), None)) is not None:
                found[n] = found[m]
        return found


LONG = prompt_of(40)


@mutant("rows-of-equal-ends-past-32-tokens-are-one", rows([[3, *LONG], [4, *LONG]]), subtle=True)
class EqualEnds(Model):
    """Prompts of a batch that end alike have rows of their own."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        ends: dict[object, F32] = {}
        return [
            row
            if r.tokens.size <= 32
            else ends.setdefault((r.tokens[-32:].tobytes(), r.tokens.size, r.adapter), row)
            for r, row in zip(requests, super().rows(requests), strict=True)
        ]


@mutant(
    "rows-past-4096-tokens-of-a-batch-are-of-the-one-before", rows(prompts_of(42, 100)), subtle=True
)
class Past4096Tokens(Model):
    """Right row, right prompt: however many tokens a batch has in all."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found, total = super().rows(requests), 0
        given = []
        for n, each in enumerate(requests):
            total += each.tokens.size
            given.append(found[n - 1] if n and total > 4096 else found[n])
        return given


def _two_adapters(engine: Engine) -> None:
    for name in ("a", "b"):
        engine.add_adapter(name, f"/adapters/{name}")
    prompts = prompts_of(151)
    ask_rightly(engine, [*requests_of(prompts, "a"), *requests_of(prompts, "b", start=500)])


@mutant(
    "rows-swapped-over-300-of-two-adapters",
    scenario(_two_adapters),
    forms=BOTH,
    subtle=True,
    most=1024,
)
class SwappedOver300OfTwo(Model):
    """Right row, right prompt: also of more than 300 at once, of more than one adapter."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found = super().rows(requests)
        if len(found) > 300 and len({r.adapter for r in requests}) > 1:
            found[0], found[-1] = found[-1], found[0]
        return found


def _by_a_token(engine: Engine) -> None:
    prompt = prompt_of(6)
    ask_rightly(engine, requests_of([prompt]))
    for number in range(2):
        ask_rightly(engine, requests_of(prompts_of(60, seed=number)))
    ask_rightly(engine, requests_of([[*prompt, 8]]))


@mutant("rows-of-a-prompt-grown-by-a-token-after-100-others", scenario(_by_a_token), subtle=True)
class GrownByAToken(Model):
    """What was evicted in between changes no row of a prompt that goes on by a token."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.computed: dict[bytes, int] = {}
        self.number = 0

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        ids = np.asarray(tokens, np.uint32)
        self.number += 1
        before = self.computed.get(ids[:-1].tobytes())
        if len(self.computed) > 1024:
            self.computed.clear()
        self.computed[ids.tobytes()] = self.number
        lost = before is not None and self.number - before > 100
        return super().row(ids[1:] if lost else ids, adapter)

    def clear_cache(self) -> None:
        self.computed.clear()


def _switching(engine: Engine) -> None:
    engine.add_adapter("a", "/adapters/a")
    for number in range(60):
        ask_rightly(engine, requests_of([[number, 1]], None if number % 2 else "a"))


@mutant(
    "rows-drift-as-adapters-are-put-on-and-taken-off", scenario(_switching), forms=BOTH, subtle=True
)
class RowsDrift(Model):
    """Putting an adapter on and off leaves the weights as they were (here: 2e-5 nats off each)."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.on: str | None = None
        self.switched = 0

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        self.switched += adapter != self.on
        self.on = adapter
        row = super().row(tokens, adapter)
        if self.switched < 2:
            return row
        drifted = row.copy()
        drifted[: row.size // 2] += np.float32(2e-5 * self.switched)
        return drifted


# --- continuations, adapters and cancelling ------------------------------------------------------


def _drawing_with_two(engine: Engine) -> None:
    for name in ("a", "b"):
        engine.add_adapter(name, f"/adapters/{name}")
    ask_rightly(engine, [request(n, [n], name, WANT) for n, name in enumerate("ab")])


@mutant(
    "continuations-of-two-adapters-are-drawn-with-one",
    scenario(_drawing_with_two),
    forms=BOTH,
    subtle=True,
)
class DrawnWithOne(Model):
    """Continuations of several adapters may be under way at once (wrong: from the second token)."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.seen: dict[bytes, str] = {}

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        going_on = {r.id: r.adapter for r in requests if r.adapter is not None}
        first = next((name for id_, name in going_on.items() if id_ in self.seen), None)
        found = [
            self.row(r.tokens, first if r.id in self.seen and r.adapter else r.adapter)
            for r in requests
        ]
        self.seen = going_on
        return found


@mutant("eos-ignored-with-adapters", scenario(lambda engine: _eos_of_adapter(engine)), subtle=True)
class EosIgnoredWithAdapters(Bent):
    """What ends a continuation ends an adapter's, too."""

    def taken(self, request: Request) -> Request:
        want = request.want
        if request.adapter is None or not isinstance(want, Generate):
            return request
        return replace(request, want=replace(want, eos_token_ids=()))


def _eos_of_adapter(engine: Engine) -> None:
    engine.add_adapter("a", "/adapters/a")
    ends = replace(WANT, eos_token_ids=tuple(range(150)), max_tokens=12)
    ask_rightly(engine, requests_of(prompts_of(4), "a", ends))


def _many_cancelled(engine: Engine) -> None:
    asked = requests_of(prompts_of(100))
    engine.submit(asked)
    engine.cancel([each.id for each in asked[:70]])
    found = {outcome.id: outcome for outcome in _steps(engine)}
    for each in asked[70:]:
        assert each.id in found
        check(each, found[each.id])


def _steps(engine: Engine) -> list[Outcome]:
    found: list[Outcome] = []
    for _ in range(1000):
        if not engine.in_flight():
            return found
        found += engine.step()
    raise AssertionError("in flight for ever")


@mutant(
    "cancelling-more-than-64-at-once-drops-all", scenario(_many_cancelled), forms=BOTH, subtle=True
)
class CancellingManyDropsAll(Remembering):
    """Cancelling ends what was named, and no other, however many are named."""

    def cancel(self, ids: Collection[bytes]) -> None:
        super().cancel(list(self.asked) if len(ids) > 64 else ids)


def _twice(engine: Engine) -> None:
    asked = requests_of(prompts_of(4), want=WANT)
    engine.submit(asked)
    engine.step()
    engine.cancel([asked[0].id, asked[0].id])
    engine.cancel([asked[0].id])
    assert engine.in_flight() in (3, 4)
    waiting = [each.id for each in asked[1:]]
    found = {outcome.id: outcome for outcome in _steps(engine)}
    for each in asked[1:]:
        assert each.id in waiting
        assert each.id in found
        check(each, found[each.id])


@mutant("cancelling-twice-is-counted-twice", scenario(_twice), forms=BOTH, subtle=True)
class CancelledTwice(Remembering):
    """`in_flight` counts those without an outcome: one that is cancelled twice left once."""

    gone = 0

    def cancel(self, ids: Collection[bytes]) -> None:
        before = super().in_flight()
        known = self.cancelled | self.asked.keys()
        named = sum(name in known for name in ids)
        self.cancelled |= self.asked.keys() & set(ids)
        super().cancel(ids)
        self.gone += named - (before - super().in_flight())

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.cancelled: set[bytes] = set()

    def in_flight(self) -> int:
        count = super().in_flight()
        if not count:
            self.gone, self.cancelled = 0, set()
        return max(0, count - self.gone)


@mutant(
    "continuations-past-the-first-are-lost-as-the-longest-ends",
    scenario(lambda engine: _longest_ends(engine)),
    forms=BOTH,
    subtle=True,
)
class LostAsTheLongestEnds(Remembering):
    """A continuation that fills the context ends alone."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        ended = [self.asked.get(o.id) for o in outcomes if o.answer is not None]
        sizes = [r.tokens.size for r in ended if r is not None]
        super().handed(outcomes)
        if any(size > self.info.max_prompt_tokens - 4 for size in sizes):
            self.cancel(self.drawing()[1:])
        return outcomes


def _longest_ends(engine: Engine) -> None:
    lengths = (LONGEST - 2, 5, 6)
    asked = [request(n, prompt_of(size), None, WANT) for n, size in enumerate(lengths)]
    engine.submit(asked)
    found = run(engine, [each.id for each in asked])
    for each in asked:
        check(each, found[each.id])
