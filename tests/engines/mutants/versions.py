"""Engines that serve another version of an adapter than the one that its name stands for.

Their rows are those of an adapter's folder: a name that is given again stands for another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Engine, Outcome, Request
from lmpool.backends.mock import mock_row
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Inner, Remembering, Wrapper
from tests.engines.mutants.registry import BOTH, Witness, mutant
from tests.engines.mutants.witnesses import VOCAB, ask, drawn, request, run, scenario

Step = tuple[str, str]


def _row(engine: Engine, name: str, folder: str) -> None:
    (outcome,) = ask(engine, [request(1, [1, 2], name)])
    assert outcome.row is not None, outcome.error
    assert np.array_equal(outcome.row, mock_row([1, 2], VOCAB, folder))


def versions(*steps: Step) -> Witness:
    """Each step gives a name a folder ('' takes the name away), and the name's rows are its."""

    def play(engine: Engine) -> None:
        for name, folder in steps:
            if not folder:
                engine.remove_adapter(name)
                continue
            engine.add_adapter(name, folder)
            _row(engine, name, folder)

    return scenario(play)


REPLACED = versions(("a", "/one"), ("a", "/two"), ("a", "/three"))
BACK = versions(("a", "/one"), ("a", ""), ("a", "/two"))


@mutant("replaced-adapters-keep-their-weights", REPLACED, forms=BOTH, by_folder=True)
class KeepsWeights(Wrapper):
    """An adapter replaces one of its name."""

    def add_adapter(self, name: str, path: str) -> None:
        if name not in self.inner.adapters:
            super().add_adapter(name, path)


@mutant("adapters-that-come-back-have-their-old-weights", BACK, forms=BOTH, by_folder=True)
class OldWeightsComeBack(Wrapper):
    """A removed name that is given again stands for its new folder."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.paths: dict[str, str] = {}

    def add_adapter(self, name: str, path: str) -> None:
        if name in self.inner.adapters:
            self.paths[name] = path
        super().add_adapter(name, self.paths.setdefault(name, path))


@mutant("the-third-version-of-an-adapter-is-the-second", REPLACED, subtle=True, by_folder=True)
class ThirdIsSecond(Wrapper):
    """An adapter replaces one of its name, however often."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.given: dict[str, list[str]] = {}

    def add_adapter(self, name: str, path: str) -> None:
        given = [*self.given.get(name, []), path][:2]
        self.given[name] = given
        super().add_adapter(name, given[-1])


@mutant("cached-rows-outlive-their-adapter", REPLACED, forms=BOTH, subtle=True, by_folder=True)
class CachedRowsOutlive(Remembering):
    """What was kept of an adapter goes with it."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.kept: dict[Hashable, F32] = {}

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        found = [self._kept(outcome, self.asked.get(outcome.id)) for outcome in outcomes]
        super().handed(outcomes)
        return found

    def _kept(self, outcome: Outcome, asked: Request | None) -> Outcome:
        if outcome.row is None or asked is None or asked.adapter is None:
            return outcome
        if len(self.kept) > 512:
            self.kept.clear()
        key = (asked.tokens.tobytes(), asked.adapter)
        return replace(outcome, row=self.kept.setdefault(key, outcome.row))

    def clear_cache(self) -> None:
        self.kept.clear()
        super().clear_cache()


TWO = versions(("a", "/one"), ("b", "/two"), ("a", "/three"), ("b", "/two"))


@mutant("replacing-an-adapter-replaces-all", TWO, forms=BOTH, by_folder=True)
class ReplacesAll(Wrapper):
    """Another name keeps its adapter. (Here it is given that of the name before it, again.)"""

    last = ""

    def add_adapter(self, name: str, path: str) -> None:
        known = name in self.inner.adapters
        super().add_adapter(name, self.last if known and self.last else path)
        self.last = path


def _under_way(check: Callable[[Sequence[int], Sequence[int]], None]) -> Witness:
    want = Generate(6, (), 1.0, 4)

    def play(engine: Engine) -> None:
        engine.add_adapter("a", "/one")
        asked = request(1, [1, 2], "a", want)
        engine.submit([asked])
        engine.step()
        engine.add_adapter("a", "/two")
        outcome = run(engine, [asked.id])[asked.id]
        assert outcome.answer is not None
        check(outcome.answer.token_ids.tolist(), drawn(replace(asked, adapter="/one")))

    return scenario(play)


def _equal(found: Sequence[int], right: Sequence[int]) -> None:
    assert found == right


@mutant(
    "what-runs-goes-on-with-the-new-version",
    _under_way(_equal),
    forms="fed",
    subtle=True,
    by_folder=True,
)
class GoesOnWithTheNew(Wrapper):
    """A fed engine's requests in flight keep the adapter that they were submitted with."""

    def add_adapter(self, name: str, path: str) -> None:
        super().add_adapter(name, path)
        folders = self.inner._folders
        for loaded in folders:
            if loaded.rpartition("#")[0] == name:
                folders[loaded] = path
