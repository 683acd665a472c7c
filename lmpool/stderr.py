"""What is said on stderr, by whatever may run without one."""

from __future__ import annotations

import contextlib
import sys


def say(text: str, end: str = "\n") -> None:
    """A text on `sys.stderr`, where that takes one. Where it does not, what is to be done is done
    all the same, and the exit status says how it went."""
    if sys.stderr is None:  # closed (``2>&-``): print would take stdout for it
        return
    with contextlib.suppress(OSError, ValueError):  # no room, no reader, or closed since
        print(text, end=end, file=sys.stderr, flush=True)
