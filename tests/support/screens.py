"""Terminals for tests: what is shown at a width, and a real one with a program in it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import termios
import threading
from typing import Any, Self

from rich.console import Console, RenderableType

WIDTHS = (40, 60, 80, 120, 200)
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def screen(shown: RenderableType, width: int, height: int = 25) -> list[str]:
    """The lines of a terminal that is so wide."""
    console = Console(
        file=io.StringIO(), width=width, height=height, highlight=False, legacy_windows=False
    )
    console.print(shown)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def unbroken(lines: list[str]) -> str:
    """What stands there, however it was wrapped."""
    return re.sub(r"[\s│┃]+", "", "".join(lines))


class Terminal:
    """A program in a pseudo-terminal that redraws its whole screen each time."""

    def __init__(self, command: list[str], width: int, height: int, **options: Any) -> None:
        self._mine, theirs = pty.openpty()
        self.resize(width, height)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, **options
        )
        os.close(theirs)
        self._output = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self._ended.set()
        self._thread.join(60)
        os.close(self._mine)

    def resize(self, width: int, height: int) -> None:
        """Make it so many columns and lines."""
        fcntl.ioctl(self._mine, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def modes(self) -> list[Any]:
        """How it treats what is typed."""
        return termios.tcgetattr(self._mine)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._mine, keys.encode())

    @property
    def output(self) -> str:
        """All that it was sent."""
        return self._output.decode("utf-8", "replace")

    @property
    def drawn(self) -> str:
        """The screen as it was drawn last, without colours."""
        return _STYLES.sub("", self.output.rpartition("\x1b[H")[2]).replace("\r", "")

    def _read(self) -> None:
        while not self._ended.is_set():
            if select.select([self._mine], [], [], 0.05)[0]:
                try:
                    self._output += os.read(self._mine, 1 << 16)
                except OSError:  # whoever had the other end is gone
                    return
