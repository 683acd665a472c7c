"""What counts as a number, of whichever library it is, how values are shown, and whether there is
a working directory."""

from __future__ import annotations

import math
import operator
import os
import traceback
from collections.abc import Iterator
from numbers import Real
from typing import Final, TypeGuard

from lmpool.errors import SettingsError

SHOWN: Final = 60
"""Characters of a bad value that a message quotes."""


def quoted(value: object, most: int = SHOWN) -> str:
    """A value for an error's message: its repr, as far as it has one and fits."""
    try:
        return repr(value)[:most]
    except Exception:  # of the value's own, or an integer of thousands of digits
        return f"<{type(value).__name__}>"


def counted(count: int, what: str) -> str:
    """A number of things, whose plural has an s."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def words(error: BaseException) -> str:
    """What an error says, as it can travel; '' where it says nothing."""
    try:
        # Paths that are no UTF-8 have lone surrogates.
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception:  # of the error's own
        return ""


def said(error: BaseException, most: int = 200) -> str:
    """An error that is none of ours, as part of a message: its kind and its words."""
    text = words(error)[:most]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def chained(error: BaseException | None, *, hidden: bool = False) -> Iterator[BaseException]:
    """An error and those behind it that a traceback shows, each once; what failed first is last.

    Those that are `hidden` are held by it all the same: what was handled as it was raised from
    another, or from None.
    """
    left, seen = [error], set[int]()
    while left:
        found = left.pop()
        if found is None or id(found) in seen:  # an error may be behind itself
            continue
        seen.add(id(found))
        yield found
        cause = found.__cause__
        if hidden or (cause is None and not found.__suppress_context__):
            left.append(found.__context__)
        left.append(cause)


def why_failed(error: BaseException, text: str | None = None) -> str:
    """Why an engine's library failed: the kind of its error and its words, or `text` for them.

    Where it has none, it is the line that raised it, and what to do. A file that
    safetensors finds damaged has the remedy with it, which its own words lack.
    """
    kind = type(error).__name__
    text = words(error).strip() if text is None else text
    if kind == "SafetensorError" and "deserializing header" in text:
        text += ": a file of weights is damaged or was not downloaded whole; get it again"
    frames = traceback.extract_tb(error.__traceback__)
    if text or not frames:
        return f"{kind}: {text}" if text else kind
    return (
        f"{kind} without words, of {frames[-1].line!r} ({frames[-1].filename}, line "
        f"{frames[-1].lineno}): serve the model with another engine, or ask who makes this one"
    )


def as_number(value: object) -> float | None:
    """A real number of any library as float, inf where it is too large; None for anything else.

    Booleans are none, and of arrays and tensors only those that are one number.
    """
    if isinstance(value, bool):
        return None
    if type(value) is int or type(value) is float:
        return _as_float(value)
    try:
        if not isinstance(value, Real):
            item = getattr(value, "item", None)  # of an array or tensor without dimensions
            value = item() if item is not None and getattr(value, "ndim", None) == 0 else None
            if isinstance(value, bool) or not isinstance(value, Real):
                return None
        return _as_float(value)
    except Exception:  # of the value's own
        return None


def _as_float(value: Real | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def as_integer(value: object) -> int | None:
    """An integer of any library as int; None for anything else, booleans too."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        if "bool" in str(getattr(value, "dtype", "")):
            return None  # numbers to `operator.index`, as arrays and tensors of booleans are
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # a TypeError, or of the value's own
        return None


def is_integer(value: object) -> bool:
    """Whether it is an integer by itself: a tensor with dimensions is a list, even one of one."""
    if type(value) is int:
        return True
    try:
        return not getattr(value, "ndim", 0) and as_integer(value) is not None
    except Exception:  # of the value's own
        return False


def is_text(value: object) -> TypeGuard[str]:
    """Whether this is a string that can travel: one without lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_working_directory() -> None:
    """Raise `SettingsError` where the folder that this process works in was deleted: arq and
    transformers, which look for it, end then with an error that says nothing."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise SettingsError(
            "the working directory was deleted: change to a folder that is there, such as by "
            'cd "$HOME", and try again'
        ) from None
