"""Engines that are not alone in their process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from lmpool.backends import Outcome, Request
from lmpool.errors import PromptFailed
from tests.engines.mutants.engines import Inner, Wrapper
from tests.engines.mutants.registry import BOTH, Make, mutant
from tests.engines.mutants.witnesses import (
    OPTIONS,
    ask,
    ask_rightly,
    check,
    prompts_of,
    requests_of,
    run,
)


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


@mutant("opening-a-second-engine-closes-the-first", _two, forms=BOTH)
class SecondClosesFirst(Wrapper):
    """Engines of one process leave each other alone."""

    newest: ClassVar[dict[str, Any]] = {}

    def __init__(self, inner: Inner) -> None:
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

    def __init__(self, inner: Inner) -> None:
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

    def __init__(self, inner: Inner) -> None:
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
