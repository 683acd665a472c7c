"""Checks of options that several engines have."""

from __future__ import annotations

import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lmpool.errors import SettingsError
from lmpool.masking import mask_secrets

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")


def check_dtype(dtype: str) -> None:
    """Raise `SettingsError` for an unknown dtype."""
    if dtype not in DTYPES:
        raise SettingsError(f"dtype={dtype!r}: one of {', '.join(DTYPES)} expected")


def check_positive(**options: object) -> None:
    """Raise `SettingsError` for an option that is neither None nor a positive integer."""
    for name, value in options.items():
        if value is not None and (type(value) is not int or value < 1):
            raise SettingsError(f"{name}={value!r}: a positive integer expected")


_PLAIN: Final = frozenset(
    {bool, int, float, str, list, dict, tuple, set, types.NoneType, Any, object, Sequence, Mapping}
    | {os.PathLike}
)
_STRICT: Final = ConfigDict(strict=True)


def check_types(whose: str, given: Mapping[str, object], taker: Callable[..., object]) -> None:
    """Raise `SettingsError` for an option whose value is not of the type that `taker` names.

    Options of which it names none, or one that is a class of its own, are left to it.
    """
    parameters = inspect.signature(taker).parameters
    for name, value in given.items():
        kind = _kind(taker, parameters[name].annotation) if name in parameters else Any
        if not _is_plain(kind):
            continue
        try:
            TypeAdapter(kind, config=_STRICT).validate_python(value)
        except ValidationError:
            expected = inspect.formatannotation(kind).replace("collections.abc.", "")
            shown = f"{mask_secrets({name: value})[name]!r:.200}"
            raise SettingsError(f"{whose} has {name}={shown}: {expected} expected") from None


def _kind(taker: Callable[..., object], annotation: Any) -> Any:
    """An annotation as a type; Any where it has names for type checkers alone, or there is none."""
    module = sys.modules.get(taker.__module__)
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, vars(module))["it"]
    except Exception:
        return Any


def _is_plain(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is None:
        return kind in _PLAIN
    if origin is Literal:
        return True
    if origin not in (typing.Union, types.UnionType) and origin not in _PLAIN:
        return False
    return all(part is ... or _is_plain(part) for part in typing.get_args(kind))
