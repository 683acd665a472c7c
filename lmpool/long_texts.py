"""Scores of texts of any length: a text that is longer than the model takes is scored by windows.

::

    scores = score_long_text(lm.sync, lm.encode(text))
    perplexity = math.exp(-scores.total / scores.logprobs.size)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lmpool import Ask, SyncPooledLM
from lmpool.checks import as_integer, quoted
from lmpool.errors import PromptError
from lmpool.wants import Score, TextScores, TopLogprobs

__all__ = ["score_long_text", "windows"]

IN_FLIGHT = 64
"""Windows of a text that are asked at once."""


def windows(tokens: Sequence[int], window: int, stride: int) -> Iterator[tuple[Sequence[int], int]]:
    """Parts of a text, and from which of their tokens on each is to be scored.

    Each token but the text's first is scored once, behind `window` - `stride` others at least where
    the text has them.
    """
    end, scored = 0, 1
    while scored < len(tokens):
        end = min(len(tokens), max(end + stride, window))
        begin = max(0, end - window)
        yield tokens[begin:end], scored - begin
        scored = end


def score_long_text(
    lm: SyncPooledLM[Any],
    tokens: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    top_logprobs: int = 0,
    lora_name: str | None = None,
    timeout: float | None = None,
) -> TextScores:
    """The scores of all tokens of a text but the first, as `PooledLM.score` gives them.

    `window` is how many tokens are taken in at once, by default the most that the model scores;
    `stride`, by default half of it, how far one window is from the next. `timeout` is that of each
    window. Raises `PromptError` for sizes that cannot be, and what `PooledLM.score` raises.
    """
    longest = lm.info.max_prompt_tokens + 1
    window = _within("window", longest if window is None else window, 2, longest)
    stride = _within("stride", max(1, window // 2) if stride is None else stride, 1, window - 1)
    if len(tokens) < 2:
        raise PromptError(
            f"a text of {len(tokens)} tokens: nothing stands before the first, two are needed"
        )
    asks = (
        Ask(part, Score(start, top_logprobs), lora_name)
        for part, start in windows(tokens, window, stride)
    )
    answers = lm.ask_iter(asks, in_flight=IN_FLIGHT, ordered=True, timeout=timeout)
    return _joined([scores for _, scores in answers if isinstance(scores, TextScores)])


def _within(name: str, given: int, least: int, most: int) -> int:
    found = as_integer(given)
    if found is None or not least <= found <= most:
        raise PromptError(f"{name}={quoted(given)}: write an integer from {least} to {most}")
    return found


def _joined(parts: Sequence[TextScores]) -> TextScores:
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    top = None
    if tops:
        top = TopLogprobs(
            np.concatenate([each.token_ids for each in tops]),
            np.concatenate([each.logprobs for each in tops]),
            np.concatenate([each.rest for each in tops]),
        )
    return TextScores(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        top,
    )
