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


async def continue_text(
    lm: PooledLM[Any],
    token_ids: Sequence[int],
    want: Generate,
    stop: Sequence[str] = (),
    lora_name: str | None = None,
    timeout: float | None = None,
) -> Continued:
    """What `want` draws after a prompt, up to the first of the texts in `stop`.

    Raises what `PooledLM.stream` raises.
    """
    tokenizer: Any = lm.tokenizer
    if not stop:
        return continued(lm, await lm.ask(token_ids, want, lora_name, timeout=timeout))
    # What most often comes ends the job where it is drawn; whatever else, the reader below.
    hints = [tokenizer.encode(each, add_special_tokens=False) for each in stop]
    hints = [
        ids
        for ids, each in zip(hints, stop, strict=True)
        if 0 < len(ids) <= MAX_HINT_TOKENS and each in tokenizer.decode(ids)
    ]
    given = {
        name: getattr(want, name)
        for name in (
            "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "eos_token_ids",
            "logprobs", "top_logprobs",
        )
    }  # fmt: skip
    span = max(len(each.encode()) for each in stop) + 8
    parts: list[Generation] = []
    ids: list[int] = []
    stops = [*want.stop, *hints][:MAX_HINTS]
    reading = lm.stream(token_ids, stop=stops, lora_name=lora_name, timeout=timeout, **given)
    pieces = cast("AsyncGenerator[Piece]", reading)
    async with aclosing(pieces):  # which withdraws what is left
        async for piece in pieces:
            ids += piece.token_ids.tolist()
            told = piece.finish_reason or "stop", piece.logprobs, piece.top_logprobs
            parts.append(Generation(piece.token_ids, piece.ending, *told))
            tail = tokenizer.decode(ids[-(piece.token_ids.size + span) :])
            if any(each in tail for each in stop):
                break
    return continued(lm, _joined(parts), stop)


def continued(lm: PooledLM[Any], whole: Generation, stop: Sequence[str] = ()) -> Continued:
    """A continuation up to the first of the texts in `stop`, as text."""
    tokenizer: Any = lm.tokenizer
    ids: list[int] = whole.token_ids.tolist()
    if any(each in tokenizer.decode(ids) for each in stop):
        # The fewest tokens whose text has a stop.
        least, most = 1, len(ids)
        while least < most:
            middle = (least + most) // 2
            if any(each in tokenizer.decode(ids[:middle]) for each in stop):
                most = middle
            else:
                least = middle + 1
        whole = _first(replace(whole, finish_reason="stop"), most)
        ids = ids[:most]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = [at for at in (text.find(each) for each in stop) if at >= 0]
    if ends:
        text = text[: min(ends)]
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
