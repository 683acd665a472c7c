"""Continuations that end at texts, which tokens may divide in any way.

A pool's own stop sequences are tokens: "\\n" may come as a part of ".\\n". Here the continuation is
read as it is drawn, and left as soon as its text has a stop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lmpool import Piece, PooledLM
from lmpool.errors import PromptError
from lmpool.wants import FinishReason, Generate, Generation, TopLogprobs

MAX_HINT_TOKENS = 256
"""Of one of them."""
MAX_HINTS = 64
"""Stop sequences that a job may have."""
MAX_WITHIN = 3
"""Tokens that end within one and the same character, which is four bytes at most: or it is none."""
MAX_WINDOW = 16
"""Tokens in a row of which none ends between two characters, until the first ones are let go."""


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """A continuation as text.

    `text`: up to the first stop, without special tokens. `token_ids`: all that was drawn up to
    there, the tokens that a stop is in and the EOS token included; `logprobs` float32 [n] and
    `top_logprobs` of [n, k], [n, k] and [n], where they were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: npt.NDArray[np.float32] | None = None
    top_logprobs: TopLogprobs | None = None


def check_stops(stop: object) -> list[str]:
    """A text, or a list of texts, as a list without empty ones. Raises `PromptError`."""
    given = [stop] if isinstance(stop, str) else stop
    if given is None:
        return []
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise PromptError(f"stop={stop!r:.80}: write a text or a list of texts")
    return [each for each in given if each]


class _Stops:
    """Texts that end a continuation, by one tokenizer.

    They are looked for in the text that is told, which has no special tokens: one of special tokens
    alone is looked for among the tokens, and one that has some beside others is nowhere.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._hidden: dict[int, bool] = {}
        self.texts: list[str] = []
        self.tokens: list[list[int]] = []
        self.hints: list[list[int]] = []
        """Tokens whose text has a stop."""
        for each in stop:
            ids: list[int] = tokenizer.encode(each, add_special_tokens=False)
            hidden = [token for token in ids if self.hides(token)]
            if hidden and not self.told(ids) and each in tokenizer.decode(hidden):
                self.tokens.append(hidden)
                self.hints.append(hidden)
                continue
            self.texts.append(each)
            if each in self.told(ids):
                self.hints.append(ids)
        self.longest = max(map(len, self.texts), default=0)

    def told(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def hides(self, token: int) -> bool:
        """Whether a token is special, and so in no text."""
        found = self._hidden.get(token)
        if found is None:
            found = not self.told([token]) and bool(self._tokenizer.decode([token]))
            self._hidden[token] = found
        return found


class _Reader:
    """Reads a continuation token by token, up to the first stop: how its tokens come in pieces
    makes no difference."""

    def __init__(self, stops: _Stops) -> None:
        self.text = ""
        """What was read: whole characters, and nothing from the stop on."""
        self._stops = stops
        self.ids: list[int] = []
        """The tokens that were read."""
        self._window: list[int] = []
        """The last tokens: those whose text came last, as some tokens say other things alone, and
        those behind them that end within a character."""
        self._before = 0
        """How many of them are the former."""
        self._seen = 0
        """How many characters of their text were read."""

    def read(self, token: int) -> bool:
        """Whether a stop ends with this token."""
        stops = self._stops
        self.ids.append(token)
        if stops.hides(token):
            ended = any(self.ids[-len(each) :] == each for each in stops.tokens)
            if ended:
                self.text += self._new()
            return ended
        self._window.append(token)
        new = self._new()
        whole = new.rstrip("\ufffd")
        within = min(len(new) - len(whole), MAX_WITHIN)
        if len(self._window) - self._before > MAX_WINDOW:  # else each would read all of them again
            whole = new[: len(new) - within]
            self._let_go(MAX_WITHIN, within)
        elif whole == new != "":
            self._let_go(0, 0)
        else:
            self._seen += len(whole)
        if not whole:
            return False
        begin = max(0, len(self.text) - stops.longest + 1)
        self.text += whole
        places = ((self.text.find(each, begin), len(each)) for each in stops.texts)
        found = [(at + size, at) for at, size in places if at >= 0]
        if found:  # the one that ends first, the longest of those
            self.text = self.text[: min(found)[1]]
        return bool(found)

    def _let_go(self, tokens: int, characters: int) -> None:
        """Forget the tokens of before. Of those behind them so many, and of their text so many
        characters, are yet to be read."""
        self._window = self._window[self._before :]
        self._before = len(self._window) - tokens
        self._seen = max(0, len(self._stops.told(self._window)) - characters)

    def _new(self) -> str:
        """What was not read yet, and may end within a character."""
        return self._stops.told(self._window)[self._seen :]


async def continue_text(
    lm: PooledLM[Any],
    token_ids: Sequence[int],
    want: Generate,
    stop: Sequence[str] = (),
    lora_name: str | None = None,
    timeout: float | None = None,
) -> Continued:
    """What `want` draws after a prompt, up to the first of the texts in `stop`.

    A stop is looked for in the text, without special tokens; one that is special tokens alone, such
    as ``"<|im_end|>"``, ends at these. Raises what `PooledLM.stream` raises.
    """
    if not stop:
        return continued(lm, await lm.ask(token_ids, want, lora_name, timeout=timeout))
    stops = _Stops(lm.tokenizer, stop)
    # What most often comes ends the job where it is drawn; whatever else, the reader below.
    hints = [ids for ids in stops.hints if len(ids) <= MAX_HINT_TOKENS]
    given = {
        name: getattr(want, name)
        for name in (
            "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "eos_token_ids",
            "logprobs", "top_logprobs",
        )
    }  # fmt: skip
    parts: list[Generation] = []
    reader = _Reader(stops)
    ended = False
    reading = lm.stream(
        token_ids,
        stop=[*want.stop, *hints][:MAX_HINTS],
        lora_name=lora_name,
        timeout=timeout,
        **given,
    )
    pieces = cast("AsyncGenerator[Piece]", reading)
    async with aclosing(pieces):  # which withdraws what is left
        async for piece in pieces:
            told = piece.finish_reason or "stop", piece.logprobs, piece.top_logprobs
            parts.append(Generation(piece.token_ids, piece.ending, *told))
            ended = any(map(reader.read, piece.token_ids.tolist()))
            if ended:
                break
    whole = _joined(parts)
    if not ended:
        return continued(lm, whole)
    whole = _first(replace(whole, finish_reason="stop"), len(reader.ids))
    return _told(whole, reader.text)


def continued(lm: PooledLM[Any], whole: Generation) -> Continued:
    """A continuation with its text."""
    tokenizer: Any = lm.tokenizer
    return _told(whole, tokenizer.decode(whole.token_ids.tolist(), skip_special_tokens=True))


def _told(whole: Generation, text: str) -> Continued:
    ids: list[int] = whole.token_ids.tolist()
    return Continued(text, ids, whole.finish_reason, whole.logprobs, whole.top_logprobs)


def _first(whole: Generation, count: int) -> Generation:
    top = whole.top_logprobs
    if top is not None:
        rest = np.asarray(top.rest, np.float32)
        top = TopLogprobs(top.token_ids[:count], top.logprobs[:count], rest[:count])
    logprobs = None if whole.logprobs is None else whole.logprobs[:count]
    return replace(
        whole, token_ids=whole.token_ids[:count], logprobs=logprobs, top_logprobs=top, ending=0
    )


def _joined(parts: Sequence[Generation]) -> Generation:
    last = parts[-1]
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    top = None
    if tops:
        top = TopLogprobs(
            np.concatenate([each.token_ids for each in tops]),
            np.concatenate([each.logprobs for each in tops]),
            np.concatenate([np.asarray(each.rest, np.float32) for each in tops]),
        )
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Generation(
        np.concatenate([part.token_ids for part in parts]),
        last.ending,
        last.finish_reason,
        np.concatenate(logprobs) if logprobs else None,
        top,
    )
