"""Engines that are broken on purpose, which a contract suite for engines must catch.

`MUTANTS` has them by name, each a few lines around `MockEngine`'s rows and tokens, and each with a
witness: a scenario, written by hand, that shows the broken promise and that a right engine passes.
"""

from tests.engines.mutants import adapters, caching, draws, life, memory, rows, vocabulary
from tests.engines.mutants.registry import MUTANTS, Make, Mutant, Witness

__all__ = [
    "MUTANTS", "Make", "Mutant", "Witness",
    "adapters", "caching", "draws", "life", "memory", "rows", "vocabulary",
]  # fmt: skip
