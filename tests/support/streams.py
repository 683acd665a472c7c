"""What a continuation of the mock engine is, and readers of its pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lmpool import Piece, PooledLM
from lmpool.backends.mock import mock_row
from lmpool.backends.sampling import sample_token


def continuation(prompt: Sequence[int], count: int, seed: int, vocab_size: int = 256) -> list[int]:
    """The first tokens that the mock engine draws at temperature 1, whatever ends it left out."""
    context = list(prompt)
    for step in range(count):
        context.append(sample_token(mock_row(context, vocab_size), 1.0, seed, step))
    return context[len(prompt) :]


def tokens_of(pieces: Iterable[Piece]) -> list[int]:
    """All tokens of pieces of which each begins where the last one ended; the last one ends all."""
    found: list[int] = []
    last: Piece | None = None
    for piece in pieces:
        assert last is None or last.finish_reason is None, "a piece after the last"
        assert piece.number == len(found), f"number {piece.number} behind {len(found)} tokens"
        assert piece.token_ids.size or piece.finish_reason is not None, "a piece of nothing"
        found += piece.token_ids.tolist()
        last = piece
    assert last is not None
    assert last.finish_reason is not None, "no last piece"
    return found


class Reader(threading.Thread):
    """Reads a stream in a thread of its own; waits before each piece for `may_read`."""

    def __init__(
        self, lm: PooledLM[Any], prompt: Sequence[int], may_read: Callable[[], object] = int,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.pieces: list[Piece] = []
        self._read: Iterator[Piece] = lm.sync.stream(prompt, **{"timeout": 150, **options})
        self._may_read = may_read
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for piece in self._read:
                self.pieces.append(piece)
                self._may_read()
        except BaseException as error:
            self._error = error

    @property
    def drawn(self) -> int:
        """How many tokens it has read; several may come as one piece."""
        return sum(piece.token_ids.size for piece in self.pieces)

    def tokens(self) -> list[int]:
        """All of them; what was raised in their place is raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return tokens_of(self.pieces)
