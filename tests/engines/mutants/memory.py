"""Engines that keep what nobody needs any more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from lmpool.backends import Engine, EngineInfo, Outcome, Request
from lmpool.backends.engine import Tokens
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Ids, Inner, Model, Wrapper
from tests.engines.mutants.registry import BOTH, Make, Witness, mutant
from tests.engines.mutants.witnesses import (
    OPTIONS,
    bounded,
    prompts_of,
    request,
    run,
)


def _each(of: Callable[[int], Request], before: int = 60) -> Witness:
    """A request a round; nothing is kept of it."""

    def play(engine: Engine, number: int) -> None:
        each = of(number)
        engine.submit([each])
        while engine.in_flight():
            engine.step()

    return bounded(play, before)


PROMPTS = prompts_of(2600)
ROWS = _each(lambda n: request(n, PROMPTS[n]))
CONTINUATIONS = _each(lambda n: request(n, PROMPTS[n], None, Generate(3, (), 1.0, n)))
REFUSALS = _each(lambda n: request(n, []))


class Keeping(Wrapper):
    """Keeps something for ever."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.kept: list[object] = []


@mutant("rows-kept-for-ever", ROWS, forms=BOTH)
class RowsKept(Keeping):
    """A row that was handed out is its receiver's: an engine keeps none."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.kept += [o.row.copy() for o in outcomes if o.row is not None]
        return outcomes


@mutant("one-row-in-eight-kept-for-ever", ROWS, subtle=True)
class SomeRowsKept(Keeping):
    """A row that was handed out is its receiver's: an engine keeps none."""

    count = 0

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            self.count += 1
            if outcome.row is not None and self.count % 8 == 0:
                self.kept.append(outcome.row.copy())
        return outcomes


@mutant("requests-kept-for-ever", ROWS, forms=BOTH)
class RequestsKept(Keeping):
    """An answered request is forgotten."""

    def submit(self, requests: Sequence[Request]) -> None:
        self.kept += requests
        super().submit(requests)


@mutant("ids-kept-for-ever", ROWS, subtle=True)
class IdsKept(Keeping):
    """An answered request's id is forgotten."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.kept += [o.id for o in outcomes]
        return outcomes


@mutant(
    "requests-kept-from-the-1000th-on", _each(lambda n: request(n, PROMPTS[n]), 1010), subtle=True
)
class KeptFromThe1000th(Keeping):
    """An answered request is forgotten, however many came before."""

    count = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.count += len(requests)
        if self.count > 1000:
            self.kept += [(r, r.tokens.tolist()) for r in requests]
        super().submit(requests)


@mutant(
    "requests-for-adapters-kept-for-ever",
    bounded(lambda engine, n: _for_adapter(engine, n)),
    subtle=True,
)
class AdaptersRequestsKept(Keeping):
    """An answered request is forgotten, one for an adapter, too."""

    def submit(self, requests: Sequence[Request]) -> None:
        self.kept += [r for r in requests if r.adapter is not None]
        super().submit(requests)


def _for_adapter(engine: Engine, number: int) -> None:
    if number == 0:
        engine.add_adapter("a", "/adapters/a")
    each = request(number, PROMPTS[number], "a")
    engine.submit([each])
    run(engine, [each.id])


@mutant("continuations-kept-for-ever", CONTINUATIONS, forms=BOTH)
class ContinuationsKept(Keeping):
    """An ended continuation's tokens are its receiver's."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.kept += [o.answer for o in outcomes if o.answer is not None]
        return outcomes


@mutant("refusals-kept-for-ever", REFUSALS, forms=BOTH)
class RefusalsKept(Keeping):
    """What was refused is forgotten."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.kept += [o for o in outcomes if o.error is not None]
        return outcomes


def _cancelled(engine: Engine, number: int) -> None:
    want = Generate(9, (), 1.0, 1)
    asked = [request(2 * number, [1]), request(2 * number + 1, [2], None, want)]
    engine.submit(asked)
    if number % 2:
        engine.step()
    engine.cancel([each.id for each in asked])
    while engine.in_flight():
        engine.step()


CANCELLED = bounded(_cancelled)


@mutant("cancelled-ids-kept-for-ever", CANCELLED, forms=BOTH, subtle=True)
class CancelledIdsKept(Keeping):
    """What was cancelled is forgotten."""

    def cancel(self, ids: Collection[bytes]) -> None:
        self.kept += ids
        super().cancel(ids)


@mutant(
    "unknown-ids-that-are-cancelled-kept-for-ever",
    bounded(lambda engine, n: engine.cancel([b"unknown %12d" % n])),
    subtle=True,
)
class UnknownIdsKept(Wrapper):
    """A cancelled id that nobody asked for is forgotten."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.asked: set[bytes] = set()
        self.to_come: set[bytes] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked |= {r.id for r in requests}
        self.to_come -= self.asked
        super().submit(requests)

    def cancel(self, ids: Collection[bytes]) -> None:
        self.to_come |= set(ids) - self.asked
        super().cancel(ids)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.asked -= {o.id for o in outcomes}
        return outcomes


@mutant("state-of-cancelled-continuations-kept-for-ever", CANCELLED, forms=BOTH)
class CancelledStateKept(Wrapper):
    """The state of a continuation that is cancelled is freed."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.states: dict[bytes, np.ndarray] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        for each in requests:
            if isinstance(each.want, Generate):
                self.states[each.id] = np.zeros(1024, np.float32)
        super().submit(requests)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            self.states.pop(outcome.id, None)
        return outcomes


@mutant("a-cache-without-bound", ROWS, forms=BOTH)
class CacheWithoutBound(Model):
    """What is kept between batches is bounded."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.kept: dict[Hashable, F32] = {}

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        key = (np.asarray(tokens, np.uint32).tobytes(), adapter)
        if key not in self.kept:
            self.kept[key] = super().row(tokens, adapter).copy()
        return self.kept[key]

    def clear_cache(self) -> None:
        self.kept.clear()


@mutant("step-after-step-kept-while-idle", bounded(lambda engine, n: engine.step()), subtle=True)
class StepsKept(Keeping):
    """A step that does nothing keeps nothing."""

    def step(self) -> Sequence[Outcome]:
        outcomes = list(super().step())
        if not outcomes:
            self.kept.append(np.zeros(16))
        return outcomes


# --- prefixes, caches, adapters ------------------------------------------------------------------


def _prefix_and_clear(engine: Engine, number: int) -> None:
    engine.cache_prefix(np.array(PROMPTS[number], np.uint32))
    engine.clear_cache()


@mutant("clear-cache-does-nothing", bounded(_prefix_and_clear), forms=BOTH)
class ClearDoesNothing(Keeping):
    """`clear_cache` drops every state kept."""

    def cache_prefix(self, tokens: Tokens) -> None:
        super().cache_prefix(tokens)
        if len(self.kept) < 8192:  # its bound is beyond any test's patience
            self.kept.append(np.zeros((tokens.size, 256), np.float32))


@mutant("clear-cache-leaves-half", bounded(_prefix_and_clear), subtle=True)
class ClearLeavesHalf(Keeping):
    """`clear_cache` drops every state kept, the tokens of each as well as the numbers."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.states: list[np.ndarray] = []

    def cache_prefix(self, tokens: Tokens) -> None:
        super().cache_prefix(tokens)
        self.kept.append(tokens.tolist())
        self.states.append(np.zeros((tokens.size, 256), np.float32))

    def clear_cache(self) -> None:
        super().clear_cache()
        self.states.clear()


@mutant(
    "prefixes-kept-without-bound",
    bounded(lambda engine, n: engine.cache_prefix(np.array(PROMPTS[n], np.uint32))),
    forms=BOTH,
)
class PrefixesWithoutBound(Keeping):
    """Prefixes are kept as long as there is room."""

    def cache_prefix(self, tokens: Tokens) -> None:
        super().cache_prefix(tokens)
        self.kept.append(np.zeros((tokens.size, 256), np.float32))

    def clear_cache(self) -> None:
        super().clear_cache()
        self.kept.clear()


def _come_and_go(engine: Engine, number: int) -> None:
    engine.add_adapter("a", "/adapters/a")
    if number % 2:
        engine.remove_adapter("a")


@mutant("adapters-weights-kept-for-ever", bounded(_come_and_go), forms=BOTH)
class WeightsKept(Keeping):
    """A removed adapter's weights are freed."""

    def add_adapter(self, name: str, path: str) -> None:
        super().add_adapter(name, path)
        self.kept.append(np.zeros(8192, np.float32))


@mutant(
    "replaced-adapters-weights-kept-for-ever",
    bounded(lambda engine, n: engine.add_adapter("a", "/adapters/a")),
    subtle=True,
)
class ReplacedWeightsKept(Wrapper):
    """The weights of an adapter that is replaced are freed."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.weights: dict[str, list[np.ndarray]] = {}

    def add_adapter(self, name: str, path: str) -> None:
        super().add_adapter(name, path)
        self.weights.setdefault(name, []).append(np.zeros(8192, np.float32))

    def remove_adapter(self, name: str) -> None:
        super().remove_adapter(name)
        self.weights.pop(name, None)


def _files(make: Make) -> None:
    engine = make(**OPTIONS)
    before = len(os.listdir("/dev/fd"))
    for _ in range(10):
        engine.add_adapter("a", "/adapters/a")
        engine.remove_adapter("a")
    after = len(os.listdir("/dev/fd"))
    try:
        assert after <= before
    finally:
        engine.close()


@mutant("adapters-files-left-open", _files, subtle=True)
class FilesLeftOpen(Wrapper):
    """An adapter's files are closed once it is loaded, at the latest as it is removed."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.files: list[int] = []

    def add_adapter(self, name: str, path: str) -> None:
        super().add_adapter(name, path)
        if len(self.files) < 200:
            self.files.append(os.open(os.devnull, os.O_RDONLY))

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files = []
        super().close()

    def __del__(self) -> None:
        for file in self.files:
            os.close(file)


def _threads(make: Make) -> None:
    before = threading.active_count()
    engine = make(**OPTIONS)
    for _ in range(5):
        engine.clear_cache()
    started = threading.active_count() - before
    engine.close()
    assert started < 5


@mutant("a-thread-for-each-clearing", _threads, subtle=True)
class ThreadsLeft(Wrapper):
    """Work on the side ends."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.threads = 0
        self.over = threading.Event()

    def clear_cache(self) -> None:
        super().clear_cache()
        self.threads += 1
        if self.threads < 50:
            threading.Thread(target=self.over.wait, args=(60,), daemon=True).start()

    def close(self) -> None:
        self.over.set()
        super().close()

    def __del__(self) -> None:
        self.over.set()


def _open_and_close(make: Make) -> None:
    def play(_: Engine, number: int) -> None:
        engine = make(**OPTIONS)
        engine.add_adapter("a", "/adapters/a")
        each = request(number, [1, 2])
        engine.submit([each])
        run(engine, [each.id])
        engine.close()

    bounded(play, 5, 20, 2000)(make)


@mutant("closed-engines-kept-for-ever", _open_and_close, subtle=True)
class ClosedEnginesKept(Wrapper):
    """`close` frees what the engine holds."""

    opened: ClassVar[list[Any]] = []

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.arena = np.zeros(16384, np.float32)
        self.opened.append(self)
