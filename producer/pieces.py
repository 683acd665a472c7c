"""Continuations that are read piece by piece, as they are drawn."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmpool.commands import Entry
from lmpool.errors import AnswerFormatError
from lmpool.model_info import ModelInfo
from lmpool.pieces import read_piece
from lmpool.producer.call_options import CallOptions
from lmpool.producer.pending import PendingCall
from lmpool.wants import Generation, Stream
from lmpool.wire import Job

logger = logging.getLogger(__name__)


class Pieces:
    """What was read of one continuation so far, for all who wait for it. Under the client's lock.

    `parts` only grows: who reads it keeps its own place.
    """

    __slots__ = ("are_read", "parts", "tokens", "want")

    def __init__(self, want: Stream) -> None:
        self.want = want
        self.parts: list[Generation] = []
        self.tokens = 0
        """How many tokens all parts have."""
        self.are_read = True
        """Whether more is to be read; else what is left comes with the whole."""

    def take(self, entries: Sequence[Entry], info: ModelInfo) -> bool:
        """Take in what was read behind all parts. Whether there was anything."""
        before = self.tokens
        for entry_id, fields in entries:
            try:
                part = read_piece(self.want, entry_id, fields, self.tokens, info)
            except AnswerFormatError as error:
                logger.warning("a piece was refused, the rest comes at once: %s", error)
                self.are_read = False
                break
            self.parts.append(part)
            self.tokens += part.token_ids.size
        return self.tokens > before


class StreamCall(PendingCall):
    """One reader's wait for a continuation: woken at each piece."""

    __slots__ = ("pieces",)

    def __init__(self, job: Job, options: CallOptions, info: ModelInfo) -> None:
        super().__init__([job], options.deadline.at, priority=options.priority, info=info)
        self.pieces: Pieces | None = None
        """Once the client has taken the call in."""
