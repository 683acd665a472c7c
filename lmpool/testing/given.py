"""Answers as a test gives them, checked, and copied: the test may go on with its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lmpool.checks import as_integer, as_number, quoted, said
from lmpool.errors import SettingsError
from lmpool.model_info import ModelInfo
from lmpool.testing.answers import F32, Meant, RowSet, Set
from lmpool.wants import (
    KINDS,
    Draw,
    Draws,
    Generate,
    Generation,
    HeadPart,
    Hidden,
    Reduced,
    Row,
    Score,
    TextScores,
    Tokens,
    Top,
    TopLogprobs,
    Want,
)
from lmpool.wants.answers import freeze

Answered: TypeAlias = (
    Mapping[int, float]
    | Sequence[float]
    | npt.NDArray[np.float32]
    | npt.NDArray[np.float64]
    | TopLogprobs
    | TextScores
    | Draws
    | Generation
)
"""A row, as log-probabilities or as the probabilities of some tokens, or another want's answer."""

_OWN: Final[dict[type, type[Want]]] = {
    TopLogprobs: Top,
    TextScores: Score,
    Draws: Draw,
    Generation: Generate,
}
_OF_ROW: Final = (None, Row, Top, Draw)
_NEAR: Final = 1e-3
"""How far the mass of a row may be from 1."""


def meant_by(want: Want | type[Want] | None, info: ModelInfo) -> Meant:
    """Which wants a test means, with every default resolved. Raises `SettingsError`."""
    if want is None:
        return None
    kind = want if isinstance(want, type) else type(want)
    if kind not in KINDS.values() or kind is HeadPart:
        raise SettingsError(f"want={quoted(want)}: write a want of lmpool.wants, or its class")
    return want if isinstance(want, type) else want.checked(info)


def meant_and_set(
    answer: object, want: Want | type[Want] | None, info: ModelInfo
) -> tuple[Meant, Set]:
    """Which wants are meant, and their answer. Raises `SettingsError` for what is none to them."""
    meant = meant_by(want, info)
    kind = meant if meant is None or isinstance(meant, type) else type(meant)
    own = _OWN.get(type(answer))
    if own is not None:
        if kind is not None and not issubclass(kind, own):
            raise SettingsError(f"want={quoted(want)}: {type(answer).__name__} is no answer to it")
        found = cast(Reduced, deepcopy(answer))
        freeze(found)
        return own if meant is None else meant, found
    if kind is Hidden:
        return meant, _array(answer, info.vocab_size)
    if kind is Tokens:
        return meant, _array(answer)
    if kind not in _OF_ROW:
        raise SettingsError(
            f"want={quoted(want)} does not follow from one row: leave it out, or set what "
            "lmpool.wants answers it with"
        )
    return meant, RowSet(_row(answer, info.vocab_size))


def row_with(probabilities: Mapping[int, float], vocab_size: int) -> F32:
    """See `MockPool.row`."""
    if not isinstance(probabilities, Mapping):
        raise SettingsError(
            f"probabilities={quoted(probabilities)}: write {{token id: probability}}"
        )
    values = np.full(vocab_size, np.nan)
    for token, probability in probabilities.items():
        place, value = as_integer(token), as_number(probability)
        if place is None or not 0 <= place < vocab_size or value is None or not 0 <= value <= 1:
            raise SettingsError(
                f"{{{quoted(token)}: {quoted(probability)}}}: write token ids below {vocab_size} "
                "and their probabilities, from 0 to 1"
            )
        values[place] = value
    given = np.isfinite(values)
    left, others = 1.0 - float(values[given].sum()), vocab_size - int(given.sum())
    if left < -_NEAR or (not others and left > _NEAR):
        raise SettingsError(f"probabilities that make {1 - left:g} together: write 1, or less")
    values[~given] = max(0.0, left) / max(1, others)
    with np.errstate(divide="ignore"):
        row: F32 = np.log(values / values.sum()).astype(np.float32)
    row.flags.writeable = False
    return row


def _row(given: object, vocab_size: int) -> F32:
    if isinstance(given, Mapping):
        return row_with(given, vocab_size)
    row = _array(given)
    with np.errstate(over="ignore", under="ignore"):
        mass = float(np.exp(row.astype(np.float64)).sum())
    if row.size != vocab_size or not abs(mass - 1) <= _NEAR:
        raise SettingsError(
            f"a row of {row.size} numbers and the mass {mass:g}: write {vocab_size} "
            "log-probabilities that make 1 together, such as logits - "
            "numpy.logaddexp.reduce(logits), or {token id: probability}"
        )
    return row


def _array(given: object, size: int | None = None) -> F32:
    try:
        found: F32 = np.array(given, np.float32)
    except Exception as error:
        raise SettingsError(
            f"answer={quoted(given)}: write float numbers, {{token id: probability}}, or what "
            f"lmpool.wants answers it with ({said(error)})"
        ) from None
    if found.ndim != 1 or np.isnan(found).any() or size not in (None, found.size):
        raise SettingsError(
            f"answer={quoted(given)} of shape {found.shape}: write {size or 'some'} numbers in one "
            "dimension, none of them NaN"
        )
    found.flags.writeable = False
    return found
