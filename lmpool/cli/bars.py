"""Probabilities as bars of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, set_cell_size

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def bar(fraction: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar that fills `fraction` of `width` columns, to an eighth of a column.

    What is not nothing shows: a positive fraction gets at least the thinnest bar.
    """
    fraction = min(1.0, max(0.0, fraction))
    if ascii_only:
        return "#" * max(round(fraction * width), 1 if fraction > 0 else 0)
    eighths = max(round(fraction * width * 8), 1 if fraction > 0 else 0)
    full, rest = divmod(eighths, 8)
    return _EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")


def token_text(token: bytes) -> str:
    """A token as one visible word: spaces and line ends are shown, what is no text in hex."""
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in token)
    if not text:
        return "(nothing)"
    shown = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def bar_lines(
    tokens: Sequence[bytes],
    ids: Sequence[int] | npt.NDArray[np.int32],
    probabilities: Sequence[float] | npt.NDArray[np.float32],
    *,
    width: int = 40,
    ascii_only: bool = False,
) -> list[str]:
    """One line a token: its text, its probability, and a bar relative to the likeliest."""
    labels = [token_text(tokens[i]) if i < len(tokens) else f"<{i}>" for i in ids]
    if ascii_only:
        labels = [ascii_text(label) for label in labels]
    column = max(map(cell_len, labels), default=0)
    most = max((float(p) for p in probabilities), default=0.0) or 1.0
    return [
        f"{set_cell_size(label, column)}  {100 * float(p):5.1f} %  "
        f"{bar(float(p) / most, width, ascii_only=ascii_only)}"
        for label, p in zip(labels, probabilities, strict=True)
    ]


def ascii_text(text: str) -> str:
    """For terminals that know no other characters."""
    plain = text.replace("␣", "_").replace("⏎", "\\n").replace("⇥", "\\t")
    return plain.encode("ascii", "backslashreplace").decode()
