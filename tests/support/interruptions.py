"""Ctrl-C at each point of a call at which Python looks for signals: behind calls, at the beginnings
of functions, and where loops begin anew."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

LOOKS = frozenset(("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"))
"""Instructions behind which it looks."""


@cache
def _handlers(code: CodeType) -> list[Any]:
    return dis._parse_exception_table(code)  # type: ignore[attr-defined,no-any-return]


def _handler(code: CodeType, at: int) -> object:
    """Where an error goes that an instruction raises."""
    return next((h.target for h in _handlers(code) if h.start <= at < h.end), None)


class Interruption:
    """Of a call by this thread, at the point of a number, counted from 1; of 0 none comes. Points
    are those of all code, or of what lies `within` a folder."""

    def __init__(self, at: int, within: str = "") -> None:
        self._at = at
        self._within = within
        self.points = 0
        """Of the call, up to its interruption."""
        self.place = "nowhere"
        """Where it came."""
        self._before: dict[int, tuple[str, int]] = {}
        """The instruction that each frame has just run, and where that stands."""

    def run(self, call: Callable[[], object]) -> BaseException | None:
        """Make the call. Returns what it raised."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except BaseException as error:
            return error
        finally:
            sys.settrace(before)
        return None

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if file == __file__ or not file.startswith(self._within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._before.pop(id(frame), None)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "return":
            self._before.pop(id(frame), None)
        if event != "opcode":
            return self._step
        code, here = frame.f_code, frame.f_lasti
        name, at = self._before.get(id(frame), ("", 0))
        self._before[id(frame)] = dis.opname[code.co_code[here]], here
        # What comes behind an instruction is raised by that one, and here by the next.
        if name in LOOKS and _handler(code, at) == _handler(code, here):
            self.points += 1
            if self.points == self._at:
                self.place = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._step
