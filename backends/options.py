"""Checks of options that several engines have."""

from __future__ import annotations

from typing import Final

from lmpool.errors import SettingsError

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
