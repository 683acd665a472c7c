"""Engines that compute one batch at a time."""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Final, assert_never

from lmpool.backends.admission import are_plain, reason_to_refuse
from lmpool.backends.answers import answered, head_part
from lmpool.backends.engine import AdapterGone, Engine, Outcome, Part, Request
from lmpool.backends.sampling import Continuation, Sampler
from lmpool.backends.scoring import Scorings
from lmpool.backends.streaming import Streaming
from lmpool.checks import said, words
from lmpool.errors import EngineBroken, PromptFailed
from lmpool.logs import about
from lmpool.wants import Generate, Generation, HeadPart, Hidden, OfRow, Row, Score, Stream

logger = logging.getLogger(__name__)

REASON_CHARS: Final = 2000
"""Of what an exception says, which fails a prompt or a batch."""
_TRUSTED: Final = 64
"""After so many batches that fitted into memory, larger ones are tried again."""


class BatchEngine(Engine):
    """An engine that computes one batch at a time.

    A step computes every row asked for since the last one, and one token of every continuation
    under way, and a piece of the texts that are scored. `submit` may be called between any two
    steps.
    """

    score_tokens: int = 0
    """How many tokens of texts a step scores, where `compute` answers a `Score`; 0 where it gives
    rows."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self._most_prompts = sys.maxsize
        """What fits into memory, once a batch did not."""
        self._fitted = 0
        """How many batches of so many prompts did fit since."""
        self._too_large = 0
        """How many prompts were too large for memory all by themselves."""
        self._waiting: list[Request] = []
        self._continuations: dict[bytes, Continuation] = {}
        self._streaming = Streaming()
        self._scorings = Scorings()
        self._outcomes: list[Outcome] = []
        """What the next step gives out first."""

    @abstractmethod
    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        """One outcome with a row, an answer or an error for each request, in any order.

        The prompts were checked: 1 to `max_prompt_tokens` ids, all below `vocab_size`, the adapter
        one of `adapters`. Each wants a row, or what follows from one (`OfRow`, `NextToken`):
        whoever can reduce it where it was computed gives the answer, others the row. Those whose
        `info.head` is one are also asked for a hidden state, float32 [hidden_size]. Those that have
        `score_tokens` are also asked for a `Score`, each of a text or of its beginning. An
        exception fails the batch, which is then halved until the request that caused it stands
        alone; `EngineBroken` passes through.
        """

    def continues(self, tokens: int) -> bool:
        """Whether a text of so many tokens is scored in pieces at about the cost of the whole."""
        return True

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def in_flight(self) -> int:
        running = len(self._continuations) + len(self._scorings)
        return len(self._waiting) + running + len(self._outcomes)

    def parts(self) -> Sequence[Part]:
        return self._streaming.parts() if self._streaming else ()

    def cancel(self, ids: Collection[bytes]) -> None:
        self._waiting = [r for r in self._waiting if r.id not in ids]
        self._outcomes = [o for o in self._outcomes if o.id not in ids]
        for cancelled in ids:
            self._continuations.pop(cancelled, None)
        self._streaming.end(ids)
        self._scorings.cancel(ids)

    def finish_adapter(self, name: str) -> None:
        """Answer the requests in flight by an adapter; call it before another takes its name.

        What else ends meanwhile is given out by the next step as well.
        """
        while self._asking(name):
            # The step gives out what is kept, too: only then is there something to add to.
            given = self.step()
            self._outcomes.extend(given)

    def refuse_adapter(self, name: str) -> None:
        """Let the requests in flight by an adapter fail; call it when it is removed."""
        asking = self._asking(name)
        if asking:
            self.cancel(asking)
            told = name.rpartition("@")[0] or name  # not which of that name, which nobody asked for
            gone = AdapterGone(f"the adapter {told!r} was removed before this was computed")
            self._outcomes += [Outcome(asked, error=gone) for asked in asking]

    def _asking(self, name: str) -> set[bytes]:
        """The ids in flight by an adapter."""
        held = (*self._waiting, *self._scorings.requests())
        asking = {request.id for request in held if request.adapter == name}
        return asking | {c.id for c in self._continuations.values() if c.adapter == name}

    def step(self) -> Sequence[Outcome]:
        batch, self._waiting = self._waiting, []
        accepted, outcomes = self._check(batch)
        if self._outcomes:
            outcomes = [*self._outcomes, *outcomes]
            self._outcomes = []
        rows: list[Request] = []
        for request in accepted:
            match request.want:
                case Row() | OfRow() | Hidden():
                    rows.append(request)
                case HeadPart() as want:
                    outcomes.append(head_part(self, request.id, want))
                case Score() as want:
                    self._scorings.begin(request, want)
                case Generate() as want:
                    self._begin(request, want, outcomes)
                case _:
                    assert_never(request.want)
        if not (self._continuations or self._scorings):
            return [*outcomes, *self._attempt(rows)] if rows else outcomes
        going_on, refused = self._check(self._next_requests())  # their adapters may be gone
        rows.extend(going_on)
        computed = [*refused, *self._attempt(rows)] if rows else refused
        return [*outcomes, *self._continue(computed)]

    def _next_requests(self) -> list[Request]:
        """What continuations and texts need next."""
        requests = [c.next_request() for c in self._continuations.values()]
        if self.score_tokens:
            return requests + self._scorings.next_pieces(self.score_tokens, self.continues)
        return requests + self._scorings.next_rows(self.info.vocab_size)

    def _check(self, batch: Sequence[Request]) -> tuple[Sequence[Request], list[Outcome]]:
        """The requests that can be run, and the refusals of the others."""
        if not batch or are_plain(batch, self.info):
            return batch, []
        accepted: list[Request] = []
        refused: list[Outcome] = []
        for request in batch:
            reason = self._reason_to_refuse(request)
            if reason is None:
                accepted.append(request)
            else:
                refused.append(Outcome(request.id, error=PromptFailed(reason)))
        return accepted, refused

    def _reason_to_refuse(self, request: Request) -> str | None:
        return reason_to_refuse(request, self.info, self.adapters)

    def _begin(self, request: Request, want: Generate, outcomes: list[Outcome]) -> None:
        continuation = Continuation(request, Sampler.of(want, request.tokens.size, self.info))
        if continuation.finished:
            outcomes.append(_generated(continuation))
        else:
            self._continuations[request.id] = continuation
            if isinstance(want, Stream):
                self._streaming.begin(continuation)

    def _continue(self, computed: Sequence[Outcome]) -> list[Outcome]:
        """Go on with continuations and texts; return what is not needed for that."""
        outcomes: list[Outcome] = []
        for outcome in computed:
            if outcome.id in self._scorings:
                scored = self._scorings.take(outcome)
                if scored is not None:
                    outcomes.append(scored)
                continue
            continuation = self._continuations.get(outcome.id)
            if continuation is None:
                outcomes.append(outcome)
                continue
            if isinstance(outcome.answer, Generation):
                continuation.go_on(outcome.answer)
            elif outcome.error is None:
                try:
                    continuation.take(outcome.logprobs())
                except ValueError as error:
                    outcome = Outcome(outcome.id, error=PromptFailed(words(error)))
            if outcome.error is not None:
                del self._continuations[outcome.id]
                self._streaming.end([outcome.id])
                outcomes.append(outcome)
            elif continuation.finished:
                del self._continuations[outcome.id]
                outcomes.append(_generated(continuation))
        return outcomes

    def _attempt(self, batch: Sequence[Request]) -> list[Outcome]:
        """Outcomes of a batch, in as many portions as fit into memory."""
        if len(batch) > self._most_prompts:
            most = self._most_prompts
            portions = [batch[i : i + most] for i in range(0, len(batch), most)]
            return [outcome for portion in portions for outcome in self._attempt(portion)]
        half = len(batch) // 2
        short = False
        try:
            computed = {outcome.id: outcome for outcome in self.compute(batch)}
        except EngineBroken:
            raise
        except Exception as error:
            reason = said(error, REASON_CHARS)
            short = is_out_of_memory(error)
            if len(batch) == 1:
                self._too_large += short
                logger.warning("a prompt failed: %s", reason, extra=about(batch[0].want.kind))
                return [Outcome(batch[0].id, error=PromptFailed(reason))]
            what = "out of memory at %d prompts" if short else "a batch of %d failed"
            logger.warning(f"{what} (%s): halving it", len(batch), reason)
        else:
            self._grow(len(batch))
            return [
                answered(r, computed.get(r.id) or Outcome(r.id, error=_forgotten())) for r in batch
            ]
        too_large = self._too_large
        outcomes = self._attempt(batch[:half]) + self._attempt(batch[half:])
        # A prompt that does not fit alone says nothing of how many others do.
        if short and self._too_large == too_large:
            self._most_prompts = min(self._most_prompts, len(batch) - half)
            self._fitted = 0
        return outcomes

    def _grow(self, fitted: int) -> None:
        """Try more prompts at once after batches that fitted: those that did not may have been of
        long prompts, or memory is free again."""
        if fitted == self._most_prompts:
            self._fitted += 1
            if self._fitted >= _TRUSTED:
                self._most_prompts *= 2


def _generated(continuation: Continuation) -> Outcome:
    return Outcome(continuation.id, answer=continuation.answer())


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short, of the machine or of its GPU: another time it may do."""
    # torch.OutOfMemoryError, and what libraries of a GPU say under names of their own.
    text = f"{type(error).__name__} {words(error)}".lower()
    return isinstance(error, MemoryError) or "outofmemory" in text or "out of memory" in text


def _forgotten() -> PromptFailed:
    return PromptFailed("the engine gave no outcome for this prompt")
