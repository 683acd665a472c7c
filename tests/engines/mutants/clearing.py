"""Engines that lose, as their cache is cleared, what is no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.errors import PromptFailed
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Bent, Ids, Inner, Model, Remembering, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    ask_rightly,
    check,
    prompts_of,
    requests_of,
    run,
    scenario,
)


def _clear_between(engine: Engine) -> None:
    engine.add_adapter("a", "/adapters/a")
    want = Generate(12, (), 1.0, 11)
    asked = [*requests_of(prompts_of(3), want=want), *requests_of([[1, 2]], "a", want, start=9)]
    engine.submit(asked)
    early = [*engine.step(), *engine.step(), *engine.step()]
    assert not early
    late = requests_of([[7, 7]], start=20)
    engine.submit(late)
    engine.clear_cache()
    assert engine.in_flight() == 5
    found = run(engine, [each.id for each in (*asked, *late)])
    for each in (*asked, *late):
        check(each, found[each.id])
    ask_rightly(engine, requests_of([[7, 7]], "a"))


CLEARING = scenario(_clear_between)


@mutant("clear-cache-drops-continuations", CLEARING, forms=BOTH)
class ClearDropsContinuations(Remembering):
    """`clear_cache` drops what is kept between batches, and not who waits for an answer."""

    def clear_cache(self) -> None:
        super().clear_cache()
        self.cancel(self.drawing())


@mutant("clear-cache-fails-continuations", CLEARING)
class ClearFailsContinuations(Wrapper):
    """A continuation goes on after `clear_cache`, and has no error."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.failed: list[Outcome] = []

    def clear_cache(self) -> None:
        super().clear_cache()
        lost = list(self.inner._continuations)
        self.inner.cancel(lost)
        self.failed = [Outcome(name, error=PromptFailed("dropped")) for name in lost]

    def in_flight(self) -> int:
        return super().in_flight() + len(self.failed)

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        failed, self.failed = self.failed, []
        return [*outcomes, *failed]


@mutant("clear-cache-drops-who-has-not-begun", CLEARING, forms=BOTH)
class ClearDropsWaiting(Wrapper):
    """`clear_cache` loses no request that was submitted since the last step."""

    new: Sequence[Request] = ()

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self.new = requests

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.new = ()
        return outcomes

    def clear_cache(self) -> None:
        super().clear_cache()
        self.cancel([each.id for each in self.new])


@mutant("clear-cache-restarts-continuations-with-new-draws", CLEARING, forms=BOTH)
class ClearRestartsContinuations(Remembering):
    """A continuation goes on after `clear_cache`, under its own seed."""

    def clear_cache(self) -> None:
        super().clear_cache()
        running = [self.asked[name] for name in self.drawing()]
        self.cancel(self.drawing())
        self.submit(
            [replace(r, want=replace(r.want, seed=(r.want.seed or 0) + 1)) for r in running]
        )


@mutant("clear-cache-makes-continuations-forget-what-they-drew", CLEARING, forms="fed", subtle=True)
class ClearForgetsDrawn(Wrapper):
    """A continuation's next token is drawn behind all its others, also after `clear_cache`."""

    def clear_cache(self) -> None:
        super().clear_cache()
        for admitted in self.inner.running.values():
            continuation = admitted.continuation
            if continuation is not None and continuation._drawn:
                continuation.drawn[0] = continuation.drawn[-1]
                continuation._drawn = 1


@mutant("clear-cache-unloads-adapters", CLEARING, forms=BOTH)
class ClearUnloadsAdapters(Wrapper):
    """Adapters stay loaded until they are removed."""

    def clear_cache(self) -> None:
        super().clear_cache()
        for name in list(self.inner.adapters):
            self.remove_adapter(name)


@mutant("clear-cache-turns-adapters-into-the-model", CLEARING, forms=BOTH, subtle=True)
class ClearZeroesAdapters(Model):
    """Adapters keep their weights when the cache is cleared."""

    zeroed: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()

    def add_adapter(self, name: str) -> None:
        self.loaded |= {name}
        self.zeroed -= {name}

    def clear_cache(self) -> None:
        self.zeroed = self.loaded

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        return super().row(tokens, None if adapter in self.zeroed else adapter)


@mutant("clear-cache-raises-while-requests-are-in-flight", CLEARING)
class ClearRaisesWhenBusy(Wrapper):
    """A worker clears the cache between any two steps."""

    def clear_cache(self) -> None:
        if self.in_flight():
            raise RuntimeError("the cache is in use")
        super().clear_cache()


def _clear_twice(engine: Engine) -> None:
    engine.clear_cache()
    engine.clear_cache()
    ask_rightly(engine, requests_of([[1, 2]]))


@mutant("clear-cache-twice-breaks-the-rows", scenario(_clear_twice), subtle=True)
class ClearTwice(Bent):
    """The cache may be cleared when there is none."""

    cleared = 0

    def clear_cache(self) -> None:
        self.cleared += 1
        super().clear_cache()

    def bend(self, outcome: Outcome) -> Outcome:
        empty = self.cleared > 1
        self.cleared = 0
        return replace(outcome, row=np.roll(outcome.row, 1)) if empty else outcome
