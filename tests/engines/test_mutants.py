"""Every engine that is broken on purpose is really broken, and its witness passes a right one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from lmpool.backends import Engine
from lmpool.garbage import keep_what_is_there
from lmpool.wants import Generate
from tests.engines.mutants import FOLDER_MUTANTS, MUTANTS, Make, Mutant, Witness
from tests.engines.mutants.engines import Form, Model, Remembering, open_form
from tests.engines.mutants.witnesses import ask_rightly, prompts_of, requests_of, scenario

EVERY = {**MUTANTS, **FOLDER_MUTANTS}
THEMES = sorted({mutant.theme for mutant in EVERY.values()})


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Witnesses of leaks collect often: what was there before is left out."""
    keep_what_is_there()


def shown(witness: Witness, make: Make) -> Exception | None:
    """What the witness finds wrong with the engines that `make` opens."""
    try:
        witness(make)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("theme", THEMES)
def test_every_mutant_breaks_its_promise(theme: str) -> None:
    mutants = [mutant for mutant in EVERY.values() if mutant.theme == theme]
    assert all(isinstance(mutant(vocab_size=256), Engine) for mutant in mutants)
    assert [mutant.name for mutant in mutants if not mutant.breaks] == []
    assert [mutant.name for mutant in mutants if shown(mutant.witness, mutant) is None] == []


class Computing(Model):
    """A model that replaces the right one, and is right."""


def _wrapped(mutant: Mutant, **options: object) -> Engine:
    inner = open_form(mutant.form, model=Computing, **{**mutant.options, **options})
    return Remembering(inner)


RIGHT: dict[str, Callable[[Mutant], Make]] = {
    "the engine itself": lambda mutant: mutant.unbroken,
    "with a model, and wrapped": lambda mutant: functools.partial(_wrapped, mutant),
}
"""What mutants are made of, without a mistake."""


@pytest.mark.parametrize("how", RIGHT)
def test_right_engines_pass_every_witness(how: str) -> None:
    """Once for each form and witness: many mutants share theirs."""
    once = {(each.form, each.witness, str(each.options)): each for each in EVERY.values()}
    for mutant in once.values():
        if (error := shown(mutant.witness, RIGHT[how](mutant))) is not None:
            raise AssertionError(f"the witness of {mutant.name}") from error


def _at_a_glance(engine: Engine) -> None:
    want = Generate(4, (), 1.0, 7)
    ask_rightly(engine, [*requests_of(prompts_of(3)), *requests_of([[4, 5]], want=want, start=5)])


def test_subtle_ones_look_right_at_a_glance() -> None:
    glance = scenario(_at_a_glance)
    subtle = [mutant for mutant in EVERY.values() if mutant.subtle]
    assert [mutant.name for mutant in subtle if shown(glance, mutant) is not None] == []


def test_there_are_many_of_both_forms() -> None:
    assert len(MUTANTS) >= 90
    forms: set[Form] = {mutant.form for mutant in MUTANTS.values()}
    assert forms == {"batch", "fed"}
    assert sum(mutant.subtle for mutant in MUTANTS.values()) >= 50
    assert not any(mutant.twin for mutant in EVERY.values() if mutant.form == "batch")
