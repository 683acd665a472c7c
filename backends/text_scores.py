"""Scores of texts, from the hidden states that an engine of torch computes on its way.

An engine shows what it has of some texts in a step; the rows that somebody wants go through its
head, a block at a time, and are reduced where they are. What comes of them is collected until the
text is whole. A text that is computed again is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.device import Copied, HostCopies, to_device
from lmpool.backends.reduction import Reduced, score_logits
from lmpool.wants import Score, TextScores
from lmpool.wants.answers import freeze

BLOCK_BYTES: Final = {"cpu": 30 << 20, "cuda": 256 << 20}
"""Of logits in float32 that the head computes at once. On a CPU what is over 32 MiB would be mapped
anew each time."""

Head = Callable[[torch.Tensor], torch.Tensor | None]
"""Logits [rows, vocab] of hidden states [rows, hidden]; None on ranks that only help with them."""


@dataclass(frozen=True, slots=True)
class Span:
    """The positions of a prompt that one step computes.

    Their hidden states are rows `offset` to `offset + count - 1` of the step's; the first of them
    is position `first` of the prompt.
    """

    offset: int
    first: int
    count: int


class PartialScores:
    """What a text's positions have got so far. `targets` are its scored tokens, `want.start` on."""

    def __init__(self, want: Score, targets: npt.NDArray[np.uint32]) -> None:
        self.want = want
        self.targets = targets.astype(np.int64)
        self.ids = want.ids_of(targets.size)
        self.key = (want.temperature, want.top_logprobs, 0 if self.ids is None else len(self.ids.T))
        """Texts that agree in it are reduced together."""
        self._scores = want.blank(targets.size)
        self._missing = np.ones(targets.size, bool)
        self._parts: list[tuple[slice, Copied, slice]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self._scores.nbytes

    def wanted(self, span: Span) -> Piece | None:
        """What a span has of it, if anything."""
        # The row after position p scores the token after it, which is position p + 1 of the text.
        start = self.want.start - 1
        first = max(span.first, start)
        stop = min(span.first + span.count, start + self.targets.size)
        if first >= stop:
            return None
        return Piece(self, slice(first - start, stop - start), span.offset + first - span.first)

    def put(self, some: slice, copied: Copied, place: slice) -> None:
        """Scores of `some` positions are at `place` of what is copied."""
        self._parts.append((some, copied, place))
        self._missing[some] = False

    def read(self) -> tuple[TextScores | None, float]:
        """The scores. Waits for the copies.

        None where positions are missing, or where logits were not finite: then the float is their
        logsumexp, and else 0.
        """
        bad = 0.0
        for some, copied, place in self._parts:
            *found, logsumexp = [tensor.numpy() for tensor in copied()]
            for whole, part in zip(self._scores.arrays(), found, strict=True):
                whole[some] = part[place]
            unsound = ~np.isfinite(logsumexp[place])
            if unsound.any():
                bad = float(logsumexp[place][unsound][0])
        if self._missing.any() or bad != 0:
            return None, bad
        freeze(self._scores)
        return self._scores, bad


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Positions of a text, in order, and the row of hidden states that scores the first of them."""

    text: PartialScores
    some: slice
    row: int

    @property
    def count(self) -> int:
        """How many they are."""
        return int(self.some.stop - self.some.start)


class _Group:
    """Pieces that are reduced alike, one after another from row `start` on."""

    def __init__(self, pieces: Sequence[Piece], start: int, device: torch.device) -> None:
        self._pieces = pieces
        self._start = start
        self._temperature, self._top, _ = pieces[0].text.key
        targets = np.concatenate([piece.text.targets[piece.some] for piece in pieces])
        ids = [p.text.ids[p.some] for p in pieces if p.text.ids is not None]
        self._targets = to_device(targets, device)
        self._ids = to_device(np.concatenate(ids).astype(np.int64), device) if ids else None
        self._reduced: list[Reduced] = []

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self._start + len(self._targets)

    def reduce(self, logits: torch.Tensor, at: int) -> None:
        """Reduce those of its rows that are in a block of logits [rows, vocab] from row `at` on."""
        first, last = max(at, self._start), min(at + len(logits), self.stop)
        if first >= last:
            return
        mine = slice(first - self._start, last - self._start)
        self._reduced.append(
            score_logits(
                logits[first - at : last - at],
                self._targets[mine],
                token_ids=None if self._ids is None else self._ids[mine],
                top=self._top,
                temperature=self._temperature,
            )
        )

    def copy(self, copies: HostCopies) -> None:
        """Have all that was reduced copied to the host."""
        if not self._reduced:
            return  # another rank keeps it
        parts = zip(*self._reduced, strict=True)
        copied = copies.start(*(torch.cat(part) for part in parts if part[0] is not None))
        at = 0
        for piece in self._pieces:
            piece.text.put(piece.some, copied, slice(at, at := at + piece.count))


def block_rows(device: torch.device, vocab_size: int) -> int:
    """How many rows of logits are there at once."""
    return max(1, BLOCK_BYTES.get(device.type, max(BLOCK_BYTES.values())) // (4 * vocab_size))


def reduce_pieces(
    pieces: Sequence[Piece], hidden: torch.Tensor, head: Head, rows: int, copies: HostCopies
) -> None:
    """Score pieces by hidden states [tokens, hidden], `rows` of logits at a time."""
    ordered = sorted(pieces, key=lambda piece: piece.text.key)
    groups: list[_Group] = []
    for _, alike in groupby(ordered, key=lambda piece: piece.text.key):
        start = groups[-1].stop if groups else 0
        groups.append(_Group(list(alike), start, hidden.device))
    wanted = np.concatenate([np.arange(p.row, p.row + p.count) for p in ordered])
    places = to_device(wanted, hidden.device)
    for at in range(0, len(places), rows):
        logits = head(hidden.index_select(0, places[at : at + rows]))
        if logits is not None:
            for group in groups:
                group.reduce(logits, at)
        del logits  # one block at a time
    for group in groups:
        group.copy(copies)
