"""No engine that is broken on purpose survives the contract, and the right ones do."""

from __future__ import annotations

from typing import Any

import pytest

from lmpool.backends import Engine
from lmpool.backends.contract import EngineContract, examine
from tests.engines.mutants import MUTANTS, Make
from tests.engines.test_contract import TestFed as Fed
from tests.engines.test_contract import TestMock as Mock

SEEDS = 20
SOME = 20
"""`make test` takes one of so many, `make mutants` all."""

ALL = [
    pytest.param(name, marks=[pytest.mark.mutants] if number % SOME else [])
    for number, name in enumerate(MUTANTS)
]


def suite_of(make: Make, form: str = "batch") -> type[EngineContract]:
    """The contract of the mock engine, or of it fed, on what `make` opens."""
    kind: type[Mock] = Fed if form == "fed" else Mock

    class Suite(kind):  # type: ignore[valid-type, misc]
        @classmethod
        def open_engine(cls, **options: Any) -> Engine:
            return make("mock", **{**cls.options, **options})

    return Suite


@pytest.mark.parametrize("name", ALL)
def test_a_broken_engine_is_found_out(name: str) -> None:
    suite = suite_of(MUTANTS[name], MUTANTS[name].form)
    # A leak of some hundred kB may hide once in what the allocator had to spare.
    found = examine(suite) or examine(suite, parts=["memory"], seed=1)
    assert found is not None, MUTANTS[name].breaks


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.mutants] if seed > 4 else [])
        for seed in range(1, SEEDS + 1)
    ],
)
def test_a_right_engine_is_not(seed: int) -> None:
    """Each seed on one of four: the mock engine, it fed while it runs, and what mutants are of."""
    unbroken = {mutant.form: mutant.unbroken for mutant in MUTANTS.values()}
    right: list[type[EngineContract]] = [
        Mock,
        Fed,
        *(suite_of(make, form) for form, make in unbroken.items()),
    ]
    assert examine(right[seed % len(right)], seed=seed) is None
