"""Scores of texts that were scored a moment ago, for texts that begin like them.

vLLM's prefix cache has keys and values, and no scores: a text that shares a context with another
would be computed whole for the sake of positions that were scored before. Texts are found by a
digest of each few tokens and all before them. One that begins like a text that is being scored
waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lmpool.backends.engine import Tokens
from lmpool.wants import Score, TextScores, TopLogprobs
from lmpool.wants.answers import freeze
from lmpool.wants.position_ids import PositionIds

CHUNK: Final = 16
"""Tokens of a digest, and the least number of positions for which another text is of use."""
MOST_BYTES: Final = 16 << 20
MOST_OF_ONE: Final = 8
"""Of the bytes that are kept, one text has no more than this part: it would be gone before others
had any use of it."""
_ENTRY_BYTES: Final = 150
"""What a digest takes, about."""


@dataclass(slots=True, eq=False)
class ScoredText:
    """A text that is being scored, or was: then it has `scores`, those from `start` on."""

    tokens: Tokens
    start: int
    digests: list[bytes] = field(default_factory=list)
    """Those by which it is found."""
    scores: TextScores | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        held = 0 if self.scores is None else self.scores.nbytes
        return held + self.tokens.nbytes + _ENTRY_BYTES * len(self.digests)


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """How a text begins: like `text` up to position `parts_at`, where their tokens differ."""

    text: ScoredText
    parts_at: int

    def is_worth_waiting_for(self, tokens: Tokens, want: Score) -> bool:
        """Whether it is half of what is to be scored, of a text that soon will be."""
        saved, size = self.parts_at - want.start, self.text.tokens.size
        return (
            self.text.scores is None
            and 2 * saved >= tokens.size - want.start
            and (size <= 2 * self.parts_at)
        )

    def rest(self, want: Score) -> Score:
        """What is still to be scored."""
        return Score(self.parts_at, want.top_logprobs, want.token_ids, want.temperature)

    def with_rest(self, want: Score, rest: TextScores) -> TextScores:
        """The scores of all of the text."""
        scores = self.text.scores
        assert scores is not None
        known = slice(want.start - self.text.start, self.parts_at - self.text.start)
        pairs = zip(scores.arrays(), rest.arrays(), strict=True)
        logprobs, ranks, *others = [np.concatenate([old[known], new]) for old, new in pairs]
        given = None if rest.token_logprobs is None else others.pop(0)
        whole = TextScores(logprobs, ranks, TopLogprobs(*others) if others else None, given)
        freeze(whole)
        return whole


class KnownScores:
    """The texts that are being scored, and the last that were, as far as `most_bytes` go."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._found_by: dict[bytes, ScoredText] = {}
        self._kept: dict[int, ScoredText] = {}
        """Those that have scores, by their `id`; the one that is of no use for longest first."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def beginning(self, adapter: str | None, tokens: Tokens, want: Score) -> Beginning | None:
        """The text whose beginning is of most use, if one is."""
        found = None
        for digest in _digests(adapter, tokens, want):
            text = self._found_by.get(digest)
            if text is None:
                break
            if id(text) in self._kept:
                self._kept[id(text)] = self._kept.pop(id(text))
            if text.start <= want.start:
                found = text
        if found is None:
            return None
        both = min(tokens.size, found.tokens.size)
        apart = np.flatnonzero(tokens[:both] != found.tokens[:both])
        # The last position is scored anew where nothing parts them: vLLM computes something.
        parts_at = min(int(apart[0]) if apart.size else both, tokens.size - 1)
        if parts_at - want.start < CHUNK:
            return None
        return Beginning(found, parts_at)

    def begin(self, adapter: str | None, tokens: Tokens, want: Score) -> ScoredText | None:
        """A text is being scored from now on, until `end`; None where it will not be kept."""
        count = tokens.size - want.start
        if _scores_bytes(want, count) > self._most_bytes // MOST_OF_ONE:
            return None
        text = ScoredText(tokens, want.start)
        for digest in _digests(adapter, tokens, want):
            other = self._found_by.get(digest)
            if other is not None and other.start <= want.start:
                continue
            if other is not None:  # which is of less use
                other.digests.remove(digest)
                self._bytes -= _ENTRY_BYTES if id(other) in self._kept else 0
            self._found_by[digest] = text
            text.digests.append(digest)
        return text

    def end(self, text: ScoredText, scores: TextScores | None) -> None:
        """It was scored, or, without scores, was given up."""
        text.scores = scores
        if scores is None or not text.digests:
            self._forget(text)
            return
        self._kept[id(text)] = text
        self._bytes += text.nbytes
        while self._bytes > self._most_bytes:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._bytes -= oldest.nbytes
            self._forget(oldest)

    def clear(self) -> None:
        """Forget all that have scores."""
        for text in self._kept.values():
            self._forget(text)
        self._kept.clear()
        self._bytes = 0

    def _forget(self, text: ScoredText) -> None:
        for digest in text.digests:
            del self._found_by[digest]
        text.digests = []


def _scores_bytes(want: Score, count: int) -> int:
    """Of the scores of so many positions."""
    ids = len(want.token_ids) if isinstance(want.token_ids, bytes) else 0
    top = 8 * want.top_logprobs + 4 if want.top_logprobs else 0
    return count * (8 + top + ids)


def _digests(adapter: str | None, tokens: Tokens, want: Score) -> Iterator[bytes]:
    """One for each `CHUNK` of a text and all before it, of what is scored alike."""
    if isinstance(want.token_ids, PositionIds):
        return
    alike = (adapter, want.top_logprobs, want.temperature, want.token_ids)
    hashed = hashlib.blake2b(repr(alike).encode(), digest_size=16)
    data, width = tokens.astype("<u4").tobytes(), 4 * CHUNK
    for at in range(0, len(data) - width + 1, width):
        hashed.update(data[at : at + width])
        yield hashed.digest()
