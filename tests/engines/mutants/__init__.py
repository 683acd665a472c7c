"""Engines that are broken on purpose, which a contract suite for engines must catch.

`MUTANTS` has them by name, each a few lines around `MockEngine`'s rows and tokens, and each with a
witness: a scenario, written by hand, that shows the broken promise and that a right engine passes.
`FOLDER_MUTANTS` are apart: their rows follow an adapter's folder instead of its name.
"""

from tests.engines.mutants import (
    adapters,
    answers,
    caching,
    cancelling,
    clearing,
    counting,
    draws,
    ends,
    generations,
    life,
    memory,
    misfits,
    prefixes,
    processes,
    rare,
    reductions,
    refusals,
    row_forms,
    row_lives,
    rows,
    seeds,
    streams,
    versions,
    vocabulary,
)
from tests.engines.mutants.registry import FOLDER_MUTANTS, MUTANTS, Make, Mutant, Witness

__all__ = [
    "FOLDER_MUTANTS",
    "MUTANTS",
    "Make",
    "Mutant",
    "Witness",
    "adapters",
    "answers",
    "caching",
    "cancelling",
    "clearing",
    "counting",
    "draws",
    "ends",
    "generations",
    "life",
    "memory",
    "misfits",
    "prefixes",
    "processes",
    "rare",
    "reductions",
    "refusals",
    "row_forms",
    "row_lives",
    "rows",
    "seeds",
    "streams",
    "versions",
    "vocabulary",
]
