"""Engines that do the wrong thing with what cannot be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmpool.backends import Outcome, Request
from lmpool.backends.engine import Tokens
from lmpool.errors import EngineBroken, PromptFailed
from tests.engines.mutants.engines import Bent, Wrapper
from tests.engines.mutants.registry import BOTH, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    VOCAB,
    prompt_of,
    refused,
    rows,
)

TOO_LONG, TOO_LARGE, EMPTY = prompt_of(LONGEST + 1), [1, VOCAB, 2], []
REFUSED = refused([TOO_LONG, TOO_LARGE, EMPTY, [2**32 - 1]])


class Sorting(Wrapper):
    """Looks for what cannot be run before the right engine does."""

    def bad(self, request: Request) -> bool:
        tokens, info = request.tokens, self.info
        return not 0 < tokens.size <= info.max_prompt_tokens or tokens.max() >= info.vocab_size


@mutant("submitting-a-bad-prompt-raises", REFUSED, forms=BOTH)
class BadPromptRaises(Sorting):
    """A request that cannot be run becomes an outcome with an error."""

    def submit(self, requests: Sequence[Request]) -> None:
        if any(map(self.bad, requests)):
            raise PromptFailed("a prompt that cannot be run")
        super().submit(requests)


@mutant("a-bad-prompt-fails-its-batch", REFUSED, forms=BOTH)
class BadPromptFailsAll(Sorting):
    """One bad prompt fails alone."""

    def submit(self, requests: Sequence[Request]) -> None:
        bad = any(map(self.bad, requests))
        super().submit([replace(r, tokens=r.tokens[:0]) for r in requests] if bad else requests)


@mutant("a-bad-prompt-has-no-outcome", REFUSED, forms=BOTH)
class BadPromptDropped(Sorting):
    """A request that cannot be run becomes an outcome with an error."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([r for r in requests if not self.bad(r)])


@mutant("a-bad-prompt-breaks-the-engine", REFUSED)
class BadPromptBreaks(Wrapper):
    """A worker does not die of one bad prompt."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        if any(o.error is not None for o in outcomes):
            raise EngineBroken("device-side assert triggered")
        return outcomes


@mutant("a-bad-prompt-moves-the-rows-behind-it", REFUSED, subtle=True)
class BadPromptMovesRows(Wrapper):
    """Right row, right prompt: also behind one that is refused."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        rows = [o.row for o in outcomes if o.row is not None]
        if len(rows) == len(outcomes) or len(rows) < 2:
            return outcomes
        turned = iter(rows[1:] + rows[:1])
        return [o if o.row is None else replace(o, row=next(turned)) for o in outcomes]


@mutant("errors-that-are-text", REFUSED)
class ErrorsAreText(Wrapper):
    """An outcome's error is an `EngineError`."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [o if o.error is None else replace(o, error=str(o.error)) for o in outcomes]  # type: ignore[arg-type]


@mutant("errors-that-are-value-errors", REFUSED, subtle=True)
class ErrorsAreValueErrors(Wrapper):
    """An outcome's error is an `EngineError`, not just any exception."""

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        return [
            o if o.error is None else replace(o, error=ValueError(str(o.error))) for o in outcomes
        ]  # type: ignore[arg-type]


class Mended(Bent):
    """Runs something else instead of what cannot be run."""

    def taken(self, request: Request) -> Request:
        return replace(request, tokens=np.asarray(self.mended(request.tokens), np.uint32))

    def mended(self, tokens: Tokens) -> Any:
        return tokens


@mutant("empty-prompts-are-the-beginning-of-a-text", refused([EMPTY]), forms=BOTH)
class EmptyIsBos(Mended):
    """An empty prompt is refused."""

    def mended(self, tokens: Tokens) -> Any:
        return tokens if tokens.size else [0]


@mutant("prompts-that-are-too-long-lose-their-beginning", refused([TOO_LONG]), forms=BOTH)
class TooLongCut(Mended):
    """A prompt that is too long is refused, not cut."""

    def mended(self, tokens: Tokens) -> Any:
        return tokens[-self.info.max_prompt_tokens :]


@mutant("prompts-that-are-too-long-lose-their-end", refused([TOO_LONG]))
class TooLongCutAtTheEnd(Mended):
    """A prompt that is too long is refused, not cut."""

    def mended(self, tokens: Tokens) -> Any:
        return tokens[: self.info.max_prompt_tokens]


@mutant("ids-past-the-vocabulary-are-the-last", refused([TOO_LARGE]), forms=BOTH)
class TooLargeClipped(Mended):
    """A token id that the vocabulary lacks is refused."""

    def mended(self, tokens: Tokens) -> Any:
        return np.minimum(tokens, self.info.vocab_size - 1)


@mutant("ids-past-the-vocabulary-taken-from-its-beginning", refused([[1, 2**32 - 1]]), subtle=True)
class TooLargeWraps(Mended):
    """A token id that the vocabulary lacks is refused, also one that is -1 when signed."""

    def mended(self, tokens: Tokens) -> Any:
        size = self.info.vocab_size
        return np.where(tokens >= 2**31, size - (2**32 - tokens.astype(np.int64)), tokens)


@mutant("longest-prompts-refused", rows([prompt_of(LONGEST)]), forms=BOTH)
class LongestRefused(Bent):
    """A prompt of `max_prompt_tokens` is run."""

    def taken(self, request: Request) -> Request:
        longest = request.tokens.size == self.info.max_prompt_tokens
        return replace(request, tokens=request.tokens[:0]) if longest else request


@mutant("last-id-of-the-vocabulary-refused", rows([[1, VOCAB - 1]]), subtle=True)
class LastIdRefused(Bent):
    """Every id below `vocab_size` is a token, the last one, too."""

    def taken(self, request: Request) -> Request:
        last = bool((request.tokens == self.info.vocab_size - 1).any())
        return replace(request, tokens=request.tokens[:0]) if last else request
