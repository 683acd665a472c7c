"""Telling what is drawn of continuations that run, piece by piece.

A piece is kept until the whole continuation is there, for readers that come later, and for a worker
that takes over: it goes on where the last one ended. Of two workers that draw one continuation, as
one that was taken for dead and wakes, the second to tell a token otherwise lets go of the job.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import redis.exceptions

from lmpool.backends.engine import Outcome, Part
from lmpool.commands import Entry, Value
from lmpool.errors import AnswerFormatError
from lmpool.keys import ShardKeys
from lmpool.logs import about
from lmpool.model_info import ModelInfo
from lmpool.pieces import PIECE, read_piece
from lmpool.scripts import script
from lmpool.server import is_lost
from lmpool.servers import Servers
from lmpool.wants import Digest, Generation, Stream
from lmpool.worker.batching import Delivery

logger = logging.getLogger(__name__)

PIECES_LIFE_MS: Final = 600_000
"""How long pieces are kept after the last of them, unless the whole is there: as long as whoever
waits for it is known."""
TOLD_MOST: Final = 512
"""Pieces in one call."""
_OTHERS_WERE_TOLD: Final = -1


class StoredPiece(NamedTuple):
    """A piece as it is stored: how many tokens come before it, and how many there are with it."""

    before: int
    upto: int
    value: bytes


class Telling:
    """One continuation that a worker runs and tells.

    The engine's thread makes it; from then on the pieces are the publisher's, and `is_lost` says to
    both that another worker was faster and drew otherwise: what is drawn here is for nobody.
    """

    __slots__ = ("digest", "is_lost", "pieces", "shard", "want")

    def __init__(self, delivery: Delivery, want: Stream) -> None:
        self.digest = delivery.job.digest
        self.shard = delivery.stream.shard
        self.want = want
        self.pieces: list[StoredPiece] = []
        """All so far, in order: a server that lost them is told again."""
        self.is_lost = False


class Tellings:
    """Those that the engine runs. Owned by its thread."""

    def __init__(self, servers: Servers, info: ModelInfo) -> None:
        self._servers = servers
        self._info = info
        self._running: dict[bytes, Telling] = {}

    def begin(self, deliveries: Iterable[Delivery]) -> dict[Digest, tuple[Generation, ...]]:
        """Begin to tell those that are to be told; what was told of each before, in order."""
        by_shard: dict[str, list[Telling]] = {}
        for delivery in deliveries:
            want = delivery.job.want
            if isinstance(want, Stream):
                telling = Telling(delivery, want)
                self._running[telling.digest] = telling
                by_shard.setdefault(telling.shard.prefix, []).append(telling)
        told = {}
        for tellings in by_shard.values():
            told.update(self._told(tellings))
        return {digest: parts for digest, parts in told.items() if parts}

    def follow(self, delivery: Delivery) -> None:
        """What runs was delivered again: whoever reads it may have moved to another shard, where
        the next piece has all before it told over."""
        telling = self._running.get(delivery.job.digest)
        if telling is not None:
            telling.shard = delivery.stream.shard

    def of(self, parts: Iterable[Part]) -> list[tuple[Telling, Part]]:
        """What an engine drew, and whose it is."""
        return [(telling, part) for part in parts if (telling := self._running.get(part.id))]

    def lost(self) -> list[bytes]:
        """The ids of what need not be run any further here."""
        return [digest for digest, telling in self._running.items() if telling.is_lost]

    def end(self, digest: bytes) -> Telling | None:
        """What was told under this id, if anything; it runs no more."""
        return self._running.pop(digest, None)

    def _told(self, tellings: Sequence[Telling]) -> dict[Digest, tuple[Generation, ...]]:
        """What was told before of continuations of one shard, by whoever ran them."""
        server = self._servers.for_shard(tellings[0].shard)
        keys = [telling.shard.pieces(telling.digest) for telling in tellings]
        try:
            with self._servers.in_step(), server.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.xrange(key)
                found = pipeline.execute(raise_on_error=False)
            for entries in found:
                if isinstance(entries, Exception) and is_lost(entries):
                    raise entries  # of a server that is busy: it says nothing of the key
        except (redis.exceptions.RedisError, OSError) as error:
            # Told again from the start: of what was told otherwise the publisher hears.
            logger.debug("drawing from the start, without asking what was told: %s", error)
            return {}
        told, damaged = {}, []
        for telling, key, entries in zip(tellings, keys, found, strict=True):
            try:
                if isinstance(entries, Exception):  # a key of another type
                    raise AnswerFormatError(str(entries))
                told[telling.digest] = self._read(telling, entries)
            except AnswerFormatError as error:
                logger.warning("pieces that no worker wrote are taken away: %s", error)
                telling.pieces.clear()
                damaged.append(key)
        if damaged:
            with suppress(redis.exceptions.RedisError, OSError):  # they are told over, or end
                server.delete(*damaged)
        return told

    def _read(self, telling: Telling, entries: Sequence[Entry]) -> tuple[Generation, ...]:
        parts = []
        before = 0
        for entry_id, fields in entries:
            part = read_piece(telling.want, entry_id, fields, before, self._info)
            upto = before + part.token_ids.size
            telling.pieces.append(StoredPiece(before, upto, fields[PIECE]))
            parts.append(part)
            before = upto
        return tuple(parts)


class PieceWriter:
    """Tells what waits to be told. Owned by the publisher's thread, but for `add`."""

    def __init__(self, servers: Servers, vocab_size: int) -> None:
        self._servers = servers
        self._vocab_size = vocab_size
        self._waiting: deque[tuple[Telling, Part]] = deque()

    def add(self, parts: Iterable[tuple[Telling, Part]]) -> None:
        """Have these told, in their order. For any one thread."""
        self._waiting.extend(parts)

    def write(self) -> None:
        """Tell what waits. What cannot be told now is with the next piece, or the whole."""
        by_shard: dict[str, list[tuple[Telling, StoredPiece]]] = {}
        while self._waiting:
            telling, part = self._waiting.popleft()
            value = telling.want.encode(Outcome(part.id, answer=part.drawn), self._vocab_size)
            piece = StoredPiece(part.start, part.start + part.drawn.token_ids.size, value)
            telling.pieces.append(piece)
            by_shard.setdefault(telling.shard.prefix, []).append((telling, piece))
        for pieces in by_shard.values():
            try:
                self._tell_all(pieces)
            except (redis.exceptions.RedisError, OSError) as error:
                logger.debug("pieces could not be told: %s", error)

    def forget(self, shard: ShardKeys, digests: Iterable[Digest]) -> None:
        """Take the pieces of these away: the whole is there, or never will be."""
        keys = [shard.pieces(digest) for digest in digests]
        try:
            self._servers.for_shard(shard).delete(*keys)
        except (redis.exceptions.RedisError, OSError) as error:
            logger.debug("pieces end by themselves: %s", error)

    def _tell_all(self, pieces: Sequence[tuple[Telling, StoredPiece]]) -> None:
        shard = pieces[0][0].shard
        for start in range(0, len(pieces), TOLD_MOST):
            missing = self._tell(shard, pieces[start : start + TOLD_MOST])
            for telling, first in missing.items():
                again = [(telling, piece) for piece in telling.pieces if piece.before >= first]
                if not again or again[0][1].before > first:
                    telling.is_lost = True  # others were told in other pieces
                for at in range(0, len(again), TOLD_MOST):
                    self._tell(shard, again[at : at + TOLD_MOST])

    def _tell(
        self, shard: ShardKeys, pieces: Sequence[tuple[Telling, StoredPiece]]
    ) -> dict[Telling, int]:
        """One call. Returns whose earlier pieces are missing, and from which token on."""
        kept = [(telling, piece) for telling, piece in pieces if not telling.is_lost]
        if not kept:
            return {}
        arguments: list[Value] = [shard.prefix, PIECES_LIFE_MS]
        for telling, piece in kept:
            arguments += (telling.digest.hex(), piece.before, piece.upto, piece.value)
        server = self._servers.for_shard(shard)
        keys = [shard.stream().key]
        with self._servers.in_step():
            try:
                found = script("pieces")(server, keys, arguments)
            except (redis.exceptions.RedisError, OSError) as error:
                if not is_lost(error):
                    raise
                found = script("pieces")(server, keys, arguments)  # an idle connection had died
            missing: dict[Telling, int] = {}
            for (telling, piece), told in zip(kept, found, strict=True):
                if told == _OTHERS_WERE_TOLD:
                    logger.warning(
                        "%s is drawn elsewhere: let go", telling.digest.hex(), extra=about("stream")
                    )
                    telling.is_lost = True
                elif 0 <= told < piece.upto:
                    missing.setdefault(telling, told)
            return missing
