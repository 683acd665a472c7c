"""Keys, as they are pressed."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

try:
    import termios
    import tty
except ImportError:  # a system that has no such terminals
    termios = tty = None  # type: ignore[assignment]

Pressed = Callable[[float], str]
"""Waits so many seconds for keys: what was typed, or an empty string."""


@contextmanager
def keys_pressed() -> Iterator[Pressed]:
    """While it lasts keys are read as they come, and not shown. Ctrl-C is still a signal."""
    if termios is None or tty is None or not sys.stdin.isatty():
        yield _nothing
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        yield lambda seconds: _read(stdin, seconds)
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _nothing(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read(stdin: int, seconds: float) -> str:
    if not select.select([stdin], [], [], seconds)[0]:
        return ""
    typed = os.read(stdin, 64)
    if not typed:
        raise KeyboardInterrupt  # the terminal is gone
    return typed.decode("ascii", "replace")
