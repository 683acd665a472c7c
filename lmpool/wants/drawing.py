"""What wants that draw have in common: seeds and temperatures."""

from __future__ import annotations

import math
import secrets
from typing import Final

from lmpool.checks import as_integer, as_number, quoted
from lmpool.errors import PromptError
from lmpool.wants.packing import plain_zero

MAX_SEED: Final = 2**63 - 1


def checked_seed(given: object) -> int | None:
    """A caller's seed, within 63 bits. Raises `PromptError`."""
    if given is None:
        return None
    seed = as_integer(given)
    if seed is None:
        raise PromptError(f"seed={quoted(given)}: write an integer, or None")
    return seed & MAX_SEED


def checked_temperature(given: object) -> float:
    """A caller's temperature. Raises `PromptError`."""
    temperature = as_number(given)
    if temperature is None or not 0 <= temperature < math.inf:
        raise PromptError(f"temperature={quoted(given)}: write a number of 0 (greedy) or more")
    return plain_zero(temperature)


def seeds_of(seed: int | None, count: int) -> list[int]:
    """Those of a call's prompts: a seed and those that follow it, or without one fresh ones."""
    if seed is None:
        return [secrets.randbits(63) for _ in range(count)]
    return [(seed + i) & MAX_SEED for i in range(count)]
