"""The want of a text's log-probabilities, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, cast

import numpy as np
import numpy.typing as npt

from lmpool.checks import as_integer, as_number, quoted
from lmpool.errors import JobFormatError, PromptError, PromptFailed
from lmpool.model_info import ModelInfo
from lmpool.wants import packing
from lmpool.wants.answers import Computed, Logprobs, TextScores, TokenArray, TopLogprobs
from lmpool.wants.distribution import scale
from lmpool.wants.held import hold
from lmpool.wants.of_prompt import OfPrompt
from lmpool.wants.of_row import NOT_A_NUMBER
from lmpool.wants.position_ids import (
    MAX_TOKEN_IDS,
    AskedIds,
    PositionIds,
    as_array,
    beyond,
    checked_ids,
    read_ids,
)
from lmpool.wants.top import MAX_K, likeliest

MAX_NUMBERS: Final = 1 << 23
"""Numbers of one answer besides the scores themselves: 32 MiB."""
_UNDERFLOWS: Final = 1e-30
"""Below it float32 sums lose their terms."""
_USUAL_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True)
class Score(OfPrompt[TextScores]):
    """The log-probability of each token of a text from position `start` on, given those before it.

    `top_logprobs`: so many of the likeliest tokens at each position, too. `token_ids`: the
    log-probabilities of these, too: one list for all positions, or one for each from `start` on.
    At a `temperature` they are those of logits / temperature, normalized.

    A text may have one token more than the longest prompt: its last is only a target.
    """

    kind: ClassVar[str] = "score"
    cached: ClassVar[bool] = True
    """Whether a client keeps the answer in its local cache."""
    form: ClassVar[int] = 5

    start: int = 1
    top_logprobs: int = 0
    token_ids: AskedIds | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        hold(self, token_ids=MAX_TOKEN_IDS)

    def checked(self, info: ModelInfo) -> Score:
        """With the ids as bytes. Raises `PromptError`."""
        size = info.vocab_size
        start, k = as_integer(self.start), as_integer(self.top_logprobs)
        if start is None or start < 1:
            raise PromptError(
                f"start={quoted(self.start)}: write an integer of 1 or more (nothing stands before "
                "the first token, position 0, that would give it a probability)"
            )
        if k is None or not 0 <= k <= size:
            raise PromptError(
                f"top_logprobs={quoted(self.top_logprobs)}: write an integer from 0 to {size}, the "
                "size of this pool's vocabulary"
            )
        temperature = as_number(self.temperature)
        if temperature is None or not 0 < temperature < math.inf:
            raise PromptError(
                f"temperature={quoted(self.temperature)}: write a number above 0; 1 gives the "
                "model's own log-probabilities"
            )
        return Score(min(start, MAX_K), k, checked_ids(self.token_ids, size), temperature)

    def stored_bytes(self, info: ModelInfo) -> int:
        """What a checked one's answer takes, about: of a text of no more than usual length."""
        ids = self.token_ids
        most = min(info.max_prompt_tokens, _USUAL_TOKENS)
        count = ids.positions if isinstance(ids, PositionIds) else most
        return count * self._position_bytes(info.vocab_size)

    def travelling_bytes(self) -> int:
        """That of the ids."""
        return 0 if self.token_ids is None else as_array(self.token_ids).nbytes

    def fields(self) -> list[object]:
        """As it travels, and as the digest covers it."""
        width, data = None, self.token_ids
        if isinstance(data, PositionIds):
            width, data = data.width, data.data
        return [self.start, self.top_logprobs, self.temperature, width, data]

    @classmethod
    def from_fields(cls, fields: Sequence[object]) -> Score:
        """Read `fields`. Raises `JobFormatError`."""
        start, k, temperature, width, data = packing.expect(cls.kind, fields, 5)
        found = packing.expect_number("temperature", temperature)
        if found == 0:
            raise JobFormatError("temperature=0: a number above 0 expected")
        return cls(
            packing.expect_integer("start", start, 1, MAX_K),
            packing.expect_integer("top_logprobs", k, 0, MAX_K),
            read_ids(width, data),
            found,
        )

    def longest_prompt(self, most: int) -> int:
        """One token more than a row's prompt: no row is needed after the last."""
        return most + 1

    def misfit(self, vocab_size: int) -> str | None:
        """Why rows of this size cannot answer it, as it travels; None where they can."""
        if self.top_logprobs > vocab_size:
            return f"top_logprobs={self.top_logprobs}: at most {vocab_size} expected"
        return None if self.token_ids is None else beyond(self.token_ids, vocab_size)

    def misfit_prompt(self, tokens: int) -> str | None:
        """Why it cannot be asked of a text of so many tokens; None where it can."""
        if tokens < 2:
            return "a text of 1 token: nothing stands before the first, two are needed for a score"
        if self.start >= tokens:
            more = " or more" if self.start == MAX_K else ""  # it was cut to that
            return (
                f"start={self.start}{more} is beyond a text of {tokens} tokens: write an integer "
                f"from 1 to {tokens - 1}"
            )
        count, ids = tokens - self.start, self.token_ids
        if isinstance(ids, PositionIds) and ids.positions != count:
            return (
                f"token_ids for {ids.positions} positions: {count} expected, a list for each of "
                f"the {tokens} tokens of the text from start={self.start} on"
            )
        numbers = count * (2 * self.top_logprobs + self._width())
        if numbers > MAX_NUMBERS:
            return (
                f"{numbers} numbers of top_logprobs and token_ids for {count} positions: at most "
                f"{MAX_NUMBERS}; ask for fewer, or in parts: of shorter texts and from a later "
                "start"
            )
        return None

    def piece(self, start: int, stop: int) -> Score:
        """This want of positions `start` to `stop` - 1 of its text alone."""
        ids = self.token_ids
        if isinstance(ids, PositionIds):
            size, first = 4 * ids.width, start - self.start
            cut = ids.data[first * size : (stop - self.start) * size]
            ids = PositionIds(ids.width, cut)
        return replace(self, start=start, token_ids=ids)

    def ids_of(self, count: int) -> TokenArray | None:
        """The ids asked for at each of the first `count` positions, int32 [count, n]."""
        if self.token_ids is None:
            return None
        width = self._width()
        found: TokenArray = as_array(self.token_ids).astype(np.int32).reshape(-1, width)
        if isinstance(self.token_ids, PositionIds):
            return found[:count]
        return np.broadcast_to(found, (count, width))

    def blank(self, count: int) -> TextScores:
        """Scores of `count` positions with nothing in them yet."""
        k, width = self.top_logprobs, self._width()
        top = None
        if k:
            ids, logprobs = np.empty((count, k), np.int32), np.empty((count, k), np.float32)
            top = TopLogprobs(ids, logprobs, np.empty(count, np.float32))
        given = np.empty((count, width), np.float32) if width else None
        return TextScores(np.empty(count, np.float32), np.empty(count, np.int32), top, given)

    def of_rows(
        self, rows: Logprobs, targets: Sequence[int] | npt.NDArray[np.uint32]
    ) -> TextScores:
        """The scores of the first positions, of the rows before them.

        `rows` are log-probabilities or logits, float32 [positions, vocab_size], `targets` the
        tokens that follow. Raises `PromptFailed` for a row that is none. Beside the rows it needs
        the memory of one.
        """
        found = self.blank(len(rows))
        wanted = self.ids_of(len(rows))
        scratch = np.empty(rows.shape[1:], np.float32)
        for at, row in enumerate(rows):
            token_ids = None if wanted is None else wanted[at]
            self._score(found, at, row, int(targets[at]), token_ids, scratch)
        return found

    def _score(
        self,
        found: TextScores,
        at: int,
        row: Logprobs,
        target: int,
        token_ids: TokenArray | None,
        scratch: Logprobs,
    ) -> None:
        """Put what follows from one row into place `at`; `scratch` is overwritten."""
        found.ranks[at] = np.count_nonzero(row >= row[target])
        with np.errstate(invalid="ignore", under="ignore", over="ignore"):
            top = row.max()
            np.subtract(row, top, out=scratch)
            if self.temperature != 1:
                scratch /= np.float32(scale(self.temperature))
            chosen = scratch[target]
            asked = None if token_ids is None else scratch[token_ids]
            best = likeliest(row, self.top_logprobs) if self.top_logprobs else None
            likely = None if best is None else scratch[best]
            np.exp(scratch, out=scratch)
            mass = np.log(scratch.sum())
        if not np.isfinite(top + mass):
            raise PromptFailed(NOT_A_NUMBER)
        found.logprobs[at] = chosen - mass
        if found.token_logprobs is not None and asked is not None:
            found.token_logprobs[at] = asked - mass
        into = found.top_logprobs
        if into is not None and best is not None and likely is not None:
            scratch[best] = 0.0
            into.token_ids[at], into.logprobs[at] = best, likely - mass
            cast(Logprobs, into.rest)[at] = self._rest(row, best, scratch) - mass

    def _rest(self, row: Logprobs, best: TokenArray, others: Logprobs) -> float:
        """The log of the mass of all but `best`, of which `others` are the terms beside the
        largest as 1."""
        found = float(others.sum())
        if found >= _UNDERFLOWS:
            return math.log(found)
        left = row.copy()
        left[best] = -np.inf
        most = float(left.max())
        if most == -np.inf:
            return most
        # Beside the largest of those that are left.
        heat = scale(self.temperature)
        with np.errstate(under="ignore", over="ignore"):
            mass = np.exp((left.astype(np.float64) - most) / heat).sum()
        return math.log(mass) + (most - float(row.max())) / heat

    def encode(self, computed: Computed, vocab_size: int) -> bytes:
        """What is stored of an answer. Raises `PromptFailed` where the engine gave another."""
        answer = computed.answer
        if not isinstance(answer, TextScores):
            raise PromptFailed("the engine gave no scores for this text")
        top, given = answer.top_logprobs, answer.token_logprobs
        if (top is None) != (not self.top_logprobs) or (given is None) != (self.token_ids is None):
            raise PromptFailed("the engine gave other scores than were asked for")
        parts = [packing.floats(answer.logprobs), packing.ids(answer.ranks - 1, vocab_size)]
        if given is not None:
            parts.append(packing.floats(given))
        if top is not None:
            parts += [packing.floats(top.rest), packing.floats(top.logprobs)]
            parts.append(packing.ids(top.token_ids, vocab_size))
        return packing.pack(self.form, *parts)

    def decode(self, data: bytes, info: ModelInfo) -> TextScores:
        """Read what `encode` wrote. Raises `AnswerFormatError`."""
        size, k, width = info.vocab_size, self.top_logprobs, self._width()
        numbers = packing.unpack(self.form, data, "scores")
        each = self._position_bytes(size)
        count = len(numbers) // each
        if isinstance(self.token_ids, PositionIds):
            count = self.token_ids.positions
        packing.expect_size(numbers, max(1, count) * each, "scores")
        read = packing.Reader(numbers, size)
        logprobs, ranks = read.floats(count), read.ids(count) + 1
        ranks.flags.writeable = False
        given = read.floats(count, width) if width else None
        top = None
        if k:
            rest, likely = read.floats(count), read.floats(count, k)
            top = TopLogprobs(read.ids(count, k), likely, rest)
        return TextScores(logprobs, ranks, top, given)

    def _position_bytes(self, vocab_size: int) -> int:
        """Of a stored answer."""
        ids, floats, k = packing.id_bytes(vocab_size), packing.FLOAT_BYTES, self.top_logprobs
        return floats + ids + self._width() * floats + (floats + k * (floats + ids) if k else 0)

    def _width(self) -> int:
        """How many ids are asked for at each position."""
        if isinstance(self.token_ids, PositionIds):
            return self.token_ids.width
        return 0 if self.token_ids is None else len(cast(bytes, self.token_ids)) // 4
