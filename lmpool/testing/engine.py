"""The engine of a `MockPool`: what a test has set, and the mock engine's rows for all else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lmpool.backends import Outcome, Request
from lmpool.backends.mock import MockEngine
from lmpool.errors import AnswerFormatError, PromptFailed
from lmpool.head_form import MAX_HIDDEN, HeadForm
from lmpool.model_info import ModelInfo
from lmpool.testing.answers import F32, Answers, Asked, Call, Failure, RowSet
from lmpool.wants import HeadPart, Hidden, Reduced

IMPOSSIBLE = np.float32(-1e30)
"""In a hidden state, which must be finite: what a token of probability 0 has there."""


class AnsweringEngine(MockEngine):
    """As the mock engine, but that it asks `answers` first.

    Its head is the unit matrix, and its hidden states are the rows: they agree, whatever is set.
    """

    def __init__(self, answers: Answers, *, vocab_size: int, max_prompt_tokens: int) -> None:
        super().__init__(vocab_size=vocab_size, max_prompt_tokens=max_prompt_tokens)
        if vocab_size <= MAX_HIDDEN:
            self.info = replace(self.info, head=HeadForm(vocab_size, "f32"))
        self._answers = answers
        self.served: ModelInfo | None = None
        """As which the pool's clients know it, once that is so."""

    def submit(self, requests: Sequence[Request]) -> None:
        passed = []
        for request in requests:
            asked = _asked(request)
            if not isinstance(request.want, HeadPart):
                self._answers.record(Call(*asked[:1], request.want, asked[1]))
            found = self._answers.find(asked, request.want)
            if found is None or isinstance(found, RowSet):
                passed.append(request)
            else:
                self._outcomes.append(self._outcome(request, found))
        super().submit(passed)

    def step(self) -> Sequence[Outcome]:
        self._answers.wait()
        return super().step()

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        others: list[Request] = []
        for request in requests:
            # Of continuations and texts as well, whose rows were not submitted.
            found = self._answers.find(_asked(request), request.want)
            if isinstance(found, RowSet):
                yield _of_row(request, found.logprobs)
            elif isinstance(found, Failure):
                yield Outcome(request.id, error=PromptFailed(found.reason))
            else:
                others.append(request)
        if not others:
            return  # the mock engine's first rows take a while
        states = {r.id: r for r in others if isinstance(r.want, Hidden)}
        for outcome in super().compute(others):
            request_ = states.get(outcome.id)
            yield outcome if request_ is None else _of_row(request_, outcome.logprobs())

    def _outcome(self, request: Request, found: Reduced | Failure) -> Outcome:
        """What was set, where clients could read it as an answer to this."""
        if isinstance(found, Failure):
            return Outcome(request.id, error=PromptFailed(found.reason))
        outcome = Outcome(request.id, answer=found)
        assert self.served is not None
        try:
            stored = request.want.encode(outcome, self.served.vocab_size)
            request.want.decode(stored, self.served)
        except (PromptFailed, AnswerFormatError, ValueError) as error:
            text = f"the answer that was set is none to {request.want!r:.200}: {error}"
            return Outcome(request.id, error=PromptFailed(text))
        return outcome

    def head_weights(self, rows: slice) -> F32:
        self._check_open()
        size = self.info.vocab_size
        found = np.zeros((rows.stop - rows.start, size), np.float32)
        found[np.arange(rows.stop - rows.start), np.arange(rows.start, rows.stop)] = 1.0
        return found


def _asked(request: Request) -> Asked:
    # Workers know an adapter as name@fingerprint.
    name = None if request.adapter is None else request.adapter.rpartition("@")[0]
    return tuple(request.tokens.tolist()), name


def _of_row(request: Request, row: F32) -> Outcome:
    if isinstance(request.want, Hidden):
        return Outcome.of_state(request.id, np.maximum(row, IMPOSSIBLE))
    return Outcome(request.id, row)
