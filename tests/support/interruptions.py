"""Ctrl-C at each point of a call at which Python looks for signals: behind calls, at the beginnings
of functions, and where loops begin anew."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any, Final

LOOKS: Final = frozenset(("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME"))
"""Instructions behind which it looks."""
LOOKS_BEFORE: Final = "JUMP_BACKWARD"
"""The one before which it does, for all that one can tell: it may be of no ``with`` or ``try`` that
is around it."""
TOOL: Final = 4
"""A number for `sys.monitoring` that no debugger or profiler has."""


@cache
def _handlers(code: CodeType) -> list[Any]:
    return dis._parse_exception_table(code)  # type: ignore[attr-defined,no-any-return]


def _handler(code: CodeType, at: int) -> object:
    """Where an error goes that an instruction raises."""
    return next((h.target for h in _handlers(code) if h.start <= at < h.end), None)


class Interruption:
    """Of a call by this thread, at the point of a number, counted from 1; of 0 none comes. Points
    are those of all code, or of what lies `within` a folder. A handler of a program's own raises
    another `kind`."""

    def __init__(
        self, at: int, within: str = "", kind: type[BaseException] = KeyboardInterrupt
    ) -> None:
        self._at = at
        self._within = within
        self._kind = kind
        self.points = 0
        """Of the call, up to its interruption."""
        self.place = "nowhere"
        """Where it came."""
        self._before: dict[int, tuple[str, int]] = {}
        """The instruction that each frame has just run, and where that stands."""
        self._seen: _Traced | _Monitored = _SEEN_BY(self)

    def run(self, call: Callable[[], object]) -> BaseException | None:
        """Make the call. Returns what it raised."""
        self._seen.begin()
        try:
            call()
        except BaseException as error:
            return error
        finally:
            self._seen.end()
        return None

    def is_of(self, code: CodeType) -> bool:
        """Whether points are counted in this code."""
        file = code.co_filename
        return file != __file__ and file.startswith(self._within)

    def begin(self, frame: FrameType, at: int) -> None:
        """A function begins, or goes on behind a ``yield``."""
        self._before[id(frame)] = "RESUME", at

    def step(self, frame: FrameType, here: int) -> None:
        """An instruction is about to be run."""
        code = frame.f_code
        name, at = self._before.get(id(frame), ("", 0))
        now = dis.opname[code.co_code[here]]
        self._before[id(frame)] = now, here
        # What comes behind an instruction is raised by that one, and here by the next.
        if name in LOOKS and _handler(code, at) == _handler(code, here):
            self._point(frame)
        if now == LOOKS_BEFORE:
            self._point(frame)

    def _point(self, frame: FrameType) -> None:
        self.points += 1
        if self.points == self._at:
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            self._seen.end()
            raise self._kind


class _Traced:
    """Instructions as Python 3.11 tells of them."""

    def __init__(self, interruption: Interruption) -> None:
        self._to = interruption
        self._former: Any = None

    def begin(self) -> None:
        self._former = sys.gettrace()
        sys.settrace(self._enter)

    def end(self) -> None:
        sys.settrace(self._former)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._to.is_of(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._to.begin(frame, frame.f_lasti)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._to.step(frame, frame.f_lasti)
        return self._step


class _Monitored:
    """Instructions as later ones do, which trace none of a function that has begun."""

    def __init__(self, interruption: Interruption) -> None:
        self._to = interruption
        self._thread = threading.get_ident()

    def begin(self) -> None:
        watch: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        watch.use_tool_id(TOOL, "interruptions")
        events = watch.events
        for event in (events.PY_START, events.PY_RESUME):
            watch.register_callback(TOOL, event, self._begin)
        watch.register_callback(TOOL, events.INSTRUCTION, self._step)
        watch.set_events(TOOL, events.PY_START | events.PY_RESUME | events.INSTRUCTION)

    def end(self) -> None:
        watch: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        if watch.get_tool(TOOL) is not None:
            watch.set_events(TOOL, 0)
            watch.free_tool_id(TOOL)

    def _begin(self, code: CodeType, at: int) -> None:
        if threading.get_ident() == self._thread and self._to.is_of(code):
            self._to.begin(sys._getframe(1), at)

    def _step(self, code: CodeType, at: int) -> None:
        if threading.get_ident() == self._thread and self._to.is_of(code):
            self._to.step(sys._getframe(1), at)


_SEEN_BY: Final = _Monitored if sys.version_info >= (3, 12) else _Traced


def points_of(call: Callable[[], object], within: str = "") -> int:
    """How many points a call has. Raises what it raises."""
    whole = Interruption(0, within)
    raised = whole.run(call)
    if raised is not None:
        raise raised
    return whole.points
