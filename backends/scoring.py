"""Scoring texts piece by piece, so that other requests are computed between the pieces.

An engine that scores texts itself is given a piece of several: a `Score` of the text up to where
the piece ends. Of any other the rows before each token are asked, and reduced as they come.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import Outcome, Request
from lmpool.errors import PromptFailed
from lmpool.wants import Row, Score, TextScores

MOST_ROWS: Final = 64
"""Rows of texts that are asked for at once."""
MOST_ROW_BYTES: Final = 16 << 20
"""The bytes, in float32, that they may take together; one may take more."""

_POSITION: Final = struct.Struct(">I")


class Scoring:
    """One text on its way: its request, and the scores of the positions that are done."""

    def __init__(self, request: Request, want: Score) -> None:
        self.request = request
        self.want = want
        self.next = want.start
        """The first position that was not asked for yet."""
        self._left = request.tokens.size - want.start
        self._scores = want.blank(self._left)

    @property
    def waiting(self) -> int:
        """How many positions were not asked for yet."""
        return self.request.tokens.size - self.next

    @property
    def taken_in(self) -> int:
        """How many of the text's tokens the pieces asked for so far have had."""
        return self.next if self.next > self.want.start else 0

    def next_piece(self, stop: int) -> Request:
        """What to ask for the positions up to `stop` - 1 of an engine that scores."""
        start, self.next = self.next, stop
        want = self.want.piece(start, stop)
        return replace(self.request, tokens=self.request.tokens[:stop], want=want)

    def next_row(self) -> Request:
        """What to ask for the next position of an engine that gives rows."""
        position, self.next = self.next, self.next + 1
        name = self.request.id + b"/" + _POSITION.pack(position)
        return Request(name, self.request.tokens[:position], self.request.adapter, Row())

    def take_row(self, position: int, row: npt.NDArray[np.float32]) -> bool:
        """Reduce the row before a position; whether the text is finished.

        Raises `PromptFailed` for a row of NaN.
        """
        want = self.want.piece(position, position + 1)
        return self.take(position, want.of_rows(row[None], self.request.tokens[position:]))

    def take(self, position: int, found: TextScores) -> bool:
        """Keep the scores of positions from `position` on; whether the text is finished."""
        start = position - self.want.start
        stop = start + found.logprobs.size
        for whole, part in zip(self._scores.arrays(), found.arrays(), strict=True):
            whole[start:stop] = part
        self._left -= stop - start
        return not self._left

    def scores(self) -> TextScores:
        """The scores of a text that is finished, no longer to be written."""
        for array in self._scores.arrays():
            array.flags.writeable = False
        return self._scores


class Scorings:
    """Texts on their way, which take turns: each step asks for so much of them and no more."""

    def __init__(self) -> None:
        self._texts: dict[bytes, Scoring] = {}
        self._asked: dict[bytes, tuple[Scoring, int]] = {}
        """By the id that the engine was asked with: the text, and the first position."""

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, asked: bytes) -> bool:
        """Whether an engine was asked for a part of a text by this id."""
        return asked in self._asked

    @property
    def asked(self) -> int:
        """How many parts an engine was asked for that have no outcome yet."""
        return len(self._asked)

    def text(self, asked: bytes) -> bytes:
        """The id of the text of which an engine was asked for a part by this id."""
        return self._asked[asked][0].request.id

    def begin(self, request: Request, want: Score) -> None:
        """Take in a text that was checked."""
        self._texts[request.id] = Scoring(request, want)

    def requests(self) -> Collection[Request]:
        """Those of the texts."""
        return [scoring.request for scoring in self._texts.values()]

    def cancel(self, ids: Collection[bytes]) -> None:
        """Forget these texts."""
        for cancelled in ids:
            self._texts.pop(cancelled, None)

    def orphans(self) -> list[bytes]:
        """The ids of parts in flight whose text was cancelled, or failed: nobody waits for them."""
        found = [
            name for name, (text, _) in self._asked.items() if text.request.id not in self._texts
        ]
        for name in found:
            del self._asked[name]
        return found

    def next_rows(self, vocab_size: int) -> list[Request]:
        """The rows to ask for now, beside those in flight."""
        most = max(1, min(MOST_ROWS, MOST_ROW_BYTES // (4 * vocab_size)))
        requests: list[Request] = []
        for scoring in list(self._texts.values()):
            room = most - len(self._asked)
            if room <= 0:
                break
            for _ in range(min(room, scoring.waiting)):
                position = scoring.next
                requests.append(self._ask(scoring.next_row(), scoring, position))
            self._to_the_end(scoring)
        return requests

    def next_pieces(self, most: int, continues: Callable[[int], bool]) -> list[Request]:
        """The pieces to ask for now, of about `most` tokens together, one at least.

        A text for whose length `continues` is false is one piece.
        """
        requests: list[Request] = []
        for scoring in list(self._texts.values()):
            size, position, had = scoring.request.tokens.size, scoring.next, scoring.taken_in
            stop = min(size, max(position + 1, had + most)) if continues(size) else size
            if requests and stop - had > most:
                break
            requests.append(self._ask(scoring.next_piece(stop), scoring, position))
            self._to_the_end(scoring)
            most -= stop - had
            if most <= 0:
                break
        return requests

    def take(self, outcome: Outcome) -> Outcome | None:
        """What comes of a part that was asked for: the outcome of its text, or nothing yet."""
        scoring, position = self._asked.pop(outcome.id)
        request = scoring.request
        if request.id not in self._texts:
            return None
        error = outcome.error
        if error is None:
            try:
                if not self._keep(scoring, position, outcome):
                    return None
            except PromptFailed as failed:
                error = failed
        del self._texts[request.id]
        if error is not None:
            return Outcome(request.id, error=error)
        return Outcome(request.id, answer=scoring.scores())

    def _keep(self, scoring: Scoring, position: int, outcome: Outcome) -> bool:
        if isinstance(outcome.answer, TextScores):
            return scoring.take(position, outcome.answer)
        if outcome.row is None:
            raise PromptFailed("the engine gave neither scores nor a row")
        return scoring.take_row(position, outcome.logprobs())

    def _ask(self, request: Request, scoring: Scoring, position: int) -> Request:
        self._asked[request.id] = (scoring, position)
        return request

    def _to_the_end(self, scoring: Scoring) -> None:
        self._texts[scoring.request.id] = self._texts.pop(scoring.request.id)
