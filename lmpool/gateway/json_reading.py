"""Large JSON read in parts: one call of `json.loads` holds all threads of Python until it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

PART: Final = 1 << 15
"""Bytes that are read at a time, but for texts."""
MAX_DEPTH: Final = 100
"""Of what is larger: each level is looked through once more."""
_BLANKS: Final = b" \t\n\r"
_COMMA, _QUOTE = b',"'
_OPEN, _CLOSE = b"{}"
"""And with a bit of theirs away the other brackets."""
_BIT: Final = _OPEN ^ b"["[0]


class _Reader:
    """A body, and where its commas and brackets are: `numpy` finds them beside other threads."""

    def __init__(self, body: bytes, parse_float: Callable[[str], Any]) -> None:
        coding = json.detect_encoding(body)
        if coding != "utf-8":
            body = body.decode(coding, "surrogatepass").encode("utf-8", "surrogatepass")
        self._body = body
        self._parse_float = parse_float
        plain = body
        if b"\\" in body:
            plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        data = np.frombuffer(plain, np.uint8)
        folded = data | _BIT
        marks = (folded == _OPEN) | (folded == _CLOSE) | (data == _COMMA)
        marks &= ~np.logical_xor.accumulate(data == _QUOTE)
        self._at = np.flatnonzero(marks)
        kinds = folded[self._at]
        self._is_comma = data[self._at] == _COMMA
        steps = (kinds == _OPEN).astype(np.int8) - (kinds == _CLOSE).astype(np.int8)
        self._depth = np.cumsum(steps, dtype=np.int32)
        """Behind each."""
        if self._depth.size and self._depth.max() > MAX_DEPTH:
            raise RecursionError

    def all(self) -> Any:
        """The value. Raises as `json.loads` does."""
        return self._value(0, len(self._body), 0, len(self._at))

    def _loads(self, text: bytes) -> Any:
        return json.loads(text, parse_float=self._parse_float)

    def _value(self, begin: int, end: int, first: int, last: int) -> Any:
        """What is written from `begin` to `end`, where the marks from `first` to `last` are."""
        if end - begin <= PART or first == last:
            return self._loads(self._body[begin:end])
        opened, closed = int(self._at[first]), int(self._at[last - 1])
        if self._body[begin:opened].strip(_BLANKS) or self._body[opened] not in b"[{":
            raise _wrong("Expecting value")
        within = self._depth[first : last - 1]
        if within.size and within.min() < within[0]:
            raise _wrong("Extra data")
        brackets = self._body[opened : opened + 1], self._body[closed : closed + 1]
        if brackets not in ((b"[", b"]"), (b"{", b"}")):  # nor where it never ends
            raise _wrong("Expecting ',' delimiter")
        if self._body[closed + 1 : end].strip(_BLANKS):
            raise _wrong("Extra data")
        found: Any = [] if brackets[0] == b"[" else {}
        put = found.extend if isinstance(found, list) else found.update
        for part in self._parts(first, last):
            put(self._part(*part, brackets))
        return found

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, int, int, int, bool]]:
        """Of a container between its brackets: spans as `_value` has them, cut at commas of its
        own, and whether each is one item."""
        level = self._depth[first]
        # Nothing of all marks has a name: it would be kept while what lies deeper is read.
        cuts = np.flatnonzero(self._is_comma[first:last] & (self._depth[first:last] == level))
        cuts += first
        ends = np.append(self._at[cuts], self._at[last - 1])
        number, begin, mark = 0, int(self._at[first]) + 1, first + 1
        while number < len(ends):
            # As many items as fit, and one at least.
            stop = max(number + 1, int(np.searchsorted(ends, begin + PART, "right")))
            end = int(ends[stop - 1])
            behind = int(cuts[stop - 1]) if stop <= len(cuts) else last - 1
            yield begin, end, mark, behind, stop == number + 1
            number, begin, mark = stop, end + 1, behind + 1

    def _part(
        self,
        begin: int,
        end: int,
        first: int,
        last: int,
        alone: bool,
        brackets: tuple[bytes, bytes],
    ) -> Any:
        """Items of a container, as a list or a dict; only `alone` may they be none at all."""
        before, behind = brackets
        if end - begin <= PART or first == last or not alone:
            found = self._loads(before + self._body[begin:end] + behind)
            if not found and not self._is_empty(begin, end):
                raise _wrong("Expecting value")
            return found
        if before == b"[":
            return [self._value(begin, end, first, last)]
        opened = int(self._at[first])
        name = self._body[begin:opened]
        if not name.rstrip(_BLANKS).endswith(b":"):
            raise _wrong("Expecting ':' delimiter")
        named = json.loads(before + name + b"0" + behind)
        return dict.fromkeys(named, self._value(opened, end, first, last))

    def _is_empty(self, begin: int, end: int) -> bool:
        """Whether brackets stand on both sides, with nothing between them."""
        return self._body[begin - 1] in b"[{" and self._body[end] in b"]}"


def _wrong(what: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(what, "", 0)


def loads(body: bytes, parse_float: Callable[[str], Any]) -> Any:
    """As `json.loads`, while other threads go on. Raises what that does."""
    return _Reader(body, parse_float).all()
