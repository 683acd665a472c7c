"""What counts as a number, of whichever library it is."""

from __future__ import annotations

import operator
from numbers import Real

import numpy as np


def is_number(value: object) -> bool:
    """Whether this is a real number, of Python or numpy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_integer(value: object) -> int | None:
    """An integer of any library as int; None for anything else, bools too."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
