"""From what a pool draws to what a caller reads: text that ends where it should, token by token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from lmpool.gateway.merging import merged
from lmpool.gateway.pools import Model
from lmpool.gateway.sampling import MAX_HINT_TOKENS, Drawing
from lmpool.gateway.state import Gateway
from lmpool.gateway.text_offsets import TextOffsets
from lmpool.gateway.text_stops import TextCut
from lmpool.gateway.unread import Shelf
from lmpool.gateway.words import Words
from lmpool.producer import Piece
from lmpool.producer.deadline import Deadline
from lmpool.wants import FinishReason, Generation, TopLogprobs
from lmpool.wants.answers import Logprobs

Finish = Literal["stop", "length"]

PART_BYTES: Final = 1 << 10
"""What Python's objects of a part take."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a continuation, or all of it; the last one has a `finish_reason`.

    `token_ids` are all that was drawn, the ending too, which `text` is without. `stop_reason` is
    the stop text, or the id of the asked-for token, that ended it.
    """

    text: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    top_logprobs: TopLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    text_offsets: Sequence[int] = ()
    """Where in the text of the continuation each of them begins, where there are `logprobs`."""

    @property
    def size(self) -> int:
        """Bytes that it takes while it waits for its reader, about."""
        top = self.top_logprobs
        held = 0 if self.logprobs is None else self.logprobs.nbytes
        held += 0 if top is None else top.token_ids.nbytes + top.logprobs.nbytes
        return PART_BYTES + 2 * len(self.text) + 16 * len(self.token_ids) + held


class Teller:
    """Makes parts of pieces, until it has ended."""

    def __init__(self, words: Words, drawing: Drawing) -> None:
        self._words = words
        self._drawing = drawing
        self._cut = TextCut(drawing.stops, drawing.include_stop)
        self._hidden = words.special if drawing.skip_special else frozenset[int]()
        self._offsets = TextOffsets(words)
        self._last: list[int] = []
        """The last tokens, as many as an ending may have: pieces may divide it."""

    def part(self, piece: Piece) -> Part:
        """What there is to be told of a piece, and whether it is the last."""
        ids: list[int] = piece.token_ids.tolist()
        reason = piece.finish_reason
        self._last = [*self._last, *ids][-MAX_HINT_TOKENS:]
        said = len(ids)
        if reason == "eos" and not self._drawing.include_stop:
            said -= min(piece.ending, said)
        text, taken = self._text(ids, said)
        offsets = self._text_offsets(ids, said)
        stop: str | int | None = self._cut.stop
        if stop is not None:
            return self._part(text, ids, piece, offsets, taken, "stop", stop)
        if reason is None:
            return self._part(text, ids, piece, offsets, len(ids), None, None)
        text += self._cut.feed(b"", final=True)
        if self._cut.stop is not None:
            return self._part(text, ids, piece, offsets, len(ids), "stop", self._cut.stop)
        if reason == "stop":
            stop, ending = self._stop_of(self._last[-piece.ending :])
            return self._part(text + ending, ids, piece, offsets, len(ids), "stop", stop)
        if reason == "eos" and ids and ids[-1] in self._drawing.stop_token_ids:
            stop = ids[-1]
        return self._part(text, ids, piece, offsets, len(ids), _finish(reason), stop)

    def _text_offsets(self, ids: Sequence[int], said: int) -> list[int]:
        """Where each begins in the text of the first `said`, without what is hidden."""
        if not self._drawing.logprobs:
            return []
        offsets, hidden = self._offsets, self._hidden
        told = [offsets.here if i in hidden else offsets.told(i) for i in ids[:said]]
        return told + [offsets.here] * (len(ids) - said)

    def _stop_of(self, ending: Sequence[int]) -> tuple[str | None, str]:
        """The stop text that these tokens are where they are hidden ones, which the text is
        without; and what of it is told."""
        stops = self._drawing.stops
        if stops is None or self._hidden.isdisjoint(ending):
            return None, ""
        text = b"".join(map(self._words.token_bytes, ending)).decode("utf-8", "replace")
        if text not in stops.stops:
            return None, ""
        return text, text if self._drawing.include_stop else ""

    def _text(self, ids: Sequence[int], said: int) -> tuple[str, int]:
        """The text of the first `said` ids, and how many of them there are up to a stop text."""
        words, hidden, cut = self._words, self._hidden, self._cut
        if self._drawing.stops is None:
            data = b"".join([words.token_bytes(i) for i in ids[:said] if i not in hidden])
            return cut.feed(data), said
        text = []
        for number, token in enumerate(ids[:said], 1):
            if token not in hidden:
                text.append(cut.feed(words.token_bytes(token)))
                if cut.stop is not None:
                    return "".join(text), number
        return "".join(text), said

    @staticmethod
    def _part(
        text: str,
        ids: list[int],
        piece: Piece,
        offsets: list[int],
        count: int,
        finish: Finish | None,
        stop: str | int | None,
    ) -> Part:
        top = piece.top_logprobs
        if top is not None:
            rest = np.asarray(top.rest, np.float32)[:count]
            top = TopLogprobs(top.token_ids[:count], top.logprobs[:count], rest)
        logprobs = None if piece.logprobs is None else piece.logprobs[:count]
        return Part(text, ids[:count], logprobs, top, finish, stop, offsets[:count])


def _finish(reason: FinishReason) -> Finish:
    return "stop" if reason in ("eos", "stop") else "length"


def told(words: Words, drawing: Drawing, generation: Generation) -> Part:
    """A whole continuation."""
    g = generation
    piece = Piece(0, g.token_ids, g.logprobs, g.top_logprobs, g.finish_reason, g.ending)
    return Teller(words, drawing).part(piece)


def together(parts: Sequence[Part]) -> Part:
    """Parts of one continuation as one."""
    last = parts[-1]
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    top = None
    if tops:
        top = TopLogprobs(
            np.concatenate([t.token_ids for t in tops]),
            np.concatenate([t.logprobs for t in tops]),
            np.concatenate([np.asarray(t.rest, np.float32) for t in tops]),
        )
    return Part(
        "".join(part.text for part in parts),
        [token for part in parts for token in part.token_ids],
        np.concatenate(logprobs) if logprobs else None,
        top,
        last.finish_reason,
        last.stop_reason,
        [offset for part in parts for offset in part.text_offsets],
    )


async def parts(
    gateway: Gateway, model: Model, ids: Sequence[int], drawing: Drawing, deadline: Deadline
) -> AsyncGenerator[Part]:
    """A continuation as it is drawn, up to a stop text. Raises `ApiError`."""
    teller = Teller(model.words, drawing)
    if not drawing.max_tokens:
        yield Part("", [], None, None, "length")
        return

    def begin(timeout: float | None) -> AsyncIterator[Piece]:
        d = drawing
        return model.lm.stream(
            ids,
            d.max_tokens,
            d.temperature,
            top_p=d.top_p,
            top_k=d.top_k,
            min_p=d.min_p,
            seed=d.seed,
            eos_token_ids=d.eos_token_ids,
            stop=d.hints,
            logprobs=d.logprobs,
            top_logprobs=d.top_logprobs,
            lora_name=model.lora_name,
            timeout=timeout,
        )

    async with aclosing(gateway.streamed(model, begin, deadline)) as pieces:
        async for piece in pieces:
            part = teller.part(piece)
            yield part
            if part.finish_reason is not None:
                return


async def drawn_together(
    gateway: Gateway, sources: Sequence[AsyncGenerator[Part]]
) -> AsyncGenerator[tuple[int, Part]]:
    """The parts of several continuations with their numbers, as they come."""
    shelf = Shelf[tuple[int, Part]](gateway.unread, lambda found: found[1].size)
    found = merged(list(enumerate(sources)), shelf, gateway.turns())
    async with aclosing(found) as merging:
        async for each in merging:
            yield each
