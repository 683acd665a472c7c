"""Answers that follow from rows, as an engine copies them off its device: a few words each."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import NextToken, Outcome, Request
from lmpool.errors import PromptFailed
from lmpool.wants import Draw, Draws, Generation, Tokens, Top, TopLogprobs, Want

Words = npt.NDArray[np.int32]
"""An answer's numbers as they are copied: integers, and the bits of float32s."""


def asked_of_row(request: Request) -> Want | NextToken:
    """What is asked of the row after a prompt."""
    return request.want if request.next is None else request.next


def alike(want: Want | NextToken) -> Hashable:
    """Equal for wants that are reduced together; None for one that is not reduced here."""
    match want:
        case NextToken():
            return "next", want.top_logprobs
        case Top():
            return want
        case Tokens(token_ids=ids):
            assert isinstance(ids, bytes)
            return "tokens", len(ids)
        case Draw():
            return replace(want, seed=None, allowed=None), want.allowed is None
        case _:
            return None


def word_count(want: Want | NextToken) -> int:
    """How many numbers are copied for a want that is reduced here."""
    match want:
        case NextToken():
            return 2 + (2 * want.top_logprobs + 1 if want.top_logprobs else 0)
        case Top():
            return 2 * want.k + 1
        case Tokens():
            assert isinstance(want.token_ids, bytes)
            return len(want.token_ids) // 4
        case Draw():
            return 3 * want.n + 2
        case _:
            raise AssertionError(f"{type(want).__name__} is not reduced here")


def outcome_of(request: Request, words: Words, logsumexp: float) -> Outcome:
    """What became of a request, by its numbers [words] and its float of the second."""
    if not math.isfinite(logsumexp):
        return Outcome.of_row(request.id, np.empty(0, np.float32), logsumexp)
    want = asked_of_row(request)
    match want:
        case NextToken():
            return Outcome(request.id, answer=next_of(words))
        case Top():
            return Outcome(request.id, answer=top_of(words))
        case Draw():
            try:
                want.check_possible(int(words[-1]))
            except PromptFailed as error:
                return Outcome(request.id, error=error)
            ids, logprobs, proposals = words[:-2].reshape(3, want.n)
            return Outcome(
                request.id,
                answer=Draws(
                    ids,
                    logprobs.view(np.float32),
                    proposals.view(np.float32),
                    words[-2:-1].view(np.float32)[0],
                ),
            )
        case _:
            return Outcome(request.id, answer=words.view(np.float32))


def top_of(words: Words) -> TopLogprobs:
    """The answer to a `Top`."""
    ids, logprobs = np.split(words[:-1], 2)
    return TopLogprobs(ids, logprobs.view(np.float32), words[-1:].view(np.float32)[0])


def next_of(words: Words) -> Generation:
    """The next token of a continuation, its log-probability, and the likeliest where asked for."""
    words = words.copy()  # one that is kept must not keep all of its step's
    top = None
    if words.size > 2:
        likely = top_of(words[2:])
        rest = np.atleast_1d(likely.rest)
        top = TopLogprobs(likely.token_ids[None], likely.logprobs[None], rest)
    return Generation(words[:1], 0, "length", words[1:2].view(np.float32), top)
