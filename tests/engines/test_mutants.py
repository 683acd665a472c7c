"""Every engine that is broken on purpose is really broken, and its witness passes a right one."""

from __future__ import annotations

import pytest

from lmpool.backends import Engine
from tests.engines.mutants import MUTANTS, Make, Mutant, Witness

ALL = [pytest.param(mutant, id=name) for name, mutant in MUTANTS.items()]


def shown(witness: Witness, make: Make) -> Exception | None:
    """What the witness finds wrong with the engines that `make` opens."""
    try:
        witness(make)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("mutant", ALL)
def test_a_mutant_breaks_its_promise(mutant: Mutant) -> None:
    assert isinstance(mutant(vocab_size=256), Engine)
    assert mutant.breaks.endswith((".", ")")), mutant.name
    assert shown(mutant.witness, mutant) is not None


def test_right_engines_pass_every_witness() -> None:
    """Once for each form and witness: many mutants share theirs."""
    once = {
        (mutant.form, mutant.witness, str(mutant.options)): mutant for mutant in MUTANTS.values()
    }
    for mutant in once.values():
        if (error := shown(mutant.witness, mutant.unbroken)) is not None:
            raise AssertionError(f"the witness of {mutant.name}") from error


def test_there_are_mutants_of_both_forms_and_some_are_subtle() -> None:
    assert len(MUTANTS) >= 90
    assert {mutant.form for mutant in MUTANTS.values()} == {"batch", "fed"}
    assert any(mutant.subtle for mutant in MUTANTS.values())
