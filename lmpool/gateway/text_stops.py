"""Text as it is drawn: whole characters only, and cut exactly at stop texts."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Final

MAX_STOPS: Final = 4096
MAX_STOP_CHARACTERS: Final = 65_536
"""Of all stop texts together."""


class StopTexts:
    """Any number of texts that end another: an automaton (Aho and Corasick's) over them.

    A state is the longest end of what was read that is the beginning of a stop text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ends: list[int | None] = [None]
        """The longest stop text that ends in a state."""
        self._fall = [0]
        for number, stop in enumerate(stops):
            self._add(number, stop)
        self._link()

    def _add(self, number: int, stop: str) -> None:
        state = 0
        for character in stop:
            into = self._next[state].get(character)
            if into is None:
                into = len(self._next)
                self._next[state][character] = into
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._ends.append(None)
                self._fall.append(0)
            state = into
        if state and self._ends[state] is None:
            self._ends[state] = number

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, into in self._next[state].items():
                waiting.append(into)
                self._fall[into] = self.step(self._fall[state], character)
                if self._ends[into] is None:
                    self._ends[into] = self._ends[self._fall[into]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (into := self._next[state].get(character)) is None:
            if not state:
                return 0
            state = self._fall[state]
        return into

    def depth(self, state: int) -> int:
        """How many of the last characters may be the beginning of a stop text."""
        return self._depth[state]

    def ended(self, state: int) -> str | None:
        """The stop text that ends here, the longest of them."""
        number = self._ends[state]
        return None if number is None else self.stops[number]


class TextCut:
    """The text of bytes that come in parts, as far as no stop text can begin in it.

    What is no UTF-8 becomes U+FFFD; bytes that may be the beginning of a character wait for the
    rest of it. After a stop text, `stop`, nothing comes any more.
    """

    def __init__(self, stops: StopTexts | None = None, include_stop: bool = False) -> None:
        self.stop: str | None = None
        """The text that ended it."""
        self._stops = stops
        self._include = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = 0
        self._held = ""

    def feed(self, data: bytes, final: bool = False) -> str:
        """What can be told after `data`; with `final` all the rest."""
        if self.stop is not None:
            return ""
        text = self._decoder.decode(data, final)
        if self._stops is None:
            return text
        for at, character in enumerate(text, 1):
            self._state = self._stops.step(self._state, character)
            stop = self._stops.ended(self._state)
            if stop is not None:
                self.stop = stop
                whole = self._held + text[:at]
                self._held = ""
                return whole if self._include else whole[: len(whole) - len(stop)]
        whole = self._held + text
        keep = 0 if final else self._stops.depth(self._state)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]
